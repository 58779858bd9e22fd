"""One optimizer step of DDPO over micro-batches: forward, loss, backward, clip, step."""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from ddpo_pytorch.losses import ppo_clipped_loss
from ddpo_pytorch.policy import Policy, trainable_parameters
from ddpo_pytorch.trajectories import MicroBatch


@dataclass
class UpdateResult:
    """What one optimizer step did; the statistics are means over micro-batches and processes.

    Attributes:
        statistics: `loss`, `approx_kl`, `clipfrac`, `grad_norm` (before clipping).
        logp_gap: the largest |log-prob - sampled log-prob| of all micro-batches and processes.
        skipped: the gradient was not finite, so the weights are as before.
    """

    statistics: dict[str, float]
    logp_gap: float
    skipped: bool


def learning_rate_at(update: int, learning_rate: float, warmup_steps: int) -> float:
    """Learning rate of optimizer step `update`, counted from 0: a linear rise over `warmup_steps`, then constant."""
    return learning_rate * min(1.0, (update + 1) / (warmup_steps + 1))


def count_skipped(result: UpdateResult, skipped_in_a_row: int, max_skipped_steps: int) -> int:
    """How many updates in a row were skipped, this one included.

    Raises:
        RuntimeError: max_skipped_steps of them.
    """
    skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
    if skipped_in_a_row >= max_skipped_steps:
        raise RuntimeError(
            f"the gradients of {skipped_in_a_row} updates in a row were not finite (train.max_skipped_steps); the last "
            "checkpoint is good. Try a lower train.learning_rate, or mixed_precision bf16 or no"
        )
    return skipped_in_a_row


def optimizer_step(
    accelerator: Accelerator,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[MicroBatch],
    num_micro_batches: int,
    learning_rate: float,
    clip_range: float,
    adv_clip_max: float,
    max_grad_norm: float,
) -> UpdateResult:
    """Accumulate the mean loss over micro-batches, and step once. Every process must call it.

    Gradients are synchronised between processes in the last micro-batch alone. A gradient that is not finite on any
    process is never applied on any.

    Args:
        optimizer: as Accelerate prepared it, over the parameters of `policy.unet`.
        micro_batches: of equal size, so that the mean of their means is the mean over all.
        The rest as in `losses.ppo_clipped_loss` and the config.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad(set_to_none=True)

    collected = []
    for i, batch in enumerate(micro_batches):
        is_last = i == num_micro_batches - 1
        with contextlib.nullcontext() if is_last else accelerator.no_sync(policy.unet):
            loss, statistics = ppo_clipped_loss(
                policy.log_prob(batch), batch.old_log_probs, batch.advantages, clip_range, adv_clip_max
            )
            accelerator.backward(loss / num_micro_batches)
        collected.append(torch.stack(list(statistics.values())))
        names = list(statistics)
    assert len(collected) == num_micro_batches

    # The norm is of the synchronised gradients, hence the same on every process, and so is the decision.
    grad_norm = float(accelerator.clip_grad_norm_(trainable_parameters(policy.unet), max_grad_norm))
    if math.isfinite(grad_norm) or accelerator.scaler is not None:
        optimizer.step()  # with a scaler, it is the scaler that skips, and lowers its scale
        skipped = accelerator.optimizer_step_was_skipped
    else:
        skipped = True
    optimizer.zero_grad(set_to_none=True)

    # (processes, micro-batches, statistics)
    gathered = accelerator.gather(torch.stack(collected)[None]).cpu().double()
    means = dict(zip(names, gathered.mean(dim=(0, 1)).tolist(), strict=True))
    means.pop("logp_gap")
    logp_gap = gathered[:, :, names.index("logp_gap")].max().item()
    return UpdateResult({**means, "grad_norm": grad_norm}, logp_gap, skipped)
