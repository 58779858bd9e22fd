"""What must hold for any input, tried on inputs that hypothesis makes up."""

import math

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpo_pytorch.metrics import flatten
from ddpo_pytorch.run_plan import (
    ConfigError,
    _known_keys,
    _parsed,
    apply_overrides,
    load_config,
    make_plan,
    split_overrides,
)
from ddpo_pytorch.stat_tracking import PerPromptStatTracker
from ddpo_pytorch.trajectories import Trajectories, shuffled_updates, take

rewards = st.floats(-1e6, 1e6) | st.just(math.nan)
epochs = st.lists(
    st.lists(st.tuples(st.sampled_from(["a", "A", "b", "c"]), rewards), min_size=1), min_size=1, max_size=4
)


@given(epochs, st.integers(1, 6), st.integers(0, 3))
def test_the_tracker_equals_its_definition(calls, min_count, more):
    tracker = PerPromptStatTracker(min_count + more, min_count)
    seen: dict[str, list[float]] = {}
    for call in calls:
        prompts, values = zip(*call, strict=True)
        advantages = tracker.update(prompts, values)
        for prompt, value in call:
            if math.isfinite(value):
                seen.setdefault(prompt, []).append(value)
        finite = [value for value in values if math.isfinite(value)]
        for prompt, value, advantage in zip(prompts, values, advantages, strict=True):
            if not math.isfinite(value):
                assert advantage == 0
                continue
            own = seen[prompt][-tracker.buffer_size :]
            base = own if len(own) >= min_count else finite
            expected = (value - np.mean(base)) / (np.std(base) + 1e-6)
            # Of nearly equal numbers the definition itself knows the deviation to rounding of the numbers only.
            slack = 1e-9 * max(map(abs, base)) / (np.std(base) + 1e-6)
            assert advantage == pytest.approx(expected, rel=1e-6, abs=1e-9 + slack)
        assert np.isfinite(advantages).all()


@given(st.lists(st.sampled_from(["a", "b"]), min_size=1), st.floats(-1e12, 1e12))
def test_equal_rewards_give_exactly_0_whatever_their_size(prompts, reward):
    tracker = PerPromptStatTracker(4, 2)
    for _ in range(3):
        assert (tracker.update(prompts, [reward] * len(prompts)) == 0).all()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(-10, 10)), min_size=2), st.data())
