"""Stable Diffusion sampling that keeps every latent and how likely each step was.

`denoise_with_logprob` is the loop; `pipeline_with_logprob` puts prompt encoding before it and image decoding behind it,
with the arguments of diffusers' own pipeline. Knows nothing of rewards or training.
"""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline

from ddpo_pytorch.diffusers_patch.ddim_with_logprob import ddim_step_with_logprob
from ddpo_pytorch.diffusers_patch.guidance import predict_noise, uses_guidance


@torch.no_grad()
def denoise_with_logprob(
    unet: Callable,
    scheduler: DDIMScheduler,
    latents: torch.Tensor,
    prompt_embeds: torch.Tensor,
    negative_prompt_embeds: torch.Tensor | None,
    guidance_scale: float,
    eta: float,
    generator: torch.Generator | list[torch.Generator] | None = None,
    on_step: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
    **guidance_kwargs: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run the scheduler's whole schedule from x_T to x_0.

    Args:
        latents: (B, C, h, w), x_T.
        on_step: called after each step with (step index, timestep, latents); for progress bars.
        guidance_kwargs: the other options of `predict_noise`.
        The rest as in `predict_noise` and `ddim_step_with_logprob`.

    Returns:
        T + 1 latents, float32 (B, C, h, w), x_T first; and T log-probabilities, float32 (B,).
    """
    all_latents, all_log_probs = [latents.float()], []
    for i, t in enumerate(scheduler.timesteps):
        timesteps = t.to(latents.device).expand(latents.shape[0])
        sample = scheduler.scale_model_input(all_latents[-1], t)
        noise_pred = predict_noise(
            unet, sample, timesteps, prompt_embeds, negative_prompt_embeds, guidance_scale, **guidance_kwargs
        )
        next_latents, log_prob = ddim_step_with_logprob(
            scheduler, noise_pred, timesteps, all_latents[-1], eta=eta, generator=generator
        )
        all_latents.append(next_latents)
        all_log_probs.append(log_prob)
        if on_step is not None:
            on_step(i, t, next_latents)
    return all_latents, all_log_probs


def decode_latents(vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
    """Images of final latents: float32 (B, 3, H, W), not yet clipped, in [-1, 1] but for over- and undershoot.

    In slices, since the VAE's activations at full size are larger than anything that the UNet holds: of one image with
    64x64 latents, of more of smaller ones.
    """
    scaled = (latents / vae.config.scaling_factor).to(vae.dtype)
    slices = scaled.split(max(1, 64 * 64 // latents[0, 0].numel()))
    return torch.cat([vae.decode(part, return_dict=False)[0].float() for part in slices])


@torch.no_grad()
def pipeline_with_logprob(
    self: StableDiffusionPipeline,
    prompt: str | list[str] | None = None,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int = 50,
    guidance_scale: float = 7.5,
    negative_prompt: str | list[str] | None = None,
    num_images_per_prompt: int = 1,
    eta: float = 0.0,
    generator: torch.Generator | list[torch.Generator] | None = None,
    latents: torch.Tensor | None = None,
    prompt_embeds: torch.Tensor | None = None,
    negative_prompt_embeds: torch.Tensor | None = None,
    output_type: str = "pil",
    return_dict: bool = True,
    callback: Callable[[int, int, torch.Tensor], None] | None = None,
    callback_steps: int = 1,
    cross_attention_kwargs: dict | None = None,
    guidance_rescale: float = 0.0,
) -> tuple[Any, list[bool] | None, list[torch.Tensor], list[torch.Tensor]]:
    """Generate images as `StableDiffusionPipeline.__call__` does, and return the trajectory too.

    Arguments are those of diffusers' pipeline; its scheduler must be a DDIMScheduler. `return_dict` is accepted and has
    no effect: the result is always a tuple.

    Returns:
        images: in `output_type` ("pil", "np", "pt" as (B, 3, H, W) in [0, 1], or "latent").
        has_nsfw_concept: the safety checker's verdict per image, None without a checker.
        all_latents: T + 1 tensors, float32 (B, C, h, w), x_T first.
        all_log_probs: T tensors, float32 (B,), nats per dimension. With eta 0 each is +inf, a point mass.
    """
    if not isinstance(self.scheduler, DDIMScheduler):
        raise ValueError(
            f"pipeline_with_logprob needs a DDIMScheduler, found {type(self.scheduler).__name__}; "
            "set pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)"
        )
    height = height or self.unet.config.sample_size * self.vae_scale_factor
    width = width or self.unet.config.sample_size * self.vae_scale_factor
    self.check_inputs(prompt, height, width, callback_steps, negative_prompt, prompt_embeds, negative_prompt_embeds)
    device = self._execution_device

    prompt_embeds, negative_prompt_embeds = self.encode_prompt(
        prompt,
        device,
        num_images_per_prompt,
        uses_guidance(guidance_scale),
        negative_prompt,
        prompt_embeds=prompt_embeds,
        negative_prompt_embeds=negative_prompt_embeds,
    )
    self.scheduler.set_timesteps(num_inference_steps, device=device)
    latents = self.prepare_latents(
        prompt_embeds.shape[0],
        self.unet.config.in_channels,
        height,
        width,
        torch.float32,
        device,
        generator,
        latents,
    )

    with self.progress_bar(total=num_inference_steps) as progress_bar:

        def on_step(i: int, t: torch.Tensor, step_latents: torch.Tensor) -> None:
            progress_bar.update()
            if callback is not None and i % callback_steps == 0:
                callback(i, int(t), step_latents)

        all_latents, all_log_probs = denoise_with_logprob(
            self.unet,
            self.scheduler,
            latents,
            prompt_embeds,
            negative_prompt_embeds,
            guidance_scale,
            eta,
            generator,
            on_step,
            guidance_rescale=guidance_rescale,
            cross_attention_kwargs=cross_attention_kwargs,
        )

    if output_type == "latent":
        return all_latents[-1], None, all_latents, all_log_probs
    image = decode_latents(self.vae, all_latents[-1])
    image, has_nsfw_concept = self.run_safety_checker(image, device, prompt_embeds.dtype)
    do_denormalize = [True] * image.shape[0] if has_nsfw_concept is None else [not bad for bad in has_nsfw_concept]
    images = self.image_processor.postprocess(image, output_type=output_type, do_denormalize=do_denormalize)
    return images, has_nsfw_concept, all_latents, all_log_probs
