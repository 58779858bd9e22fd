"""Does it learn? With the sign of the advantage, the loss or the reward flipped anywhere, these turn red."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CORES, ROOT, TINY_SD, launch, read_metrics, run_folder

from ddpo_pytorch.diffusers_patch.pipeline_with_logprob import pipeline_with_logprob
from ddpo_pytorch.policy import load_pipeline, load_scheduler
from ddpo_pytorch.rewards import jpeg_kilobytes
from ddpo_pytorch.tiny_classifier import ANIMALS, classify


def run_tiny(cwd: Path, *arguments: str) -> Path:
    cwd.mkdir(exist_ok=True)
    result = launch(["--config", *arguments, "--config.log_with="], cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return run_folder(cwd)


def draw(folder: Path | None, num_seeds: int) -> tuple[np.ndarray, float]:
    """JPEG sizes in kB, (num_seeds, 45), and the share of pictures that show their animal, as config/tiny.py samples.

    Args:
        folder: of a run, whose last checkpoint draws; None for the model before training. The noise is the same.
    """
    torch.set_num_threads(CORES)
    pipeline = load_pipeline(str(TINY_SD), "main", load_scheduler(str(TINY_SD), "main", 6, 1.0, torch.device("cpu")))
    if folder is not None:
        last = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("checkpoint_")))
        pipeline.load_lora_weights(last)
    sizes, right = [], 0
    for seed in range(num_seeds):
        images = pipeline_with_logprob(
            pipeline,
            list(ANIMALS),
            num_inference_steps=6,
            guidance_scale=3.0,
            eta=1.0,
            generator=torch.Generator().manual_seed(seed),
            output_type="pt",
        )[0]
        sizes.append(jpeg_kilobytes(images))
        right += sum(animal == found for animal, found in zip(ANIMALS, classify(images), strict=True))
    return np.array(sizes), right / (num_seeds * len(ANIMALS))


@pytest.mark.slow
def test_opposite_rewards_pull_the_same_pictures_apart(tmp_path):
    tiny, few = str(ROOT / "config" / "tiny.py"), ["--config.num_epochs=4", "--config.eval.every=0"]
    few.append("--config.sample.num_batches_per_epoch=1")
    smaller, _ = draw(run_tiny(tmp_path / "smaller", f"{tiny}:compressibility", *few), num_seeds=2)
    larger, _ = draw(run_tiny(tmp_path / "larger", f"{tiny}:incompressibility", *few), num_seeds=2)
    difference = (larger - smaller).ravel()
    assert difference.size == 2 * len(ANIMALS)
    assert difference.mean() > 3 * difference.std(ddof=1) / math.sqrt(difference.size)


@pytest.mark.slow
def test_the_first_command_of_the_readme_improves_the_reward_and_keeps_the_animals(tmp_path):
    folder = run_tiny(tmp_path, str(ROOT / "config" / "tiny.py"))
    rewards = {line["epoch"]: line["reward"] for line in read_metrics(folder) if "reward" in line}
    epochs = sorted(rewards)
    first, last = (np.concatenate([rewards[epoch] for epoch in part]) for part in (epochs[:3], epochs[-3:]))
    standard_error = math.sqrt(first.var(ddof=1) / first.size + last.var(ddof=1) / last.size)
    gain = (last.mean() - first.mean()) / standard_error

    _, share_before = draw(None, num_seeds=4)
    sizes, share_after = draw(folder, num_seeds=4)
    seconds = [json.loads(line).get("time/epoch_s", 0) for line in (folder / "metrics.jsonl").open()]
    print(
        f"gain {gain:.1f} standard errors, {first.mean():.3f} to {last.mean():.3f}; share of pictures that show their"
    )
    print(f"animal {share_before:.3f} to {share_after:.3f}; {sum(seconds):.0f} s")
    assert gain > 3
    assert share_after >= 0.7 * share_before
