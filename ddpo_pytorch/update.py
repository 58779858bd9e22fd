"""One optimizer step of DDPO over micro-batches: forward, loss, backward, clip, step."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed
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


def recompute_log_probs(
    policy: Policy, trajectories: Trajectories, batch_size: int, timesteps_per_forward: int = 1
) -> None:
    """Replace the sampled log-probs by those of the training path, in place; failed samples stay NaN.

    Costs a forward pass for every sample and step, whether it is trained on or not. As in training with gradient, which
    a compiled UNet computes by other kernels, and in batches of its size.
    """
    nobody = torch.zeros(len(trajectories))
    for group in torch.arange(len(trajectories)).split(batch_size):
        for steps in torch.arange(trajectories.num_steps).split(timesteps_per_forward):
            samples, steps = group.repeat_interleave(len(steps)), steps.repeat(len(group))
            batch = take(trajectories, nobody, samples, steps, policy.device)
            old, new = trajectories.log_probs[samples, steps], policy.log_prob(batch).detach().cpu()
            trajectories.log_probs[samples, steps] = torch.where(old.isfinite(), new, old)


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

    Processes meet once, when each has its own gradients. A gradient that is not finite on any is never applied on any.

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
    for batch in micro_batches:
        loss, statistics = ppo_clipped_loss(
            policy.log_prob(batch),
            batch.old_log_probs,
            batch.advantages,
            clip_range,
            adv_clip_max,
            num_dims=batch.latents[0].numel(),
        )
        accelerator.backward(loss / num_micro_batches)
        # Not batch.timesteps[index], which waits for the device.
        index = statistics.pop("logp_gap_index")
        statistics["logp_gap_timestep"] = batch.timesteps.gather(0, index[None])[0]
        collected.append(torch.stack([value.float() for value in statistics.values()]))
        names = list(statistics)
    assert len(collected) == num_micro_batches
    before_sync()
    parameters = trainable_parameters(policy.unet)
    # (processes, what of each)
    summaries = _reduce(accelerator, parameters, _summary(torch.stack(collected).cpu(), names))

    # The norm is of the averaged gradients, hence the same on every process, and so is the decision.
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

    by_name = dict(zip([*_means_of(names), "gap", "timestep", "bad", "first bad"], summaries.T, strict=True))
    cause = None
    if skipped:
        bad = int(by_name["bad"].sum())
        total = num_micro_batches * len(summaries)
        first = by_name["first bad"][by_name["bad"] > 0]
        cause = (
            f"the loss of {bad} of {total} micro-batches was {first[0].item()}"
            if bad
            else _bad_gradient(policy.unet, grad_norm)
        )
    optimizer.zero_grad(set_to_none=True)
    worst = by_name["gap"].argmax()
    return UpdateResult(
        statistics={**{name: by_name[name].mean().item() for name in _means_of(names)}, "grad_norm": grad_norm},
        logp_gap=by_name["gap"][worst].item(),
        logp_gap_timestep=int(by_name["timestep"][worst]),
        skipped=skipped,
        cause=cause,
    )


def _means_of(names: Sequence[str]) -> list[str]:
    """Those statistics of which an update reports the mean."""
    return [name for name in names if name not in ("logp_gap", "logp_gap_timestep")]


def _summary(collected: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """This process's micro-batches: means, the largest gap with its timestep, how many losses were not finite, which.

    Args:
        collected: (micro-batches, statistics), on the CPU.

    Returns:
        float64 (means + 4,).
    """
    by_name = dict(zip(names, collected.double().unbind(1), strict=True))
    worst = by_name["logp_gap"].argmax()
    loss = by_name["loss"]
    bad = ~loss.isfinite()
    rest = [by_name["logp_gap"][worst], by_name["logp_gap_timestep"][worst], bad.sum(), loss[bad.int().argmax()]]
    return torch.stack([*(by_name[name].mean() for name in _means_of(names)), *rest])


def _reduce(accelerator: Accelerator, parameters: Sequence[torch.nn.Parameter], summary: torch.Tensor) -> torch.Tensor:
    """Average gradients over processes, in place, and share every process's summary, in one all-reduce.

    Returns:
        (processes, len(summary)).
    """
    if accelerator.num_processes == 1:
        return summary[None]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    slots = torch.zeros(accelerator.num_processes, len(summary), device=accelerator.device)
    slots[accelerator.process_index] = summary.float()
    parts = [*(p.grad for p in parameters), slots]
    flat = torch.cat([part.flatten() for part in parts])
    torch.distributed.all_reduce(flat)
    *gradients, slots = (
        part.view_as(like) for part, like in zip(flat.split([part.numel() for part in parts]), parts, strict=True)
    )
    for p, gradient in zip(parameters, gradients, strict=True):
        torch.div(gradient, accelerator.num_processes, out=p.grad)
    return slots.cpu().double()


def _bad_gradient(unet: torch.nn.Module, grad_norm: float) -> str:
    """Which gradient was not finite, where all losses were."""
    for name, parameter in unet.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"the gradient of {name} was not finite"
    return f"the gradient norm was {grad_norm}"