def test_a_failed_reward_moves_nobody_elses_advantage(pairs, data):
    prompts, values = map(list, zip(*pairs, strict=True))
    where = data.draw(st.integers(0, len(pairs)))
    with_failed = PerPromptStatTracker(8, 2), PerPromptStatTracker(8, 2)
    alone = with_failed[0].update(prompts, values)
    prompts.insert(where, "a")
    values.insert(where, math.nan)
    together = with_failed[1].update(prompts, values)
    np.testing.assert_array_equal(np.delete(together, where), alone)
    assert together[where] == 0 and with_failed[0].state_dict() == with_failed[1].state_dict()


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.data())
def test_shuffles_keep_what_belongs_together(batch_size, groups, updates, num_steps, data):
    """Every entry is made from its sample and step, so that any mix-up shows."""
    n = batch_size * groups * updates
    num_train = data.draw(st.integers(1, num_steps))
    sample, step = torch.arange(n)[:, None], torch.arange(num_steps)
    latents = (100 * sample + torch.arange(num_steps + 1)).float()[:, :, None, None, None]
    trajectories = Trajectories(
        latents=latents,
        timesteps=1000 * sample + step,
        prev_timesteps=1000 * sample + step - 1,
        log_probs=(sample + 0.01 * step).float(),
        prompt_embeds=sample[:, :, None].float(),
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    drawn = []
    plan = list(shuffled_updates(n, num_steps, num_train, batch_size, groups, generator))
    assert len(plan) == updates and all(len(update) == groups * num_train for update in plan)
    for update in plan:
        for samples, steps in update:
            assert len(samples) == batch_size
            batch = take(trajectories, torch.arange(n).float(), samples, steps)
            for b, (i, j) in enumerate(zip(samples.tolist(), steps.tolist(), strict=True)):
                assert batch.latents[b].item() == 100 * i + j and batch.next_latents[b].item() == 100 * i + j + 1
                assert batch.timesteps[b] == 1000 * i + j and batch.prev_timesteps[b] == 1000 * i + j - 1
                assert batch.old_log_probs[b] == trajectories.log_probs[i, j]
                assert batch.prompt_embeds[b].item() == batch.advantages[b].item() == i
                drawn.append((i, j))
    # Each sample once, with num_train different steps of its own.
    assert len(set(drawn)) == len(drawn) == n * num_train


BASE = str(ROOT / "config" / "base.py")
small = st.integers(1, 6)


@settings(deadline=None)
@given(small, small, small, small, small, st.sampled_from([0.1, 0.29, 0.5, 1.0]), small)
def test_the_plan_adds_up_or_is_refused(batch, batches, train_batch, accumulated, processes, fraction, inner_epochs):
    config = load_config(BASE)
    config.sample.batch_size, config.sample.num_batches_per_epoch = batch, batches
    config.train.batch_size, config.train.gradient_accumulation_steps = train_batch, accumulated
    config.train.timestep_fraction, config.train.num_inner_epochs = fraction, inner_epochs
    fits = batch % train_batch == 0 and batch * batches % (train_batch * accumulated) == 0
    if not fits or batch * batches * processes == 1:
        with pytest.raises(ConfigError):
            make_plan(config, processes)
        return
    plan = make_plan(config, processes)
    assert plan.samples_per_epoch_total == batch * batches * processes
    assert plan.updates_per_inner_epoch * plan.batch_per_update_total == plan.samples_per_epoch_total
    assert plan.num_train_timesteps == {0.1: 5, 0.29: 14, 0.5: 25, 1.0: 50}[fraction]
    micro_batches = plan.samples_per_epoch_per_process // train_batch * plan.num_train_timesteps * inner_epochs
    assert plan.micro_batches_per_epoch == micro_batches


@given(st.text(), st.sampled_from(["text", 1, 2.5, True, (1, 2)]))
def test_any_text_for_an_option_is_a_value_or_a_config_error(text, current):
    try:
        value = _parsed("key", text, current)
    except ConfigError:
        return
    if isinstance(current, str):
        assert value == text
    if isinstance(current, tuple):
        assert isinstance(value, tuple)


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=20), st.text(max_size=20))
def test_any_option_on_the_command_line_is_set_or_refused(key, text):
    rest, overrides = split_overrides([f"--config.{key}={text}", "other"])
    assert rest == ["other"] and len(overrides) == 1
    config = load_config(BASE)
    try:
        apply_overrides(config, overrides)
        make_plan(config, 1)
    except ConfigError:
        pass


KEYS = sorted({*_known_keys(load_config(BASE)), *(f"prompt_fn_kwargs.{name}" for name in ("path", "low", "x"))})
words = st.sampled_from(
    ["", "None", "True", "nan", "inf", "-inf", "1e999", "0", "-1", "1.0", "3.5", "{}", "()", "auto"]
)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(KEYS), words | st.text(max_size=8)), min_size=1, max_size=3))
def test_any_value_of_any_option_makes_a_plan_or_a_config_error(pairs):
    config = load_config(BASE)
    try:
        apply_overrides(config, pairs)
        plan = make_plan(config, 2)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert plan.updates_per_epoch >= 1 and plan.num_train_timesteps >= 1
    numbers = [value for value in flatten(config.to_dict()).values() if isinstance(value, float)]
    assert all(math.isfinite(number) for number in numbers)


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.booleans())
def test_a_number_survives_the_command_line(value):
    assert _parsed("key", repr(value), type(value)()) == value
