"""One stochastic DDIM step and its log-probability.

Written from the equations of DDIM (Song et al. 2020, arXiv 2010.02502) and DDPO (Black et al. 2023, arXiv 2305.13301).
Knows nothing of UNets, prompts or training.
"""

import math

import torch
from diffusers import DDIMScheduler
from diffusers.utils.torch_utils import randn_tensor


def previous_timesteps(scheduler: DDIMScheduler, timesteps: torch.Tensor) -> torch.Tensor:
    """The timestep each DDIM step leads to; negative where it leads to the clean image.

    Args:
        scheduler: with `set_timesteps` called, since the stride depends on the number of steps.
        timesteps: any shape, int64.
    """
    if scheduler.num_inference_steps is None:
        raise ValueError("the scheduler has no timesteps yet; call scheduler.set_timesteps(num_inference_steps) first")
    return timesteps - scheduler.config.num_train_timesteps // scheduler.num_inference_steps


def _alphas_and_std(
    scheduler: DDIMScheduler, timesteps: torch.Tensor, prev_timesteps: torch.Tensor, eta: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """alpha_bar_t, alpha_bar_{t-1} and sigma_t (DDIM eq. 16) for each entry of `timesteps`, on its device."""
    # A no-op once the scheduler lives on the device (policy.load_scheduler puts it there).
    alphas_cumprod = scheduler.alphas_cumprod.to(timesteps.device)
    final_alpha_cumprod = scheduler.final_alpha_cumprod.to(timesteps.device)
    alpha_bar = alphas_cumprod[timesteps]
    alpha_bar_prev = torch.where(
        prev_timesteps >= 0, alphas_cumprod[prev_timesteps.clamp(min=0)], final_alpha_cumprod.to(alpha_bar.dtype)
    )
    variance = (1 - alpha_bar_prev) / (1 - alpha_bar) * (1 - alpha_bar / alpha_bar_prev)
    return alpha_bar, alpha_bar_prev, eta * variance.clamp(min=0).sqrt()


def ddim_std(scheduler: DDIMScheduler, timesteps: torch.Tensor, eta: float) -> torch.Tensor:
    """sigma_t of each step of the scheduler's current schedule (DDIM eq. 16); 0 means the step is deterministic."""
    return _alphas_and_std(scheduler, timesteps, previous_timesteps(scheduler, timesteps), eta)[2]


def gaussian_log_prob(x: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Mean log-density of N(mean, std^2) at x over all but the first dimension, in nats per dimension: shape (B,).

    A std of 0 is a point mass: +inf where x is the mean, -inf elsewhere, never NaN.

    Args:
        x, mean: (B, C, h, w). The gradient flows into `mean`; x is an action that was taken.
        std: (B, 1, 1, 1).
    """
    safe_std = torch.where(std > 0, std, 1.0)
    log_density = -((x - mean) ** 2) / (2 * safe_std**2) - safe_std.log() - 0.5 * math.log(2 * math.pi)
    log_prob = log_density.flatten(1).mean(1)
    at_mean = (x == mean).flatten(1).all(1)
    point_mass = torch.where(at_mean, math.inf, -math.inf).to(log_prob.dtype)
    return torch.where(std.flatten() > 0, log_prob, point_mass)


def ddim_step_with_logprob(
    self: DDIMScheduler,
    model_output: torch.Tensor,
    timestep: int | torch.Tensor,
    sample: torch.Tensor,
    eta: float = 0.0,
    use_clipped_model_output: bool = False,
    generator: torch.Generator | None = None,
    prev_sample: torch.Tensor | None = None,
    prev_timestep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw x_{t-1} given x_t, or take a given one, and return it with its log-probability.

    All arithmetic is float32, and x_{t-1} is returned in float32: rounding it afterwards would make the log-probability
    that of another point (at the last of 50 steps, a ratio error beyond 1e-4 for every sample in bfloat16).

    Args:
        self: the scheduler, with `set_timesteps` called unless `prev_timestep` is given.
        model_output: (B, C, h, w), what the UNet predicted, guidance included.
        timestep: one number, or int64 of shape (B,).
        sample: (B, C, h, w), x_t.
        eta: noise scale in [0, 1]; the log-probability is a density only where eta and the schedule's sigma are > 0.
        use_clipped_model_output: derive the noise from the clipped x_0, as GLIDE does.
        generator: for the drawn noise; not with `prev_sample`.
        prev_sample: (B, C, h, w), a given x_{t-1} to score.
        prev_timestep: int64 of shape (B,), the timestep of x_{t-1} as recorded with a trajectory; from the scheduler's
            schedule if None.

    Returns:
        x_{t-1}, float32 (B, C, h, w), and its log-probability (see `gaussian_log_prob`), float32 (B,).

    Raises:
        ValueError: generator and prev_sample both given, no timesteps set, or an unknown prediction type.

    Source: DDIM eq. 12 and 16; DDPO section 4.1.
    """
    if generator is not None and prev_sample is not None:
        raise ValueError("give a generator to draw x_{t-1}, or prev_sample to score one, not both")
    model_output, sample = model_output.float(), sample.float()
    timesteps = torch.as_tensor(timestep, dtype=torch.int64, device=sample.device).expand(sample.shape[0])
    prev_timesteps = previous_timesteps(self, timesteps) if prev_timestep is None else prev_timestep

    coefficients = _alphas_and_std(self, timesteps, prev_timesteps, eta)
    alpha_bar, alpha_bar_prev, std = (c.view(-1, *[1] * (sample.ndim - 1)) for c in coefficients)

    prediction_type = self.config.prediction_type
    if prediction_type == "epsilon":
        pred_original_sample = (sample - (1 - alpha_bar).sqrt() * model_output) / alpha_bar.sqrt()
        pred_epsilon = model_output
    elif prediction_type == "sample":
        pred_original_sample = model_output
        pred_epsilon = (sample - alpha_bar.sqrt() * model_output) / (1 - alpha_bar).sqrt()
    elif prediction_type == "v_prediction":
        pred_original_sample = alpha_bar.sqrt() * sample - (1 - alpha_bar).sqrt() * model_output
        pred_epsilon = alpha_bar.sqrt() * model_output + (1 - alpha_bar).sqrt() * sample
    else:
        raise ValueError(
            f'the scheduler\'s prediction_type is "{prediction_type}"; it must be "epsilon", "sample" or "v_prediction"'
        )

    if self.config.thresholding:
        pred_original_sample = self._threshold_sample(pred_original_sample)
    elif self.config.clip_sample:
        clip = self.config.clip_sample_range
        pred_original_sample = pred_original_sample.clamp(-clip, clip)
    if use_clipped_model_output:
        pred_epsilon = (sample - alpha_bar.sqrt() * pred_original_sample) / (1 - alpha_bar).sqrt()

    direction = (1 - alpha_bar_prev - std**2).clamp(min=0).sqrt() * pred_epsilon
    prev_sample_mean = alpha_bar_prev.sqrt() * pred_original_sample + direction
    if prev_sample is None:
        noise = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=sample.dtype)
        prev_sample = prev_sample_mean + std * noise
    prev_sample = prev_sample.float()
    return prev_sample, gaussian_log_prob(prev_sample.detach(), prev_sample_mean, std)
