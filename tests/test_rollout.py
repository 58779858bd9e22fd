import random
import threading
import time

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from ddpo_pytorch import policy
from ddpo_pytorch.rewards import jpeg_compressibility
from ddpo_pytorch.rollout import (
    Rollout,
    captions,
    combined_rewards,
    compute_advantages,
    draw_prompts,
    gather_samples,
    own_share,
    sample_epoch,
)
from ddpo_pytorch.scoring import RewardFailure, RewardWorkers, Scores
from ddpo_pytorch.stat_tracking import PerPromptStatTracker
from ddpo_pytorch.weighted_sum import Component, WeightedSum


@pytest.fixture
def model(pipeline):
    pipeline.scheduler.set_timesteps(2)
    return policy.make_policy(pipeline, pipeline.unet.eval(), pipeline.scheduler, 5.0, 1.0)


def rollout_with(
    model, reward_fn, prompts=("a", "b", "c", "d"), max_failed_fraction=1.0, on_step=lambda: None
) -> tuple[Rollout, RewardWorkers]:
    workers = RewardWorkers(reward_fn, "mine", torch.device("cpu"), 1, 60.0, len(prompts), max_failed_fraction)
    generator = torch.Generator().manual_seed(0)
    metadata = [{"n": i} for i in range(len(prompts))]
    return sample_epoch(model, list(prompts), metadata, 2, generator, workers, on_step), workers


def collect(workers: RewardWorkers) -> Scores:
    return workers.collect(lambda: None)


def test_rewards_get_finished_images_with_their_prompts_and_metadata(model):
    seen = []

    def reward_fn(images, prompts, metadata):
        seen.append((images, prompts, metadata))
        return torch.arange(2.0) + 10 * metadata[0]["n"], {}

    steps = []
    rollout, workers = rollout_with(model, reward_fn, on_step=lambda: steps.append(1))
    np.testing.assert_array_equal(collect(workers).rewards, [0, 1, 20, 21])
    images, prompts, metadata = zip(*seen, strict=True)
    assert prompts == (["a", "b"], ["c", "d"]) and metadata == ([{"n": 0}, {"n": 1}], [{"n": 2}, {"n": 3}])
    for batch in images:
        assert batch.shape == (2, 3, 16, 16) and batch.dtype == torch.float32 and batch.device.type == "cpu"
    assert len(rollout.trajectories) == 4 and len(steps) == 4
    expected = (torch.cat(images) * 255).round().permute(0, 2, 3, 1).numpy().astype(np.uint8)
    np.testing.assert_array_equal(rollout.images, expected)


def test_rewards_run_in_threads_while_the_next_batch_is_sampled(model):
    second_batch_started = threading.Event()
    threads = set()

    def reward_fn(images, prompts, metadata):
        threads.add(threading.current_thread())
        # The first batch's reward ends only once the second batch is being denoised.
        assert second_batch_started.wait(timeout=30)
        assert not torch.is_grad_enabled()
        return [0.0] * len(prompts)

    steps = []

    def on_step():
        steps.append(1)
        if len(steps) == 3:
            second_batch_started.set()

    collect(rollout_with(model, reward_fn, on_step=on_step)[1])
    assert threading.main_thread() not in threads


def test_a_wrong_result_ends_the_epoch_with_the_functions_name(model):
    with pytest.raises(RewardFailure, match=r"^reward function mine returned rewards of shape \(1,\)"):
        collect(rollout_with(model, lambda images, prompts, metadata: [1.0])[1])


def test_a_reward_that_raises_ends_the_epoch_before_the_rest_is_sampled(model):
    raised = threading.Event()

    def reward_fn(images, prompts, metadata):
        try:
            raise KeyError("answers")
        finally:
            raised.set()

    steps = []

    def on_step():
        steps.append(1)
        if len(steps) == 3:
            assert raised.wait(timeout=30)
            time.sleep(0.2)  # until the future knows

    with pytest.raises(RewardFailure, match="reward function mine failed with KeyError: 'answers'"):
        rollout_with(model, reward_fn, prompts="abcdefghijkl", on_step=on_step)
    assert len(steps) == 3  # of 12


def test_failed_samples_are_nan_until_they_are_too_many(model):
    def reward_fn(images, prompts, metadata):
        return [float("nan") if p == "b" else 1.0 for p in prompts], {"failures": ["lost"] * len(prompts)}

    rollout, workers = rollout_with(model, reward_fn)
    accelerator, scores = Accelerator(cpu=True), collect(workers)
    np.testing.assert_array_equal(scores.rewards, [1, np.nan, 1, 1])
    gather_samples(accelerator, rollout, scores, "mine", 0.25, 0)
    with pytest.raises(RewardFailure, match="mine failed for 1 of 4 samples.*max_failed_fraction 0.1: 1 x lost"):
        gather_samples(accelerator, rollout, scores, "mine", 0.1, 0)


def test_a_picture_that_is_not_finite_is_a_failed_sample_and_not_a_black_one(model, monkeypatch):
    sample = type(model).sample

    def broken(self, *args):
        images, trajectories = sample(self, *args)
        images[1, 0, 3, 3] = torch.nan
        return images, trajectories

    monkeypatch.setattr(type(model), "sample", broken)
    rollout, workers = rollout_with(model, jpeg_compressibility())
    scores = collect(workers)
    np.testing.assert_array_equal(np.isnan(scores.rewards), [False, True, False, True])
    assert scores.failures == [None, "the picture is not finite"] * 2
    assert rollout.images.dtype == np.uint8


