"""One optimizer step of DDPO over micro-batches: forward, loss, backward, clip, step."""

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ddpo_pytorch.exits import ModelFailure
from ddpo_pytorch.losses import ppo_clipped_loss
from ddpo_pytorch.policy import Policy, trainable_parameters
from ddpo_pytorch.trajectories import MicroBatch, Trajectories, take


@dataclass
class UpdateResult:
    """What one optimizer step did; the statistics are means over micro-batches and processes.

    Attributes:
        statistics: `loss`, `approx_kl`, `clipfrac`, `policy/clip_active`, `policy/kl_nats` as of
            `losses.ppo_clipped_loss`, and `grad_norm`, before clipping.
        logp_gap: the largest |log-prob - sampled log-prob| of all micro-batches and processes.
        logp_gap_timestep: the timestep at which it was found.
        skipped: the gradient was not finite, so the weights are as before.
        cause: of a skipped step, what was not finite first.
    """

    statistics: dict[str, float]
    logp_gap: float
    logp_gap_timestep: int
    skipped: bool
    cause: str | None = None


def learning_rate_at(update: int, learning_rate: float, warmup_steps: int) -> float:
    """Learning rate of optimizer step `update`, counted from 0: a linear rise over `warmup_steps`, then constant."""
    return learning_rate * min(1.0, (update + 1) / (warmup_steps + 1))


class SkippedSteps:
    """Counts the updates in a row that were skipped, and ends the run when they are too many."""

    def __init__(self, limit: int) -> None:
        """
        Args:
            limit: train.max_skipped_steps.
        """
        self.limit = limit
        self.in_a_row = 0
        self._first_cause: str | None = None

    def count(self, result: UpdateResult) -> None:
        """Take in an update.

        Raises:
            ModelFailure: it is the last of `limit` skipped ones in a row; the message has the first one's cause.
        """
        if not result.skipped:
            self.in_a_row, self._first_cause = 0, None
            return
        self.in_a_row += 1
        self._first_cause = self._first_cause or result.cause
        if self.in_a_row >= self.limit:
            raise ModelFailure(
                f"{self.in_a_row} updates in a row were skipped (train.max_skipped_steps), first because "
                f"{self._first_cause}; nothing of them is in a checkpoint. Try a lower train.learning_rate, or "
                'mixed_precision "bf16" or "no", from a checkpoint before rewards or policy/kl_nats went astray'
            )


def gap_warning(result: UpdateResult, max_logp_gap: float) -> str | None:
    """What to tell the user if the first update of an epoch found other log-probs than sampling did; else None.

    Args:
        max_logp_gap: in nats per dimension.
    """
    if not result.logp_gap > max_logp_gap:  # nor NaN, of an update that was skipped, which is said elsewhere
        return None
    return (
        f"warning: the log-probs of unchanged weights differ by {result.logp_gap:.1e} between sampling and training "
        f"(timestep {result.logp_gap_timestep}), more than {max_logp_gap:.1e} (train.max_logp_gap), and ratios are off "
        "by as much. Likely causes: other batch shapes (set train.batch_size to sample.batch_size), half precision, "
        "TensorFloat-32 (allow_tf32), kernels that are not deterministic. train.recompute_log_probs = True replaces "
        "the sampled ones by training's own"
    )


@torch.no_grad()
def recompute_log_probs(policy: Policy, trajectories: Trajectories, batch_size: int) -> None:
    """Replace the sampled log-probs by those of the training path, in place; failed samples stay NaN.

    Costs a forward pass for every sample and step, whether it is trained on or not.
    """
    for samples in torch.arange(len(trajectories)).split(batch_size):
        for step in range(trajectories.num_steps):
            batch = take(trajectories, torch.zeros(len(trajectories)), samples, torch.full_like(samples, step))
            old = batch.old_log_probs
            trajectories.log_probs[samples, step] = torch.where(old.isfinite(), policy.log_prob(batch), old)


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
    before_sync: Callable[[], None] = lambda: None,
) -> UpdateResult:
    """Accumulate the mean loss over micro-batches, and step once. Every process must call it.

    Gradients are synchronised between processes in the last micro-batch alone. A gradient that is not finite on any
    process is never applied on any.

    Args:
        optimizer: as Accelerate prepared it, over the parameters of `policy.unet`.
        micro_batches: of equal size, so that the mean of their means is the mean over all.
        before_sync: called when this process has its own gradients, and is about to wait for the others'.
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
                policy.log_prob(batch),
                batch.old_log_probs,
                batch.advantages,
                clip_range,
                adv_clip_max,
                num_dims=batch.latents[0].numel(),
            )
            if is_last:
                before_sync()
            accelerator.backward(loss / num_micro_batches)
        statistics["logp_gap_timestep"] = batch.timesteps[statistics.pop("logp_gap_index")]
        collected.append(torch.stack([value.float() for value in statistics.values()]))
        names = list(statistics)
    assert len(collected) == num_micro_batches

    # The norm is of the synchronised gradients, hence the same on every process, and so is the decision.
    parameters = trainable_parameters(policy.unet)
    accelerator.unscale_gradients()
    total_norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    grad_norm = float(total_norm)
    if math.isfinite(grad_norm):  # clipping by a NaN would make every gradient one, and hide where it came from
        clip_grads_with_norm_(parameters, max_grad_norm, total_norm)
    if math.isfinite(grad_norm) or accelerator.scaler is not None:
        optimizer.step()  # with a scaler, it is the scaler that skips, and lowers its scale
        skipped = accelerator.optimizer_step_was_skipped
    else:
        skipped = True
    # (processes, micro-batches, statistics)
    gathered = accelerator.gather(torch.stack(collected)[None]).cpu().double()
    by_name = dict(zip(names, gathered.unbind(-1), strict=True))
    cause = _cause_of_skip(by_name["loss"], policy.unet, grad_norm) if skipped else None
    optimizer.zero_grad(set_to_none=True)

    gaps, timesteps = by_name.pop("logp_gap").flatten(), by_name.pop("logp_gap_timestep").flatten()
    means = {name: values.mean().item() for name, values in by_name.items()}
    worst = gaps.argmax()
    return UpdateResult({**means, "grad_norm": grad_norm}, gaps[worst].item(), int(timesteps[worst]), skipped, cause)


def _cause_of_skip(losses: torch.Tensor, unet: torch.nn.Module, grad_norm: float) -> str:
    """What was not finite first: a loss (of all processes' micro-batches), or else a gradient."""
    bad = int((~losses.isfinite()).sum())
    if bad:
        return f"the loss of {bad} of {losses.numel()} micro-batches was {losses[~losses.isfinite()][0].item()}"
    for name, parameter in unet.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"the gradient of {name} was not finite"
    return f"the gradient norm was {grad_norm}"
