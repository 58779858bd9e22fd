"""Several rewards as one: a weighted sum of components, each on a scale of its own that is measured as the run goes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddpo_pytorch.scoring import FAILURES, RewardFn, checked_scores


@dataclass
class RunningMoments:
    """Count, mean and squared deviation of all numbers seen so far, to which batches are merged exactly.

    Source: Chan, Golub and LeVeque 1983, pairwise update of the sum of squared deviations.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def update(self, values: np.ndarray) -> None:
        """Take in numbers of any shape; those that are not finite are passed over."""
        values = values[np.isfinite(values)]
        if not values.size:
            return
        mean = float(values.mean())
        delta, total = mean - self.mean, self.count + values.size
        self.squares += float(((values - mean) ** 2).sum()) + delta**2 * self.count * values.size / total
        self.mean += delta * values.size / total
        self.count = total

    @property
    def std(self) -> float:
        """Population standard deviation; 0 before there are numbers, and where they differ by rounding alone."""
        std = math.sqrt(self.squares / self.count) if self.count else 0.0
        return std if std > 1e-12 * abs(self.mean) else 0.0


@dataclass(frozen=True)
class Component:
    """One reward of a sum.

    Attributes:
        label: its name in metrics and captions.
        normalize: subtract its running mean and divide by its running standard deviation before weighting.
    """

    label: str
    weight: float
    normalize: bool
    reward_fn: RewardFn


class WeightedSum:
    """A reward function: calls its components, and adds them up.

    What it returns for a batch is the sum on the scales known so far, with every component's own reward in the info.
    Training calls `update` once per epoch with the components' rewards of all processes instead, so that every sample
    of an epoch is on one scale, the same on all processes.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self.components = components
        self.moments = {component.label: RunningMoments() for component in components if component.normalize}

    def __call__(self, images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> tuple[np.ndarray, dict]:
        info: dict[str, Any] = {}
        failures: list[str | None] = [None] * len(prompts)
        own = {}
        for component in self.components:
            try:
                result = component.reward_fn(images, prompts, metadata)
            except Exception as error:
                raise RuntimeError(f"{component.label} failed with {type(error).__name__}: {error}") from error
            scores = checked_scores(result, len(prompts), component.label)
            own[component.label] = scores.rewards
            info |= {f"{component.label}/{name}": v for name, v in {**scores.details, **scores.notes}.items()}
            for i, reason in enumerate(scores.failures):
                failures[i] = failures[i] or (reason and f"{component.label}: {reason}")
        return self.combine(own), {**info, **own, FAILURES: failures}

    def combine(self, rewards: Mapping[str, np.ndarray]) -> np.ndarray:
        """The weighted sum on the present scales, float64 (n,); NaN where any component is.

        A component whose rewards were all equal so far has no scale and adds 0; without any rewards so far, its
        rewards as they are.

        Args:
            rewards: float64 (n,) by component.
        """
        terms = []
        for component in self.components:
            values = rewards[component.label]
            moments = self.moments.get(component.label)
            if moments is not None and moments.count:
                values = (values - moments.mean) / moments.std if moments.std else values * 0
            terms.append(component.weight * values)
        return np.sum(terms, axis=0)

    def update(self, rewards: Mapping[str, np.ndarray]) -> np.ndarray:
        """Take an epoch's rewards into the scales, then `combine` them."""
        for label, moments in self.moments.items():
            moments.update(rewards[label])
        return self.combine(rewards)

    def state_dict(self) -> dict[str, list[float]]:
        return {label: [m.count, m.mean, m.squares] for label, m in self.moments.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take up saved scales; a component that was not in the sum then starts afresh."""
        for label in self.moments.keys() & state.keys():
            count, mean, squares = state[label]
            self.moments[label] = RunningMoments(int(count), mean, squares)
