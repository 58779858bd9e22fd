"""Reward functions at work: in threads, with one defined outcome for everything that can go wrong.

A sample that cannot be scored is NaN and keeps its reason. A reward function that raises, takes too long, returns what
are no rewards, or fails for too many samples ends the run. Knows nothing of training.
"""

import collections
import concurrent.futures
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ddpo_pytorch.exits import ModelFailure, RunFailure

RewardFn = Callable[[Any, Sequence[str], Sequence[dict]], Any]

# The key of a reward function's info that says, image by image, why it could not be scored: text or None.
FAILURES = "failures"
# Why a sample failed that half precision, or a ruined model, could not draw
LARGEST_REWARD = 1e100  # beyond it variances overflow
NOT_DRAWN = "the picture is not finite"


class WrongResult(ValueError):
    """What a reward function returned is no rewards; the message has its name."""


class RewardFailure(RunFailure):
    """A reward function ends the run; the message has its name."""


@dataclass
class Scores:
    """What a reward function said of n images.

    Attributes:
        rewards: float64 (n,), NaN for a failed sample.
        details: float64 (n,) by name: further numbers per image.
        notes: n texts by name, for instance a vision-language model's replies.
        failures: n reasons; None where the sample was scored.
    """

    rewards: np.ndarray
    details: dict[str, np.ndarray] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    failures: list[str | None] = field(default_factory=list)

    @staticmethod
    def cat(parts: "Sequence[Scores]") -> "Scores":
        """Scores of several batches, in order. A name that only some batches have is NaN or empty in the others."""

        def column(name: str, kind: str, empty: Any) -> list:
            return [v for p in parts for v in getattr(p, kind).get(name, [empty] * len(p.rewards))]

        details = sorted({name for part in parts for name in part.details})
        notes = sorted({name for part in parts for name in part.notes})
        return Scores(
            rewards=np.array([r for part in parts for r in part.rewards], dtype=np.float64),
            details={name: np.array(column(name, "details", math.nan), dtype=np.float64) for name in details},
            notes={name: column(name, "notes", "") for name in notes},
            failures=[failure for part in parts for failure in part.failures],
        )


def _length(values: Any) -> int | None:
    try:
        return len(values)
    except TypeError:  # no list, or a tensor or array of one number
        return None


