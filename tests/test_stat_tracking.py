import json
import math

import numpy as np
import pytest
from conftest import GOLDENS

from ddpo_pytorch.stat_tracking import PerPromptStatTracker, normalize_rewards, spread_within_and_between


@pytest.mark.parametrize("buffer_size, min_count", [(6, 4), (32, 16)])
def test_advantages_equal_the_original(buffer_size, min_count):
    tracker = PerPromptStatTracker(buffer_size, min_count)
    for call in json.loads((GOLDENS / "stat_tracker.json").read_text()):
        advantages = tracker.update(call["prompts"], call["rewards"])
        # The original divided by 1e-6 where all rewards are equal, so that rounding of 1e-16 shows at 1e-10.
        np.testing.assert_allclose(advantages, call[f"advantages_{buffer_size}_{min_count}"], rtol=1e-9, atol=1e-8)


def test_statistics_by_hand():
    tracker = PerPromptStatTracker(buffer_size=3, min_count=2)
    # a: two rewards, own mean 2 and deviation 1; b: one, so the batch's mean 4 and deviation sqrt(26 / 3).
    advantages = tracker.update(["a", "a", "b"], [1.0, 3.0, 8.0])
    np.testing.assert_allclose(advantages, [-1, 1, 4 / math.sqrt(26 / 3)], rtol=1e-5)
    tracker.update(["a", "a"], [5.0, 7.0])
    assert tracker.get_stats()["a"] == {"mean": 5.0, "std": pytest.approx(math.sqrt(8 / 3)), "count": 3}


@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e10 + 0.1, 1e-12])
def test_equal_rewards_have_no_advantage_whatever_their_size(value):
    assert (PerPromptStatTracker(16, 2).update(["a"] * 7, [value] * 7) == 0).all()
    assert (normalize_rewards([value] * 7) == 0).all()


@pytest.mark.parametrize("dtype", [int, np.int64, np.float32])
def test_integer_and_float32_rewards_lose_nothing(dtype):
    rewards = np.array([16777216, 16777218, 16777220], dtype=dtype)
    expected = [-math.sqrt(1.5), 0, math.sqrt(1.5)]
    np.testing.assert_allclose(PerPromptStatTracker(8, 3).update(["a"] * 3, rewards), expected, rtol=1e-6)
    np.testing.assert_allclose(normalize_rewards(rewards), expected, rtol=1e-6)


@pytest.mark.parametrize("failure", [math.nan, math.inf, -math.inf])
def test_a_failed_sample_enters_no_buffer_and_moves_nobody(failure):
    with_failure, without = PerPromptStatTracker(8, 2), PerPromptStatTracker(8, 2)
    advantages = with_failure.update(["a", "a", "b", "a"], [1.0, failure, 5.0, 4.0])
    expected = without.update(["a", "b", "a"], [1.0, 5.0, 4.0])
    assert advantages[1] == 0
    np.testing.assert_array_equal(advantages[[0, 2, 3]], expected)
    assert with_failure.state_dict() == without.state_dict()
    assert (normalize_rewards([failure, failure]) == 0).all()


def test_prompts_are_compared_as_written():
    tracker = PerPromptStatTracker(8, 1)
    tracker.update(["Cat", "cat", "cat "], [1.0, 2.0, 3.0])
    assert set(tracker.stats) == {"Cat", "cat", "cat "}


def test_state_survives_json_exactly():
    tracker, restored = PerPromptStatTracker(4, 2), PerPromptStatTracker(4, 2)
    for rewards in ([0.1, 1 / 3], [math.pi, 1e-300]):
        tracker.update(["a", "ü b"], rewards)
    restored.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    later = (["a", "ü b", "a", "a"], [0.2, 0.3, 0.4, 0.5])
    np.testing.assert_array_equal(tracker.update(*later), restored.update(*later))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"buffer_size \(4\).*min_count \(8\)"):
        PerPromptStatTracker(4, 8)
    with pytest.raises(ValueError, match="2 prompts and 1 rewards"):
        PerPromptStatTracker(4, 4).update(["a", "b"], [1.0])


def test_spread_within_and_between_prompts_by_hand():
    prompts = ["a", "b", "a", "b", "c"]
    rewards = [1.0, 10.0, 3.0, 14.0, np.nan]
    # Within: deviations 1, 2, 1, 2. Between: the means 2, 12, 2, 12 around 7.
    assert spread_within_and_between(prompts, rewards) == pytest.approx((np.sqrt(2.5), 5.0))
    within, between = spread_within_and_between(prompts, rewards)
    assert within**2 + between**2 == pytest.approx(np.var([1, 10, 3, 14]))
    assert spread_within_and_between(["a", "A"], [1.0, 1.0 + 2**-40]) == (0, pytest.approx(2**-41))
    assert spread_within_and_between(["a", "b"], [0.1, 0.1]) == (0, 0)
    assert spread_within_and_between(["a"], [np.nan]) == (0, 0)


def test_the_share_of_prompts_with_statistics_of_their_own():
    tracker = PerPromptStatTracker(4, 2)
    tracker.update(["a", "b", "b", "c"], [1.0, 2.0, 3.0, np.nan])
    assert tracker.own_share == 0.5  # b of a and b; c failed
    tracker.update(["a", "b"], [1.0, 2.0])
    assert tracker.own_share == 1.0
