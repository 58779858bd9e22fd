"""Sampled trajectories as stacked tensors, and the order in which training replays their steps.

Shuffles move indices, never latents. Knows nothing of diffusers, Accelerate or configs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

CPU = torch.device("cpu")


@dataclass
class Trajectories:
    """n trajectories of T steps. Step j leads from `latents[:, j]` to `latents[:, j + 1]`.

    Attributes:
        latents: float32 (n, T + 1, C, h, w), x_T first, stored once.
        timesteps, prev_timesteps: int64 (n, T), all that scoring needs of the schedule.
        log_probs: float32 (n, T), nats per dimension, under the policy that sampled; NaN throughout a trajectory that
            half precision could not compute, whose latents are 0.
        prompt_embeds: n of (L, D); equal prompts share one.
    """

    latents: torch.Tensor
    timesteps: torch.Tensor
    prev_timesteps: torch.Tensor
    log_probs: torch.Tensor
    prompt_embeds: list[torch.Tensor]

    def __len__(self) -> int:
        return self.latents.shape[0]

    @property
    def num_steps(self) -> int:
        return self.log_probs.shape[1]

    @classmethod
    def cat(cls, parts: Sequence["Trajectories"]) -> "Trajectories":
        """All parts along n."""

        def joined(values: list) -> Any:
            return torch.cat(values) if isinstance(values[0], torch.Tensor) else [one for v in values for one in v]

        return cls(**{f.name: joined([getattr(part, f.name) for part in parts]) for f in fields(cls)})


@dataclass
class MicroBatch:
    """One denoising step of each of B trajectories, as one forward pass needs it; fields as in `Trajectories`.

    Attributes:
        prompt_embeds: (B, L, D).
    """

    latents: torch.Tensor
    next_latents: torch.Tensor
    timesteps: torch.Tensor
    prev_timesteps: torch.Tensor
    old_log_probs: torch.Tensor
    prompt_embeds: torch.Tensor
    advantages: torch.Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        """On a device; to a GPU from memory that it can read by itself, so that this process need not wait for it."""
        if device.type == "cpu":
            return self
        tensors = (getattr(self, f.name) for f in fields(self))
        if device.type == "cuda":
            tensors = (tensor.pin_memory() for tensor in tensors)
        return MicroBatch(*(tensor.to(device, non_blocking=True) for tensor in tensors))


def take(
    trajectories: Trajectories,
    advantages: torch.Tensor,
    samples: torch.Tensor,
    steps: torch.Tensor,
    device: torch.device = CPU,
) -> MicroBatch:
    """Step `steps[b]` of trajectory `samples[b]`, for each b.

    Args:
        advantages: (n,).
        samples, steps: int64 (B,).
        device: where to; the arguments are on the CPU.
    """
    t = trajectories
    batch = MicroBatch(
        latents=t.latents[samples, steps],
        next_latents=t.latents[samples, steps + 1],
        timesteps=t.timesteps[samples, steps],
        prev_timesteps=t.prev_timesteps[samples, steps],
        old_log_probs=t.log_probs[samples, steps],
        prompt_embeds=torch.stack([t.prompt_embeds[i] for i in samples.tolist()]),
        advantages=advantages[samples],
    )
    return batch.to(device)


def shuffled_updates(
    num_samples: int,
    num_steps: int,
    num_train_steps: int,
    batch_size: int,
    groups_per_update: int,
    generator: torch.Generator,
    timesteps_per_forward: int = 1,
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The order of one inner epoch: for each optimizer step, its micro-batches as (samples, steps), both int64 (B,).

    Samples are shuffled, and each sample's timesteps by a shuffle of its own, of which the first `num_train_steps` are
    trained. A micro-batch holds `timesteps_per_forward` timesteps of `batch_size` samples; an update holds all trained
    timesteps of `groups_per_update` such groups of samples.

    Args:
        num_samples: of this process; a multiple of batch_size * groups_per_update.
        generator: on the CPU.
        timesteps_per_forward: k, which divides num_train_steps; the B of a micro-batch is k * batch_size. Its mean over
            an update's micro-batches is the same mean.
    """
    assert num_samples % (batch_size * groups_per_update) == 0 and num_train_steps <= num_steps
    assert num_train_steps % timesteps_per_forward == 0
    samples = torch.randperm(num_samples, generator=generator)
    steps = torch.stack([torch.randperm(num_steps, generator=generator) for _ in range(num_samples)])
    groups = samples.split(batch_size)
    for start in range(0, len(groups), groups_per_update):
        yield [
            (group.repeat_interleave(timesteps_per_forward), steps[group, j : j + timesteps_per_forward].flatten())
            for group in groups[start : start + groups_per_update]
            for j in range(0, num_train_steps, timesteps_per_forward)
        ]
