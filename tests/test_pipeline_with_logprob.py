import pytest
import torch
from diffusers import PNDMScheduler
from torch.testing import assert_close

from ddpo_pytorch.diffusers_patch.ddim_with_logprob import ddim_step_with_logprob
from ddpo_pytorch.diffusers_patch.guidance import predict_noise
from ddpo_pytorch.diffusers_patch.pipeline_with_logprob import pipeline_with_logprob


@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("guidance_scale", [1.0, 5.0])
def test_images_equal_the_stock_pipeline(pipeline, eta, guidance_scale):
    arguments = {
        "prompt": ["a cat", "dog"],
        "num_inference_steps": 5,
        "eta": eta,
        "guidance_scale": guidance_scale,
        "num_images_per_prompt": 2,
    }
    stock = pipeline(**arguments, output_type="pt", generator=torch.Generator().manual_seed(1)).images
    images, nsfw, latents, log_probs = pipeline_with_logprob(
        pipeline, **arguments, output_type="pt", generator=torch.Generator().manual_seed(1)
    )
    assert_close(images, stock)
    assert nsfw is None and images.shape == (4, 3, 16, 16)
    assert len(latents) == 6 and latents[0].shape == (4, 4, 8, 8)
    assert len(log_probs) == 5 and log_probs[0].shape == (4,)


def test_log_probs_are_those_of_the_steps_taken(pipeline):
    _, _, latents, log_probs = pipeline_with_logprob(
        pipeline, ["cat"], num_inference_steps=4, eta=1.0, output_type="latent", guidance_scale=3.0
    )
    cond, uncond = pipeline.encode_prompt(["cat"], "cpu", 1, True)
    for j, t in enumerate(pipeline.scheduler.timesteps):
        with torch.no_grad():
            eps = predict_noise(pipeline.unet, latents[j], t.expand(1), cond, uncond, 3.0)
        _, log_prob = ddim_step_with_logprob(
            pipeline.scheduler, eps, t, latents[j], eta=1.0, prev_sample=latents[j + 1]
        )
        assert_close(log_prob, log_probs[j], rtol=0, atol=0)


def test_callback_sees_every_second_step(pipeline):
    seen = []
    pipeline_with_logprob(
        pipeline, "cat", num_inference_steps=4, eta=1.0, callback=lambda i, t, x: seen.append((i, t)), callback_steps=2
    )
    assert seen == [(0, 751), (2, 251)]


def test_another_scheduler_is_refused(pipeline):
    pipeline.scheduler = PNDMScheduler.from_config(pipeline.scheduler.config)
    with pytest.raises(ValueError, match="DDIMScheduler.from_config"):
        pipeline_with_logprob(pipeline, "cat", num_inference_steps=2)
