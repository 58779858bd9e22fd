"""Classifier-free guidance, once: sampling and training both predict noise through `predict_noise`."""

import functools
from collections.abc import Callable

import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

from ddpo_pytorch.diffusers_patch.equal_halves import checkpoint, equal_halves


def uses_guidance(guidance_scale: float) -> bool:
    """Whether a scale calls for the unconditional half: above 1, as in diffusers' pipelines."""
    return guidance_scale > 1.0


def predict_noise(
    unet: Callable,
    latents: torch.Tensor,
    timesteps: torch.Tensor,
    prompt_embeds: torch.Tensor,
    negative_prompt_embeds: torch.Tensor | None,
    guidance_scale: float,
    guidance_rescale: float = 0.0,
    cross_attention_kwargs: dict | None = None,
    cfg_passes: int = 1,
    uncond_grad: bool = True,
) -> torch.Tensor:
    """The UNet's prediction with classifier-free guidance, in float32: (B, C, h, w).

    Args:
        unet: UNet2DConditionModel, possibly wrapped by Accelerate or compiled.
        latents: (B, C, h, w), x_t.
        timesteps: int64 (B,), one per sample.
        prompt_embeds: (B, L, D).
        negative_prompt_embeds: (1 or B, L, D); unused, and may be None, without guidance.
        guidance_scale: w in eps(uncond) + w (eps(cond) - eps(uncond)); see `uses_guidance`.
        cfg_passes: 1: both halves in one batch. 2: one after the other; where a gradient is wanted, activations of the
            unconditional one are not kept but computed again, so that about half as many are held at once.
        uncond_grad: False: no gradient through the unconditional half, which then is another gradient. In two passes,
            where no gradient is wanted too: one formula.
        guidance_rescale: of Lin et al. 2023 (arXiv 2305.08891) section 3.4; 0 is off.

    Source: Ho and Salimans 2022, arXiv 2207.12598, eq. 6, with w there = guidance_scale - 1.
    """
    # Frozen weights may be float16 or bfloat16 with float32 LoRA factors on top: enter in the frozen weights' type.
    dtype = next(unet.parameters()).dtype  # type: ignore[attr-defined]

    def run(x: torch.Tensor, t: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        kwargs = {"cross_attention_kwargs": cross_attention_kwargs, "return_dict": False}
        return unet(x.to(dtype), t, encoder_hidden_states=context.to(dtype), **kwargs)[0].float()

    if not uses_guidance(guidance_scale):
        return run(latents, timesteps, prompt_embeds)
    if negative_prompt_embeds is None:
        raise ValueError(f"guidance_scale {guidance_scale} needs negative_prompt_embeds")
    negative = negative_prompt_embeds.expand_as(prompt_embeds)
    if not uncond_grad:
        with torch.no_grad():
            noise_pred_uncond = run(latents, timesteps, negative)
        noise_pred_cond = run(latents, timesteps, prompt_embeds)
    elif cfg_passes == 2:
        # First, so that its backward pass comes last, when the other's activations are gone.
        is_kept = not torch.is_grad_enabled()
        noise_pred_uncond = (run if is_kept else functools.partial(checkpoint, run))(latents, timesteps, negative)
        noise_pred_cond = run(latents, timesteps, prompt_embeds)
    else:
        with equal_halves():
            both = torch.cat([latents, latents]), torch.cat([timesteps, timesteps])
            noise_pred_uncond, noise_pred_cond = run(*both, torch.cat([negative, prompt_embeds])).chunk(2)
    guided = noise_pred_uncond + guidance_scale * (noise_pred_cond - noise_pred_uncond)
    if guidance_rescale > 0.0:
        guided = rescale_noise_cfg(guided, noise_pred_cond, guidance_rescale=guidance_rescale)
    return guided