def _numbers(values: Any) -> np.ndarray:
    """A tensor (on any device, with or without gradient), array or list of numbers as float64; None is NaN.

    Raises:
        TypeError, ValueError, RuntimeError: they are no numbers.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values if values.is_complex() else values.double()).numpy()
    if isinstance(values, (list, tuple)):
        # Tensors of one number each, of any type and with or without gradient, are numbers too.
        values = [math.nan if v is None else v.item() if hasattr(v, "item") else v for v in values]
    array = np.array(values)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"they are of type {array.dtype}")
    return array.astype(np.float64)


def checked_scores(result: Any, batch_size: int, name: str) -> Scores:
    """A reward function's result, whatever it came as.

    Accepts (rewards, info) or rewards alone; rewards are a tensor (on any device, with or without gradient), array or
    list of numbers. Entries that are not finite become NaN. Of the info, what has one entry per image is kept: numbers
    as details, texts as notes, and "failures" as the reasons of failed samples.

    Raises:
        WrongResult: not numbers, or not of shape (B,); the message names the function.
    """
    has_info = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    given, info = result if has_info else (result, {})
    expected = f"it must return one number per image, shape ({batch_size},), alone or as (rewards, info)"
    if given is None:
        raise WrongResult(f"reward function {name} returned None; {expected}")
    try:
        rewards = _numbers(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WrongResult(f"reward function {name} returned what are not numbers ({error}); {expected}") from error
    if rewards.shape != (batch_size,):
        raise WrongResult(f"reward function {name} returned rewards of shape {rewards.shape}; {expected}")
    usable = np.isfinite(rewards) & (np.abs(rewards) <= LARGEST_REWARD)

    details, notes = {}, {}
    for key, values in info.items():
        if key == FAILURES or isinstance(values, str) or _length(values) != batch_size:
            continue
        if isinstance(values, (list, tuple)) and all(isinstance(v, str) for v in values):
            notes[str(key)] = list(values)
            continue
        try:
            numbers = _numbers(values)
        except (TypeError, ValueError, RuntimeError):
            continue
        if numbers.shape == (batch_size,):
            details[str(key)] = np.where(np.isfinite(numbers), numbers, np.nan)

    reasons = info.get(FAILURES)
    if reasons is None:
        reasons = [None] * batch_size
    elif isinstance(reasons, str) or _length(reasons) != batch_size:
        raise WrongResult(
            f'reward function {name} returned "{FAILURES}" {reasons!r}; it must be one text or None per image, '
            f"{batch_size} in all"
        )
    failures = [
        None if is_usable else str(reason or f"it returned {reward}")
        for reward, is_usable, reason in zip(rewards.tolist(), usable, reasons, strict=True)
    ]
    return Scores(np.where(usable, rewards, np.nan), details, notes, failures)


def too_many_failed(name: str, failed: int, total: int, limit: float, reasons: Sequence[str | None]) -> RunFailure:
    """The error that ends a run; the most frequent reasons are in it, with how often each came up.

    A ModelFailure if most of the pictures could not be drawn, else a RewardFailure.

    Args:
        limit: config.max_failed_fraction.
    """
    counts = collections.Counter(reason for reason in reasons if reason).most_common(3)
    why = "; ".join(f"{count} x {reason}" for reason, count in counts)
    kind = ModelFailure if counts and counts[0][0] == NOT_DRAWN else RewardFailure
    return kind(
        f"reward function {name} failed for {failed} of {total} samples, which is more than "
        f"config.max_failed_fraction {limit}: {why}"
    )


@dataclass
class _Job:
    """A batch on its way to being scored."""

    future: "Future[Scores]"
    times: list[float] = field(default_factory=list)  # when a thread took it up, and when it was done


def _beside(device: torch.device) -> dict[str, Any]:
    """Options for threads that work beside one that trains on this device."""
    if device.type != "cuda":
        # A second pool of OpenMP threads makes the first one's go to sleep after each operation: training the embedded
        # model takes twice as long, also when the rewards are done.
        return {"initializer": torch.set_num_threads, "initargs": (1,)}
    # The current device is a thread's own, and starts as the first.
    # "cuda" without a number, as a single process has it, is the current one.
    index = torch.cuda.current_device() if device.index is None else device.index
    return {"initializer": torch.cuda.set_device, "initargs": (index,)}


class RewardWorkers:
    """Threads that score batches of images while the next ones are being denoised."""

    def __init__(
        self,
        reward_fn: RewardFn,
        name: str,
        device: torch.device,
        num_workers: int,
        timeout: float,
        samples_per_epoch: int,
        max_failed_fraction: float,
        count_together: Callable[[str, int], int] | None = None,
    ) -> None:
        """
        Args:
            name: of the function, for messages.
            device: the process's own; a GPU becomes the threads' current one.
            timeout: seconds that one batch may take, from when a thread takes it up.
            samples_per_epoch: of all processes together.
            max_failed_fraction: of them that may fail.
            count_together: adds a number to a counter of that name that all processes share, and returns its value;
                None: there is one process.
        """
        self.reward_fn = reward_fn
        self.name = name
        self.timeout = timeout
        self.samples_per_epoch = samples_per_epoch
        self.max_failed_fraction = max_failed_fraction
        self._count_together = count_together
        self._epoch = 0
        self._open: list[_Job] = []  # not seen done yet, so that a look at them costs the same at any time of an epoch
        self._reasons: list[str] = []
        # Of the seconds that the last epoch's rewards took, the share in which sampling went on
        self.hidden_share = 1.0
        self._jobs: list[_Job] = []
        self._executor = ThreadPoolExecutor(num_workers, "reward", **_beside(device))

    def submit(self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> None:
        """Have a batch scored.

        Args:
            images: float32 (B, 3, H, W) in [0, 1] on the CPU.
        """
        times: list[float] = []
        job = _Job(self._executor.submit(self._timed, times, images, prompts, metadata), times)
        self._jobs.append(job)
        self._open.append(job)

    def _timed(self, times: list[float], *batch: Any) -> Scores:
        times.append(time.monotonic())
        try:
            return self._score(*batch)
        finally:
            times.append(time.monotonic())

    def _score(self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Scores:
        drawn = images.isfinite().flatten(1).all(1).tolist()
        with torch.no_grad():  # thread-local, so the caller's does not reach here
            result = self.reward_fn(images.nan_to_num(), list(prompts), list(metadata))
        scores = checked_scores(result, len(prompts), self.name)
        for i, is_drawn in enumerate(drawn):
            if not is_drawn:  # a picture that half precision could not draw would score as a black one
                scores.rewards[i], scores.failures[i] = math.nan, NOT_DRAWN
        return scores

    def check(self) -> None:
        """Say early what will end this epoch; costs nothing, or one short question to the shared counter.

        Raises:
            RunFailure: a batch raised or takes too long, or more samples failed on all processes than may.
        """
        new, still_open = 0, []
        for job in self._open:
            if job.future.done():
                reasons = [reason for reason in self._result(job).failures if reason]
                self._reasons += reasons
                new += len(reasons)
                continue
            still_open.append(job)
            if job.times and time.monotonic() - job.times[0] > self.timeout:
                raise RewardFailure(
                    f"reward function {self.name} took longer than config.reward_timeout, {self.timeout:g} s, for one "
                    "batch of images"
                )
        self._open = still_open
        failed = len(self._reasons)
        if self._count_together is not None:
            failed = self._count_together(f"failed_samples/{self._epoch}", new)
        if failed > self.max_failed_fraction * self.samples_per_epoch:
            raise too_many_failed(self.name, failed, self.samples_per_epoch, self.max_failed_fraction, self._reasons)

    def _result(self, job: _Job) -> Scores:
        try:
            return job.future.result()
        except WrongResult as error:
            raise RewardFailure(str(error)) from None
        except (Exception, SystemExit) as error:  # also if the function would end the program
            raise RewardFailure(f"reward function {self.name} failed with {type(error).__name__}: {error}") from error

    def collect(self, on_batch: Callable[[], None], on_wait: Callable[[], None] = lambda: None) -> Scores:
        """Wait for all batches submitted since the last call; their scores, in order.

        Args:
            on_batch: called when a batch's scores are there.
            on_wait: called a few times a second; may raise to end the wait.

        Raises:
            RunFailure: as `check`.
        """
        since = time.monotonic()
        waiting = {job.future for job in self._jobs}
        while waiting:
            done, waiting = concurrent.futures.wait(
                waiting, timeout=0.2, return_when=concurrent.futures.FIRST_COMPLETED
            )
            self.check()
            on_wait()
            for _ in done:
                on_batch()
        jobs, self._jobs = self._jobs, []
        spent = sum(job.times[1] - job.times[0] for job in jobs)
        hidden = sum(max(0.0, min(job.times[1], since) - job.times[0]) for job in jobs)
        self.hidden_share = hidden / spent if spent else 1.0
        self._epoch, self._open, self._reasons = self._epoch + 1, [], []
        return Scores.cat([self._result(job) for job in jobs])

    def __len__(self) -> int:
        """Batches submitted and not collected yet."""
        return len(self._jobs)

    def close(self) -> None:
        """Start nothing any more. A thread that is busy stays so: the process must not wait for it to end."""
        self._executor.shutdown(wait=False, cancel_futures=True)
