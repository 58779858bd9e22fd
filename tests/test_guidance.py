import pytest
import torch
from torch.testing import assert_close

from ddpo_pytorch.diffusers_patch.guidance import predict_noise


def inputs(unet):
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(3, 4, 8, 8, generator=generator)
    cond, uncond = torch.randn(3, 5, 16, generator=generator), torch.randn(1, 5, 16, generator=generator)
    return latents, torch.tensor([1, 500, 981]), cond, uncond


@pytest.mark.parametrize("scale", [1.5, 5.0])
def test_guidance_extrapolates_from_the_unconditional_prediction(pipeline, scale):
    latents, timesteps, cond, uncond = inputs(pipeline.unet)
    with torch.no_grad():
        eps_cond = pipeline.unet(latents, timesteps, cond).sample
        eps_uncond = pipeline.unet(latents, timesteps, uncond.expand_as(cond)).sample
        guided = predict_noise(pipeline.unet, latents, timesteps, cond, uncond, scale)
    assert_close(guided, eps_uncond + scale * (eps_cond - eps_uncond))


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_at_one_and_below_there_is_one_conditional_pass(pipeline, scale):
    latents, timesteps, cond, _ = inputs(pipeline.unet)
    with torch.no_grad():
        expected = pipeline.unet(latents, timesteps, cond).sample
        assert_close(predict_noise(pipeline.unet, latents, timesteps, cond, None, scale), expected)


def test_guidance_without_negative_embeddings_is_refused(pipeline):
    latents, timesteps, cond, _ = inputs(pipeline.unet)
    with pytest.raises(ValueError, match="negative_prompt_embeds"):
        predict_noise(pipeline.unet, latents, timesteps, cond, None, 5.0)