def test_a_trajectory_that_is_not_finite_counts_for_nothing_in_the_update(model, monkeypatch):
    from ddpo_pytorch.losses import ppo_clipped_loss
    from ddpo_pytorch.trajectories import take

    noise = torch.randn

    def overflowing(*args, **kwargs):
        drawn = noise(*args, **kwargs)
        drawn[0] = torch.inf
        return drawn

    monkeypatch.setattr(torch, "randn", overflowing)
    images, trajectories = model.sample(["a", "b"], torch.Generator().manual_seed(0))
    monkeypatch.undo()
    assert trajectories.log_probs[0].isnan().all() and trajectories.log_probs[1].isfinite().all()
    assert trajectories.latents.isfinite().all() and not images[0].isfinite().all()

    model.unet.requires_grad_(True)
    gradients = []
    for samples in (torch.tensor([0, 1]), torch.tensor([1])):
        batch = take(trajectories, torch.tensor([0.0, 1.0]), samples, torch.zeros_like(samples))
        loss, statistics = ppo_clipped_loss(
            model.log_prob(batch), batch.old_log_probs, batch.advantages, 1e-4, 5.0, 256
        )
        model.unet.zero_grad()
        (loss * len(samples)).backward()
        assert all(value.isfinite() for value in statistics.values())
        gradients.append([p.grad.clone() for p in model.unet.parameters() if p.grad is not None])
    for with_failed, without in zip(*gradients, strict=True):
        # The same sample in a batch of another size: equal to rounding of the largest entries.
        assert (with_failed - without).abs().max() < 1e-4 * max(1.0, without.abs().max())


def test_integer_rewards_do_not_truncate_advantages(model):
    rewards = collect(rollout_with(model, lambda images, prompts, metadata: np.array([1, 2]))[1]).rewards
    for tracker in (None, PerPromptStatTracker(16, 16)):
        advantages = compute_advantages(tracker, ["a", "b", "c", "d"], rewards)
        np.testing.assert_allclose(advantages, [-1, 1, -1, 1], rtol=1e-5)


def test_gathered_samples_keep_prompts_whole_and_images_spread_over_batches(model):
    long_prompt = "a very long prompt, " * 40
    prompts = [long_prompt + str(i) for i in range(4)]

    def reward_fn(images, prompts, metadata):
        numbers = [float(p[-1]) for p in prompts]
        return numbers, {"half": np.array(numbers) / 2, "reply": [f"said {n:g}" for n in numbers]}

    rollout, workers = rollout_with(model, reward_fn, prompts)
    accelerator, scores = Accelerator(cpu=True), collect(workers)
    gathered_prompts, gathered, picked, _ = gather_samples(accelerator, rollout, scores, "mine", 0.0, 2)
    assert gathered_prompts == prompts and gathered.rewards.tolist() == [0, 1, 2, 3]
    assert gathered.details["half"].tolist() == [0, 0.5, 1, 1.5]
    assert own_share(accelerator, gathered.rewards).tolist() == [0, 1, 2, 3]
    assert captions(picked, prompts, gathered.rewards, gathered) == [
        f"{prompts[0]} | 0.00 | half 0 | reply: said 0",
        f"{prompts[3]} | 3.00 | half 1.5 | reply: said 3",
    ]
    assert list(picked) == [0, 3]
    np.testing.assert_array_equal(picked[3], rollout.images[3])
    assert gather_samples(accelerator, rollout, scores, "mine", 0.0, 0)[2:] == ({}, {})


def test_the_best_and_the_worst_picture_are_kept_beside_those_that_are_spread_evenly(model):
    def reward_fn(images, prompts, metadata):
        return [[2.0, 9.0, -1.0, 3.0][m["n"]] for m in metadata]

    rollout, workers = rollout_with(model, reward_fn)
    scores = collect(workers)
    _, _, picked, extremes = gather_samples(Accelerator(cpu=True), rollout, scores, "mine", 0.0, 1)
    assert list(picked) == [0] and sorted(extremes) == [1, 2]
    np.testing.assert_array_equal(extremes[1], rollout.images[1])
    scores.rewards[:] = np.nan
    scores.failures = ["lost"] * 4
    assert gather_samples(Accelerator(cpu=True), rollout, scores, "mine", 1.0, 1)[3] == {}


def test_a_weighted_sum_is_taken_of_all_samples_of_an_epoch_at_once(model):
    def by_index(images, prompts, metadata):
        return [float(m["n"]) for m in metadata]

    mixed = WeightedSum([Component("one", 1.0, True, by_index), Component("two", 2.0, True, by_index)])
    rollout, workers = rollout_with(model, mixed)
    _, scores, *_ = gather_samples(Accelerator(cpu=True), rollout, collect(workers), "mine", 0.0, 0)
    # 0 to 3 have mean 1.5 and deviation sqrt(1.25).
    np.testing.assert_allclose(combined_rewards(mixed, scores), 3 * (np.arange(4) - 1.5) / np.sqrt(1.25))
    plain = Scores(np.array([1.0, 2.0]))
    assert combined_rewards(by_index, plain) is plain.rewards


def test_prompts_are_drawn_before_a_reward_thread_can_disturb_them():
    def prompt_fn(words):
        return random.choice(words), {"r": random.random()}

    random.seed(1)
    expected = draw_prompts(prompt_fn, {"words": ["a", "b"]}, 5, "mine")
    random.seed(1)
    assert draw_prompts(prompt_fn, {"words": ["a", "b"]}, 5, "mine") == expected
    assert len(expected[0]) == len(expected[1]) == 5
