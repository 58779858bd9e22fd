"""What each prompt usually earns, and advantages relative to it. All arithmetic is float64."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def _mean_and_std(values: np.ndarray) -> tuple[float, float]:
    """Mean and population standard deviation; equal values give exactly themselves and 0, whatever their size."""
    mean = values[0] + (values - values[0]).mean()
    return float(mean), float(np.sqrt(((values - mean) ** 2).mean()))


def normalize_rewards(rewards: npt.ArrayLike, epsilon: float = 1e-8) -> np.ndarray:
    """Advantages over the batch's own mean and standard deviation: float64 (n,). NaN counts for nothing, gets 0."""
    rewards = np.asarray(rewards, dtype=np.float64)
    valid = np.isfinite(rewards)
    advantages = np.zeros_like(rewards)
    if valid.any():
        mean, std = _mean_and_std(rewards[valid])
        advantages[valid] = (rewards[valid] - mean) / (std + epsilon)
    return advantages


def spread_within_and_between(prompts: Sequence[str], rewards: npt.ArrayLike) -> tuple[float, float]:
    """Standard deviations of one epoch's rewards around their prompt's mean, and of those means around the whole mean.

    Their squares add up to the variance of all rewards. NaN rewards are left out; (0, 0) if there are no others.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    valid = np.isfinite(rewards)
    if not valid.any():
        return 0.0, 0.0
    values = rewards[valid]
    _, prompt_of = np.unique(np.array(prompts, dtype=object)[valid].astype(str), return_inverse=True)
    means = (np.bincount(prompt_of, values - values[0]) / np.bincount(prompt_of))[prompt_of] + values[0]
    return float(np.sqrt(((values - means) ** 2).mean())), _mean_and_std(means)[1]


class PerPromptStatTracker:
    """Normalises rewards by the mean and standard deviation that their prompt earned lately.

    Source: Black et al. 2023 (arXiv 2305.13301), section 4.4 and appendix.
    """

    def __init__(self, buffer_size: int, min_count: int) -> None:
        """
        Args:
            buffer_size: how many of a prompt's latest rewards are kept.
            min_count: with fewer than this many, the whole batch's mean and standard deviation are used instead.
        """
        if not 1 <= min_count <= buffer_size:
            raise ValueError(
                f"per_prompt_stat_tracking.buffer_size ({buffer_size}) must be at least min_count ({min_count}), and "
                "min_count at least 1: a smaller buffer never holds enough rewards to be used"
            )
        self.buffer_size = buffer_size
        self.min_count = min_count
        self.stats: dict[str, deque[float]] = {}
        self.own_share = 0.0  # of the prompts of the last update, those normalised by their own statistics

    def update(self, prompts: Sequence[str], rewards: npt.ArrayLike) -> np.ndarray:
        """Take in one epoch's rewards, then return their advantages: float64 (n,), in the order given.

        A reward that is not finite is a failed sample: it enters no buffer and no statistic, and its advantage is 0.
        Prompts are compared as written.

        Raises:
            ValueError: different numbers of prompts and rewards.
        """
        rewards = np.asarray(rewards, dtype=np.float64)
        if len(prompts) != len(rewards):
            raise ValueError(f"got {len(prompts)} prompts and {len(rewards)} rewards; each prompt needs one reward")
        advantages = np.zeros_like(rewards)
        valid = np.isfinite(rewards)
        self.own_share = 0.0
        if not valid.any():
            return advantages
        batch_mean, batch_std = _mean_and_std(rewards[valid])
        indices_by_prompt: dict[str, list[int]] = {}
        for index in np.flatnonzero(valid).tolist():
            indices_by_prompt.setdefault(prompts[index], []).append(index)
        has_own = 0
        for prompt, indices in indices_by_prompt.items():
            buffer = self.stats.setdefault(prompt, deque(maxlen=self.buffer_size))
            buffer.extend(float(reward) for reward in rewards[indices])
            has_own += len(buffer) >= self.min_count
            if len(buffer) < self.min_count:
                mean, std = batch_mean, batch_std
            else:
                mean, std = _mean_and_std(np.array(buffer))
            advantages[indices] = (rewards[indices] - mean) / (std + 1e-6)
        self.own_share = has_own / len(indices_by_prompt)
        return advantages

    def get_stats(self) -> dict[str, dict[str, float]]:
        """`mean`, `std` and `count` of each prompt's buffer."""
        result = {}
        for prompt, buffer in self.stats.items():
            mean, std = _mean_and_std(np.array(buffer))
            result[prompt] = {"mean": mean, "std": std, "count": len(buffer)}
        return result

    def state_dict(self) -> dict[str, list[float]]:
        """The buffers, as JSON can hold them; float64 survives JSON exactly."""
        return {prompt: list(buffer) for prompt, buffer in self.stats.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Take the buffers of `state_dict`; of a longer one the latest `buffer_size` rewards stay."""
        self.stats = {prompt: deque(values, maxlen=self.buffer_size) for prompt, values in state.items()}
