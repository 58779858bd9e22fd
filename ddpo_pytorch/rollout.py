"""Prompts become images, trajectories and scores; scores become advantages.

Images are scored in worker threads while the next batch is denoised. Knows nothing of configs or of the update.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ddpo_pytorch.exits import RunFailure
from ddpo_pytorch.images import to_uint8
from ddpo_pytorch.metrics import caption
from ddpo_pytorch.policy import Policy
from ddpo_pytorch.scoring import RewardFn, RewardWorkers, Scores, too_many_failed
from ddpo_pytorch.stat_tracking import PerPromptStatTracker, normalize_rewards
from ddpo_pytorch.trajectories import Trajectories
from ddpo_pytorch.weighted_sum import WeightedSum


@dataclass
class Rollout:
    """One process's samples of one epoch, n in all.

    Attributes:
        images: uint8 (n, H, W, 3), for people to look at.
    """

    prompts: list[str]
    images: np.ndarray
    trajectories: Trajectories


def draw_prompts(
    prompt_fn: Callable[..., tuple[str, dict]], kwargs: dict, count: int, name: str
) -> tuple[list[str], list[dict]]:
    """`count` prompts and their metadata, all at once: a reward thread that draws numbers cannot change the next.

    Args:
        name: of the function, for messages.

    Raises:
        RunFailure: the function raised.
    """
    try:
        drawn = [prompt_fn(**kwargs) for _ in range(count)]
    except (Exception, SystemExit) as error:  # also if it would end the program
        raise RunFailure(f"prompt function {name} failed with {type(error).__name__}: {error}") from error
    return [prompt for prompt, _ in drawn], [metadata for _, metadata in drawn]


def sample_epoch(
    policy: Policy,
    prompts: Sequence[str],
    metadata: Sequence[dict],
    batch_size: int,
    generator: torch.Generator,
    workers: RewardWorkers,
    on_step: Callable[[], None],
) -> Rollout:
    """Denoise all prompts batch by batch, and hand each batch of finished images to the reward workers.

    Args:
        prompts: n, a multiple of batch_size.
        on_step: called after every denoising step.

    Raises:
        RewardFailure: a batch could not be scored; the rest is not sampled any more.
    """

    def after_step(*_: int) -> None:
        on_step()
        workers.check()

    policy.forget_prompts()
    trajectories, images = [], []
    for start in range(0, len(prompts), batch_size):
        batch = slice(start, start + batch_size)
        batch_images, batch_trajectories = policy.sample(prompts[batch], generator, after_step)
        workers.submit(batch_images, prompts[batch], metadata[batch])
        images.append(to_uint8(batch_images.nan_to_num()))
        trajectories.append(batch_trajectories)
    return Rollout(list(prompts), np.concatenate(images), Trajectories.cat(trajectories))


def compute_advantages(tracker: PerPromptStatTracker | None, prompts: Sequence[str], rewards: np.ndarray) -> np.ndarray:
    """Advantages of all processes' samples, float64 (n,); without a tracker, over the batch's mean and deviation."""
    return normalize_rewards(rewards) if tracker is None else tracker.update(prompts, rewards)


def gather_samples(
    accelerator: Accelerator, rollout: Rollout, scores: Scores, name: str, max_failed_fraction: float, num_images: int
) -> tuple[list[str], Scores, dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Every process's prompts and scores on every process, in the order of the processes, with some of the images.

    Args:
        scores: of `rollout`, this process's.
        name: of the reward function, for messages.
        num_images: about how many images, spread evenly over processes and batches.

    Returns:
        Prompts, scores (with the notes on those images alone), and images, uint8 (H, W, 3), by the number of their
        sample; and so each process's best and worst one, unless no images are wanted.

    Raises:
        RewardFailure: on every process alike, if more than this fraction of all rewards are NaN.
    """
    n = len(rollout.prompts)
    share = min(n, -(-num_images // accelerator.num_processes))
    chosen = np.linspace(0, n - 1, share).round().astype(int).tolist()
    notes = {key: [text if i in chosen else "" for i, text in enumerate(texts)] for key, texts in scores.notes.items()}
    own = Scores(scores.rewards, scores.details, notes=notes, failures=scores.failures)
    extremes: set[int] = set()
    if num_images and np.isfinite(scores.rewards).any():
        extremes = {int(np.nanargmax(scores.rewards)), int(np.nanargmin(scores.rewards))}
    images = {i: rollout.images[i] for i in {*chosen, *extremes}}
    # The one time in an epoch that samples go from process to process.
    gathered = gather_object([(rollout.prompts, own, images, chosen, sorted(extremes))])
    all_prompts = [prompt for part, *_ in gathered for prompt in part]
    all_scores = Scores.cat([part for _, part, *_ in gathered])
    picked = {rank * n + i: part[2][i] for rank, part in enumerate(gathered) for i in part[3]}
    best_and_worst = {rank * n + i: part[2][i] for rank, part in enumerate(gathered) for i in part[4]}
    failed, total = int(np.isnan(all_scores.rewards).sum()), len(all_prompts)
    if failed > max_failed_fraction * total:
        raise too_many_failed(name, failed, total, max_failed_fraction, all_scores.failures)
    return all_prompts, all_scores, picked, best_and_worst


def combined_rewards(reward_fn: RewardFn, scores: Scores) -> np.ndarray:
    """What training is to maximise, float64 (n,): of a weighted sum, with all its components on this epoch's scales."""
    return reward_fn.update(scores.details) if isinstance(reward_fn, WeightedSum) else scores.rewards


def own_share(accelerator: Accelerator, values: np.ndarray) -> torch.Tensor:
    """This process's part of values in the order of `gather_samples`: float32 (n / processes,), on the CPU."""
    share = np.split(values, accelerator.num_processes)[accelerator.process_index]
    return torch.as_tensor(share, dtype=torch.float32)


def captions(samples: Iterable[int], prompts: Sequence[str], rewards: np.ndarray, scores: Scores) -> list[str]:
    """Of some of an epoch's samples: prompt, reward, and what else the reward function said.

    Args:
        samples: their numbers; the rest as in `gather_samples`.
    """
    return [
        caption(
            prompts[i],
            float(rewards[i]),
            {name: float(values[i]) for name, values in scores.details.items()},
            {name: values[i] for name, values in scores.notes.items()},
            scores.failures[i],
        )
        for i in samples
    ]
