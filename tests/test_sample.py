"""scripts/sample.py: base and trained side by side, against stock diffusers and by its own numbers."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, train
from diffusers import DDIMScheduler, StableDiffusionPipeline
from PIL import Image

SAMPLE = str(ROOT / "scripts" / "sample.py")


def sample(cwd, *arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, SAMPLE, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, random_sd):
    cwd = tmp_path_factory.mktemp("run")
    return train(random_sd, cwd, "--config.num_epochs=2", "--config.save_freq=1", "--config.train.learning_rate=3e-2")


@pytest.fixture(scope="module")
def results(trained, tmp_path_factory):
    """What a sweep over eta and the LoRA's scale wrote, and where."""
    output = tmp_path_factory.mktemp("samples") / "sweep"
    arguments = ["--prompts", "cat, dog", "--seeds=3", "--eta=0,1", "--lora_scale=0,0.5,1", "--rewards=colorfulness"]
    done = sample(trained.parent.parent, "--checkpoint", trained, *arguments, "--batch_size=4", "--output", output)
    assert done.returncode == 0, done.stderr
    assert "trained, eta 1" in done.stdout and "95 % interval" in done.stdout
    return output, json.loads((output / "results.json").read_text())


def test_every_variant_draws_every_prompt_with_every_seed(results):
    output, document = results
    assert [v["name"] for v in document["variants"]] == [
        f"{name}, eta {eta}" for eta in (0, 1) for name in ("base", "LoRA x 0.5", "trained")
    ]
    assert len(document["pictures"]) == 6 * 6 and document["prompts"] == ["cat", "dog"]
    for picture in document["pictures"]:
        assert Image.open(output / picture["file"]).size == (16, 16)
        assert set(picture["scores"]) == {"reward", "colorfulness"}
    # A prompt begins a row: one seed of six variants in each.
    assert Image.open(output / "grid.jpg").width == 6 * 128


def test_numbers_are_those_of_the_pictures(results):
    _, document = results

    def scores(variant):
        own = [p for p in document["pictures"] if p["variant"] == variant]
        return np.array([p["scores"]["colorfulness"] for p in own])

    [base, half, _] = [scores(f"{name}, eta 1") for name in ("base", "LoRA x 0.5", "trained")]
    entry = next(v for v in document["variants"] if v["name"] == "LoRA x 0.5, eta 1")["rewards"]["colorfulness"]
    assert entry["mean"] == pytest.approx(half.mean()) and entry["count"] == 6
    assert entry["change"]["mean"] == pytest.approx((half - base).mean()) != 0
    assert entry["change"]["standard_error"] == pytest.approx((half - base).std(ddof=1) / np.sqrt(6))
    by_prompt = (half - base).reshape(2, 3).mean(1)
    assert entry["change_over_prompts"]["standard_error"] == pytest.approx(by_prompt.std(ddof=1) / np.sqrt(2))
    low, high = entry["change"]["ci95"]
    assert low < entry["change"]["mean"] < high


@pytest.mark.parametrize("variant, scale", [("base", 0.0), ("LoRA x 0.5", 0.5), ("trained", 1.0)])
def test_pictures_are_stock_diffusers(results, trained, random_sd, variant, scale):
    """At eta 0, where nothing but the first noise is drawn."""
    output, document = results
    pipeline = StableDiffusionPipeline.from_pretrained(random_sd, safety_checker=None)
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    if scale:
        pipeline.load_lora_weights(trained / "checkpoints" / "checkpoint_2")
    expected = pipeline(
        ["cat", "cat", "dog"],
        num_inference_steps=3,
        guidance_scale=5.0,
        eta=0.0,
        generator=[torch.Generator().manual_seed(seed) for seed in (0, 2, 1)],
        cross_attention_kwargs={"scale": scale} if scale else None,
        output_type="np",
    ).images
    files = {(p["prompt"], p["seed"]): p["file"] for p in document["pictures"] if p["variant"] == f"{variant}, eta 0"}
    for key, image in zip([("cat", 0), ("cat", 2), ("dog", 1)], expected, strict=True):
        found = np.asarray(Image.open(output / files[key])).astype(float)
        assert np.abs(found - 255 * image).max() <= 1  # rounding to levels


