"""Sampled trajectories as stacked tensors, and the order in which training replays their steps.

Shuffles move indices, never latents. Knows nothing of diffusers, Accelerate or configs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch


@dataclass
class Trajectories:
    """n trajectories of T steps. Step j leads from `latents[:, j]` to `latents[:, j + 1]`.

    Attributes:
        latents: float32 (n, T + 1, C, h, w), x_T first, stored once.
        timesteps, prev_timesteps: int64 (n, T), all that scoring needs of the schedule.
        log_probs: float32 (n, T), nats per dimension, under the policy that sampled; NaN throughout a trajectory that
            half precision could not compute, whose latents are 0 where they were not finite.
        prompt_embeds: (n, L, D).
    """

    latents: torch.Tensor
    timesteps: torch.Tensor
    prev_timesteps: torch.Tensor
    log_probs: torch.Tensor
    prompt_embeds: torch.Tensor

    def __len__(self) -> int:
        return self.latents.shape[0]

    @property
    def num_steps(self) -> int:
        return self.log_probs.shape[1]

    @classmethod
    def cat(cls, parts: Sequence["Trajectories"]) -> "Trajectories":
        """All parts along n."""
        return cls(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)})


@dataclass
class MicroBatch:
    """One denoising step of each of B trajectories, as one forward pass needs it; fields as in `Trajectories`."""

    latents: torch.Tensor
    next_latents: torch.Tensor
    timesteps: torch.Tensor
    prev_timesteps: torch.Tensor
    old_log_probs: torch.Tensor
    prompt_embeds: torch.Tensor
    advantages: torch.Tensor


def take(
    trajectories: Trajectories, advantages: torch.Tensor, samples: torch.Tensor, steps: torch.Tensor
) -> MicroBatch:
    """Step `steps[b]` of trajectory `samples[b]`, for each b.

    Args:
        advantages: (n,).
        samples, steps: int64 (B,).
    """
    t = trajectories
    return MicroBatch(
        latents=t.latents[samples, steps],
        next_latents=t.latents[samples, steps + 1],
        timesteps=t.timesteps[samples, steps],
        prev_timesteps=t.prev_timesteps[samples, steps],
        old_log_probs=t.log_probs[samples, steps],
        prompt_embeds=t.prompt_embeds[samples],
        advantages=advantages[samples],
    )


def shuffled_updates(
    num_samples: int,
    num_steps: int,
    num_train_steps: int,
    batch_size: int,
    groups_per_update: int,
    generator: torch.Generator,
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The order of one inner epoch: for each optimizer step, its micro-batches as (samples, steps), both int64 (B,).

    Samples are shuffled, and each sample's timesteps by a shuffle of its own, of which the first `num_train_steps` are
    trained. A micro-batch holds one timestep of `batch_size` samples; an update holds all trained timesteps of
    `groups_per_update` such groups of samples.

    Args:
        num_samples: of this process; a multiple of batch_size * groups_per_update.
        generator: on the CPU.
    """
    assert num_samples % (batch_size * groups_per_update) == 0 and num_train_steps <= num_steps
    samples = torch.randperm(num_samples, generator=generator)
    steps = torch.stack([torch.randperm(num_steps, generator=generator) for _ in range(num_samples)])
    groups = samples.split(batch_size)
    for start in range(0, len(groups), groups_per_update):
        yield [
            (group, steps[group, j])
            for group in groups[start : start + groups_per_update]
            for j in range(num_train_steps)
        ]
