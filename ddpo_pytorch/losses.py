"""Policy-gradient objectives and their statistics, as functions of tensors.

Knows nothing of diffusers, Accelerate or configs. A further objective is a further function here.
"""

import torch


def ppo_clipped_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    clip_range: float,
    adv_clip_max: float,
    num_dims: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate of DDPO-IS over one minibatch of denoising steps.

    Args:
        log_prob: (B,), under the present policy, with gradient; nats per dimension.
        old_log_prob: (B,), under the policy that sampled; NaN marks a step that failed, which counts for nothing.
        advantages: (B,), in standard deviations; clamped to +-adv_clip_max.
        clip_range: the ratio counts between 1 - clip_range and 1 + clip_range.
        num_dims: C * h * w of a latent, over which the log-probs are means.

    Returns:
        The loss, a scalar, and detached scalars: `loss`, `approx_kl` (half the mean squared difference of the
        log-probs), `clipfrac` (share of samples whose ratio lies outside the range), `policy/clip_active` (share whose
        gradient the clip takes away), `policy/kl_nats` (KL of the sampling policy from the present one, per step, in
        nats over all dimensions), `logp_gap` (the largest absolute difference of the log-probs: before the first
        update of an epoch it is rounding alone) and `logp_gap_index` (the sample that has it).

    Source: Schulman et al. 2017 (arXiv 1707.06347) eq. 7; Black et al. 2023 (arXiv 2305.13301) section 4.3; the KLs:
    http://joschu.net/blog/kl-approx.html, k2 for approx_kl and k3 for kl_nats.
    """
    advantages = advantages.clamp(-adv_clip_max, adv_clip_max)
    difference = torch.where(old_log_prob.isfinite(), log_prob - old_log_prob, 0.0)
    advantages = torch.where(old_log_prob.isfinite(), advantages, 0.0)
    ratio = difference.exp()
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    loss = torch.maximum(unclipped_loss, clipped_loss).mean()
    with torch.no_grad():
        total = difference.float() * num_dims
        statistics = {
            "loss": loss.detach(),
            "approx_kl": 0.5 * (difference**2).mean(),
            "clipfrac": ((ratio - 1.0).abs() > clip_range).float().mean(),
            "policy/clip_active": (clipped_loss > unclipped_loss).float().mean(),
            "policy/kl_nats": (total.expm1() - total).mean(),
            "logp_gap": difference.abs().max(),
            "logp_gap_index": difference.abs().argmax(),
        }
    return loss, statistics
