from collections import Counter

import torch

from ddpo_pytorch.trajectories import Trajectories, shuffled_updates, take

N, T = 6, 5


def numbered() -> tuple[Trajectories, torch.Tensor]:
    """Trajectories whose every entry tells its sample and step: sample * 100 + step."""
    number = torch.arange(N)[:, None] * 100 + torch.arange(T + 1)
    return Trajectories(
        latents=number[:, :, None, None, None].float().expand(-1, -1, 2, 3, 3),
        timesteps=number[:, :T],
        prev_timesteps=number[:, :T] + 7,
        log_probs=number[:, :T].float(),
        prompt_embeds=torch.arange(N)[:, None, None].float().expand(-1, 4, 2),
    ), torch.arange(N).float()


def test_what_belongs_together_stays_together():
    trajectories, advantages = numbered()
    for update in shuffled_updates(N, T, T, 2, 3, torch.Generator().manual_seed(0)):
        for samples, steps in update:
            batch = take(trajectories, advantages, samples, steps)
            number = samples * 100 + steps
            assert (batch.timesteps == number).all() and (batch.prev_timesteps == number + 7).all()
            assert (batch.old_log_probs == number).all()
            assert (batch.latents == number[:, None, None, None]).all()
            assert (batch.next_latents == number[:, None, None, None] + 1).all()
            assert (batch.prompt_embeds == samples[:, None, None]).all() and (batch.advantages == samples).all()


def test_every_step_of_every_sample_is_trained_once_per_inner_epoch():
    updates = list(shuffled_updates(N, T, T, 2, 1, torch.Generator().manual_seed(0)))
    assert len(updates) == 3 and all(len(update) == T for update in updates)
    pairs = Counter(
        (int(i), int(j)) for update in updates for samples, steps in update for i, j in zip(samples, steps, strict=True)
    )
    assert pairs == Counter((i, j) for i in range(N) for j in range(T))


def test_a_fraction_of_the_timesteps_is_drawn_for_each_sample_apart():
    [update] = shuffled_updates(N, T, 2, N, 1, torch.Generator().manual_seed(0))
    samples = update[0][0]
    chosen = torch.stack([steps for _, steps in update])
    assert chosen.shape == (2, N) and (chosen[0] != chosen[1]).all()
    assert len({tuple(sorted(pair)) for pair in chosen.T.tolist()}) > 1
    assert sorted(samples.tolist()) == list(range(N)) and samples.tolist() != list(range(N))


def test_the_order_is_a_function_of_the_generator():
    def order(seed):
        return [
            [(i.tolist(), j.tolist()) for i, j in update]
            for update in shuffled_updates(N, T, T, 2, 1, torch.Generator().manual_seed(seed))
        ]

    assert order(1) == order(1) != order(2)


def test_cat_joins_samples():
    trajectories, _ = numbered()
    joined = Trajectories.cat([trajectories, trajectories])
    assert len(joined) == 2 * N and joined.num_steps == T
    assert (joined.latents[N:] == trajectories.latents).all()