@pytest.mark.slow
def test_a_whole_unet_is_compared_with_its_base_too(tmp_path, random_sd):
    options = ["--config.use_lora=False", "--config.num_epochs=1", "--config.train.learning_rate=1e-3"]
    folder = train(random_sd, tmp_path, *options)
    done = sample(tmp_path, "--checkpoint", folder, "--prompts", "['a cat, sitting']", "--seeds=2")
    assert done.returncode == 0, done.stderr
    [output] = (folder / "samples").iterdir()
    document = json.loads((output / "results.json").read_text())
    assert document["prompts"] == ["a cat, sitting"]
    base, trained = ([p for p in document["pictures"] if p["variant"] == name] for name in ("base", "trained"))
    files = [[(output / p["file"]).read_bytes() for p in own] for own in (base, trained)]
    assert len(base) == 2 and not set(files[0]) & set(files[1])
    refused = sample(tmp_path, "--checkpoint", folder, "--lora_scale=0.5")
    assert refused.returncode == 1 and "holds a whole UNet, which has none" in refused.stderr


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "--checkpoint is missing: a run's folder"),
        (["--checkpoint", "nowhere"], '--checkpoint "nowhere": no checkpoint there'),
        (["--checkpoint", "RUN", "--prompts", "nothing.txt"], 'no prompt file "nothing.txt" here'),
        (["--checkpoint", "RUN", "--prompts", " , "], "there is no prompt in it"),
        (["--checkpoint", "RUN", "--prompts", "['a', "], "it is no list of texts"),
        (["--checkpoint", "RUN", "--eta", "2"], "--eta takes numbers from 0 to 1"),
        (["--checkpoint", "RUN", "--lora_scale", "much"], "--lora_scale takes numbers from -10 to 10"),
        (["--checkpoint", "RUN", "--seeds", "0"], "not a positive integer"),
        (["--checkpoint", "RUN", "--rewards", "colourfulness"], 'eval.rewards "colourfulness" is no function'),
        (["--checkpoint", "RUN", "--output", "."], "not an empty folder; nothing is written over"),
        (["--checkpoint", "RUN", "--nonsense"], "Unknown command line flag"),
        (["--checkpoint", "RUN", "--config.train.lr=1"], "unknown option config.train.lr"),
    ],
)
def test_wrong_input_is_one_line(trained, arguments, says):
    done = sample(trained.parent.parent, *(trained if a == "RUN" else a for a in arguments))
    assert done.returncode == 1 and says in done.stderr
    assert [line[:7] for line in done.stderr.splitlines() if line.strip()] == ["error: "]


@pytest.mark.slow
def test_a_secret_that_the_checkpoint_does_not_hold_is_asked_for(tmp_path, random_sd):
    (tmp_path / "mine.py").write_text("def mine(api_key):\n    return lambda i, p, m: [float(len(api_key))] * len(p)\n")
    options = ["--config.reward_fn=mine.py:mine", "--config.reward_fn_kwargs.api_key=sesame-open"]
    folder = train(random_sd, tmp_path, "--config.num_epochs=1", *options)
    refused = sample(tmp_path, "--checkpoint", folder, "--prompts=cat", "--seeds=1")
    assert refused.returncode == 1 and "does not hold the secret config.reward_fn_kwargs.api_key" in refused.stderr
    given = sample(
        tmp_path, "--checkpoint", folder, "--prompts=cat", "--seeds=1", "--config.reward_fn_kwargs.api_key=open"
    )
    assert given.returncode == 0, given.stderr
    [output] = (folder / "samples").iterdir()
    text = (output / "results.json").read_text()
    assert [v["rewards"]["reward"]["mean"] for v in json.loads(text)["variants"]] == [4.0, 4.0]
