"""Prompts become images, trajectories and pending rewards; rewards become advantages.

Rewards are computed in worker threads while the next batch is denoised. Knows nothing of configs or of the update.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ddpo_pytorch.policy import Policy
from ddpo_pytorch.rewards import RewardFn, checked_rewards, to_uint8
from ddpo_pytorch.stat_tracking import PerPromptStatTracker, normalize_rewards
from ddpo_pytorch.trajectories import Trajectories


@dataclass
class Rollout:
    """One process's samples of one epoch, n in all.

    Attributes:
        images: uint8 (n, H, W, 3), for people to look at.
        pending: a future per batch, resolving to its rewards, float64 (B,).
    """

    prompts: list[str]
    images: np.ndarray
    trajectories: Trajectories
    pending: list[Future]


def draw_prompts(prompt_fn: Callable[..., tuple[str, dict]], kwargs: dict, count: int) -> tuple[list[str], list[dict]]:
    """`count` prompts and their metadata, all at once: a reward thread that draws numbers cannot change the next."""
    drawn = [prompt_fn(**kwargs) for _ in range(count)]
    return [prompt for prompt, _ in drawn], [metadata for _, metadata in drawn]


def score(
    reward_fn: RewardFn, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[dict], name: str
) -> np.ndarray:
    """Call a reward function and check what it returns; runs in a worker thread.

    Args:
        images: float32 (B, 3, H, W) in [0, 1] on the CPU.
        name: of the function, for messages.

    Returns:
        float64 (B,), NaN for a failed sample.
    """
    drawn = images.isfinite().flatten(1).all(1).numpy()
    with torch.no_grad():  # thread-local, so the caller's does not reach here
        result = reward_fn(images.nan_to_num(), list(prompts), list(metadata))
    # A picture that half precision could not draw would score as a black one.
    return np.where(drawn, checked_rewards(result, len(prompts), name), np.nan)


def sample_epoch(
    policy: Policy,
    prompts: Sequence[str],
    metadata: Sequence[dict],
    batch_size: int,
    generator: torch.Generator,
    reward_fn: RewardFn,
    reward_name: str,
    executor: ThreadPoolExecutor,
    on_step: Callable[[], None],
) -> Rollout:
    """Denoise all prompts batch by batch, and hand each batch of finished images to the executor.

    Args:
        prompts: n, a multiple of batch_size.
        on_step: called after every denoising step.
    """
    trajectories, images, pending = [], [], []
    for start in range(0, len(prompts), batch_size):
        batch = slice(start, start + batch_size)
        batch_images, batch_trajectories = policy.sample(prompts[batch], generator, lambda *_: on_step())
        batch_images = batch_images.cpu()
        pending.append(executor.submit(score, reward_fn, batch_images, prompts[batch], metadata[batch], reward_name))
        images.append(to_uint8(batch_images.nan_to_num()))
        trajectories.append(batch_trajectories)
    return Rollout(list(prompts), np.concatenate(images), Trajectories.cat(trajectories), pending)


def collect_rewards(pending: Sequence[Future], reward_name: str, on_batch: Callable[[], None]) -> np.ndarray:
    """Wait for this process's rewards: float64 (n,), NaN for failed samples.

    Args:
        on_batch: called when a batch's rewards are there.

    Raises:
        RuntimeError: the reward function raised, or returned what are no rewards; the message has its name.
    """
    rewards = []
    for future in pending:
        try:
            rewards.append(future.result())
        except Exception as error:
            for other in pending:
                other.cancel()
            raise RuntimeError(f"reward function {reward_name} failed with {type(error).__name__}: {error}") from error
        on_batch()
    return np.concatenate(rewards)


def compute_advantages(tracker: PerPromptStatTracker | None, prompts: Sequence[str], rewards: np.ndarray) -> np.ndarray:
    """Advantages of all processes' samples, float64 (n,); without a tracker, over the batch's mean and deviation."""
    return normalize_rewards(rewards) if tracker is None else tracker.update(prompts, rewards)


def gather_samples(
    accelerator: Accelerator,
    prompts: Sequence[str],
    rewards: np.ndarray,
    reward_name: str,
    max_failed_fraction: float,
) -> tuple[list[str], np.ndarray]:
    """Every process's prompts and rewards on every process, in the order of the processes.

    Raises:
        RuntimeError: on every process alike, if more than this fraction of all rewards are NaN.
    """
    pairs = gather_object(list(zip(prompts, rewards.tolist(), strict=True)))
    all_rewards = np.array([reward for _, reward in pairs], dtype=np.float64)
    failed = int(np.isnan(all_rewards).sum())
    if failed > max_failed_fraction * len(all_rewards):
        raise RuntimeError(
            f"reward function {reward_name} failed for {failed} of {len(all_rewards)} samples, which is more than "
            f"config.max_failed_fraction {max_failed_fraction}"
        )
    return [prompt for prompt, _ in pairs], all_rewards


def own_share(accelerator: Accelerator, values: np.ndarray) -> torch.Tensor:
    """This process's part of values in the order of `gather_samples`: float32 (n / processes,) on its device."""
    share = np.split(values, accelerator.num_processes)[accelerator.process_index]
    return torch.as_tensor(share, dtype=torch.float32, device=accelerator.device)


def gather_images(
    accelerator: Accelerator, rollout: Rollout, rewards: np.ndarray, count: int
) -> tuple[list[np.ndarray], list[str], list[float]]:
    """About `count` of an epoch's images, spread evenly over processes and batches, on every process.

    Returns:
        Images, uint8 (H, W, 3), their prompts and their rewards.
    """
    share = min(len(rollout.prompts), -(-count // accelerator.num_processes))
    chosen = np.linspace(0, len(rollout.prompts) - 1, share).round().astype(int).tolist()
    picked = gather_object([(rollout.images[i], rollout.prompts[i], float(rewards[i])) for i in chosen])
    images, prompts, values = zip(*picked, strict=True) if picked else ((), (), ())
    return list(images), list(prompts), list(values)
