"""The model that ships with the package, and the classifier that judges it."""

import pytest
import torch
from conftest import CORES, ROOT, TINY_SD
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTokenizer

from ddpo_pytorch.diffusers_patch.pipeline_with_logprob import pipeline_with_logprob
from ddpo_pytorch.policy import load_pipeline, load_scheduler
from ddpo_pytorch.tiny_classifier import ANIMALS, classify


def test_stock_diffusers_loads_it_as_a_whole_stable_diffusion():
    pipeline = StableDiffusionPipeline.from_pretrained(TINY_SD)
    assert isinstance(pipeline.unet, UNet2DConditionModel) and isinstance(pipeline.vae, AutoencoderKL)
    assert isinstance(pipeline.text_encoder, CLIPTextModel) and isinstance(pipeline.tokenizer, CLIPTokenizer)
    assert pipeline.unet.config.sample_size * pipeline.vae_scale_factor == 64
    stable_diffusion = {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "num_train_timesteps": 1000,
        "steps_offset": 1,
        "set_alpha_to_one": False,
        "clip_sample": False,
        "prediction_type": "epsilon",
    }
    assert {k: pipeline.scheduler.config[k] for k in stable_diffusion} == stable_diffusion


def test_it_is_small_and_half_precision():
    files = [path for path in TINY_SD.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 12e6
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".txt"}


def test_it_knows_the_45_animals_as_words():
    listed = (ROOT / "ddpo_pytorch" / "assets" / "simple_animals.txt").read_text().split()
    assert list(ANIMALS) == listed and len(listed) == 45
    tokenizer = CLIPTokenizer.from_pretrained(TINY_SD / "tokenizer")
    for animal in listed:
        assert len(tokenizer(animal).input_ids) == 3  # start, the word, end


def share_drawn(seeds: range, num_steps: int, guidance_scale: float, eta: float) -> float:
    """The share of samples, one per animal and seed, that the classifier gives to the prompted animal."""
    scheduler = load_scheduler(str(TINY_SD), "main", num_steps, 1.0, torch.device("cpu"))
    pipeline = load_pipeline(str(TINY_SD), "main", scheduler)
    right = 0
    for seed in seeds:
        images = pipeline_with_logprob(
            pipeline,
            list(ANIMALS),
            num_inference_steps=num_steps,
            guidance_scale=guidance_scale,
            eta=eta,
            generator=torch.Generator().manual_seed(seed),
            output_type="pt",
        )[0]
        right += sum(animal == found for animal, found in zip(ANIMALS, classify(images), strict=True))
    return right / (len(seeds) * len(ANIMALS))


def test_it_draws_what_it_is_asked_for():
    torch.set_num_threads(CORES)
    assert share_drawn(range(1), num_steps=20, guidance_scale=5.0, eta=1.0) > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_it_draws_the_share_that_the_readme_claims(eta):
    torch.set_num_threads(CORES)
    assert share_drawn(range(10), num_steps=50, guidance_scale=5.0, eta=eta) >= 0.8
