"""The training script, whole, in processes of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import wandb_file
from conftest import ROOT, SMALL_RUN, command_for, launch, read_metrics, run_folder, save_random_sd, train
from diffusers import StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load_file

from ddpo_pytorch.checkpoints import read_state


def assert_same_checkpoint(a, b):
    """Weights, optimizer, and position are equal to the last bit."""
    states = [read_state(folder) for folder in (a, b)]
    for state in states:
        state.run_name, state.config, state.tracker_run_ids = "", {}, {}
    assert states[0] == states[1]
    weights = [sorted(folder.rglob("*.safetensors")) for folder in (a, b)]
    assert len(weights[0]) == len(weights[1]) == 1
    for key, tensor in load_file(weights[0][0]).items():
        assert torch.equal(tensor, load_file(weights[1][0])[key]), key
    optimizers = [torch.load(folder / "optimizer.pt", weights_only=True) for folder in (a, b)]
    assert optimizers[0]["param_groups"] == optimizers[1]["param_groups"]
    for index, entry in optimizers[0]["state"].items():
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizers[1]["state"][index][key]))


# Two prompts, so that their own statistics are used from the second epoch on.
FOUR_EPOCHS = [
    "--config.num_epochs=4",
    "--config.save_freq=2",
    "--config.per_prompt_stat_tracking.min_count=3",
    "--config.prompt_fn=from_file",
    "--config.prompt_fn_kwargs={'path': 'simple_animals.txt', 'low': 0, 'high': 2}",
]


@pytest.mark.parametrize(
    "num_processes, extra",
    [
        (1, ["--config.train.num_inner_epochs=2", "--config.train.timestep_fraction=0.7"]),
        pytest.param(
            1,
            ["--config.use_lora=False", "--config.train.learning_rate=1e-3", "--config.mixed_precision=bf16"],
            marks=pytest.mark.slow,
        ),
        (2, ["--config.train.gradient_accumulation_steps=2", "--config.train.lr_warmup_steps=6"]),
    ],
    ids=["lora", "full-bf16", "two-processes"],
)
def test_resumed_equals_uninterrupted_bit_for_bit_metrics_included(tmp_path, random_sd, num_processes, extra):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    straight.mkdir()
    resumed.mkdir()
    whole = train(random_sd, straight, *FOUR_EPOCHS, *extra, num_processes=num_processes)
    half = train(random_sd, resumed, *FOUR_EPOCHS, *extra, "--config.num_epochs=2", num_processes=num_processes)
    again = train(random_sd, resumed, *FOUR_EPOCHS, *extra, f"--config.resume_from={half}", num_processes=num_processes)
    assert again == half
    assert_same_checkpoint(whole / "checkpoints" / "checkpoint_2", half / "checkpoints" / "checkpoint_2")
    assert_same_checkpoint(whole / "checkpoints" / "checkpoint_4", half / "checkpoints" / "checkpoint_4")
    assert read_metrics(whole) == read_metrics(half)
    updates = [line for line in read_metrics(whole) if "loss" in line]
    assert [line["step"] for line in updates] == list(range(len(updates)))
    assert len({line["loss"] for line in updates}) == len(updates)
    gaps = [line["policy/logp_gap"] for line in read_metrics(whole) if "policy/logp_gap" in line]
    assert gaps == [0.0] * 4


def test_a_run_leaves_what_people_look_at(tmp_path, random_sd):
    folder = train(random_sd, tmp_path, "--config.num_epochs=3", "--config.save_freq=2")
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "images",
        "reward.png",
        "report.html",
        "checkpoints",
        "run.lock",
    }
    assert folder.name.startswith("test_20")
    document = json.loads((folder / "config.json").read_text())
    assert document["config"]["train"]["learning_rate"] == 1e-2 and torch.__version__.startswith(
        document["versions"]["torch"]
    )
    # The last epoch is saved though save_freq does not fall on it.
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]
    kinds = (".jpg", ".json", "_best.jpg", "_worst.jpg")
    assert sorted(p.name for p in (folder / "images").iterdir()) == [
        f"epoch_00{i}{kind}" for i in range(3) for kind in kinds
    ]
    assert Image.open(folder / "images" / "epoch_000.jpg").width == 2 * 128  # all four samples, 2 x 2
    Image.open(folder / "reward.png").verify()

    lines = read_metrics(folder)
    assert all({"step", "epoch"} <= set(line) for line in lines)
    rewards = [line for line in lines if "reward" in line]
    assert [line["reward_queries"] for line in rewards] == [4, 8, 12]
    extremes = json.loads((folder / "images" / "epoch_001.json").read_text())
    assert extremes["best"]["reward"] == max(rewards[1]["reward"]) and extremes["epoch"] == 1
    assert extremes["worst"]["reward"] == min(rewards[1]["reward"]) and extremes["worst"]["prompt"]
    assert all(len(line["reward"]) == 4 for line in rewards) and [line["epoch"] for line in rewards] == [0, 1, 2]
    update = next(line for line in lines if "loss" in line)
    assert {"loss", "approx_kl", "clipfrac", "inner_epoch", "grad_norm", "learning_rate"} <= set(update)
    seconds = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"time/sample_s", "time/reward_s", "time/train_s", "time/epoch_s"} <= set(seconds)

    stock = StableDiffusionPipeline.from_pretrained(random_sd, safety_checker=None)
    stock.load_lora_weights(folder / "checkpoints" / "checkpoint_3")


RECORDING_PROMPTS = """
import os, random
def prompt_fn():
    prompt = random.choice("abcdefghijklmnopqrstuvwxyz")
    with open(f"prompts_{os.environ['RANK']}.txt", "a") as file:
        file.write(prompt)
    return prompt, {}
"""


def test_two_processes_draw_different_prompts_and_share_their_rewards(tmp_path, random_sd):
    (tmp_path / "mine.py").write_text(RECORDING_PROMPTS)
    folder = train(
        random_sd, tmp_path, "--config.num_epochs=2", "--config.prompt_fn=mine.py:prompt_fn", num_processes=2
    )
    drawn = [(tmp_path / f"prompts_{rank}.txt").read_text() for rank in range(2)]
    # One draw on trial in the plan, then four in each of two epochs.
    assert len(drawn[0]) == len(drawn[1]) == 9 and drawn[0][1:] != drawn[1][1:]
    rewards = [line["reward"] for line in read_metrics(folder) if "reward" in line]
    assert [len(r) for r in rewards] == [8, 8]
    tracked = read_state(folder / "checkpoints" / "checkpoint_2").stat_tracker
    assert set(tracked) == set(drawn[0][1:] + drawn[1][1:])
    assert sorted(sum(tracked.values(), [])) == sorted(sum(rewards, []))


FAILING_REWARD = """
import os
def reward():
    def f(images, prompts, metadata):
        if os.environ.get("RANK", "0") == "1":
            raise RuntimeError("the scorer fell over")
        with open("scored.txt", "a") as file:
            file.write("x")
        return [float(len(p)) for p in prompts]
    return f
"""


def test_a_reward_that_fails_on_one_process_ends_both_with_its_message(tmp_path, random_sd):
    (tmp_path / "mine.py").write_text(FAILING_REWARD)
    arguments = ["--config", str(ROOT / "config/base.py"), f"--config.pretrained.model={random_sd}", *SMALL_RUN]
    extra = ["--config.reward_fn=mine.py:reward", "--config.sample.num_batches_per_epoch=200"]
    result = launch([*arguments, *extra], tmp_path, num_processes=2)
    assert result.returncode != 0
    message = "process 1: reward function mine.py:reward failed with RuntimeError: the scorer fell over"
    assert result.stderr.count(f"error: {message}") == 2
    # Where it came from, and the healthy process did not sample on to the end.
    assert 'in f\n    raise RuntimeError("the scorer fell over")' in result.stderr
    scored = tmp_path / "scored.txt"
    assert not scored.exists() or len(scored.read_text()) < 100


HANGING_REWARD = """
import os, time
def reward(seconds):
    def f(images, prompts, metadata):
        open("hangs", "w").close()
        time.sleep(seconds)
        return [0.0] * len(prompts)
    return f
"""


def start_hanging(tmp_path, random_sd, *extra):
    (tmp_path / "mine.py").write_text(HANGING_REWARD)
    arguments = ["--config", str(ROOT / "config/base.py"), f"--config.pretrained.model={random_sd}", *SMALL_RUN]
    return [*arguments, "--config.reward_fn=mine.py:reward", "--config.reward_fn_kwargs.seconds=3600", *extra]


def test_a_reward_that_sleeps_for_ever_ends_the_run(tmp_path, random_sd):
    arguments = start_hanging(tmp_path, random_sd, "--config.reward_timeout=1")
    result = launch(arguments, tmp_path, timeout=100)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "error: reward function mine.py:reward took longer than config.reward_timeout, 1 s" in result.stderr


def test_ctrl_c_ends_at_once_though_a_reward_is_busy(tmp_path, random_sd):
    command, options = command_for(start_hanging(tmp_path, random_sd), tmp_path)
    process = subprocess.Popen(command, **options)
    deadline = time.monotonic() + 100
    while not (tmp_path / "hangs").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130 and "ended by SIGINT" in errors and time.monotonic() - started < 10


MANY = ["--config.sample.batch_size=40", "--config.train.batch_size=40", "--config.reward_fn=mine.py:reward"]
NOW_AND_THEN = """
def reward():
    return lambda images, prompts, metadata: [float("nan") if i == 7 else float(i) for i in range(len(prompts))]
"""


def test_wandb_goes_offline_by_itself_and_a_resumed_run_is_the_same_run(tmp_path, random_sd):
    """With more than 32 rewards, which W&B shows as a histogram, some of which failed."""
    (tmp_path / "mine.py").write_text(NOW_AND_THEN)

    def run(*extra):
        arguments = ["--config", str(ROOT / "config/base.py"), f"--config.pretrained.model={random_sd}", *SMALL_RUN]
        evaluated = ["--config.eval.every=1", "--config.eval.prompts=train", "--config.eval.num_prompts=2"]
        result = launch([*arguments, "--config.log_with=wandb,tensorboard", *MANY, *evaluated, *extra], tmp_path)
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    output = run("--config.num_epochs=1")
    assert output.count("wandb login") == 1
    folder = run_folder(tmp_path)
    run("--config.num_epochs=2", f"--config.resume_from={folder}")
    assert run_folder(tmp_path) == folder
    assert list((folder / "ddpo-pytorch").glob("events.out.tfevents.*"))
    files = list((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1
    assert read_state(folder / "checkpoints" / "checkpoint_2").tracker_run_ids["wandb"] in files[0].name
    # Read back: one continuous run, no point lost, no step smaller than the one before, the same numbers.
    points = [point for file in sorted(files) for point in wandb_file.history(file)]
    lines = [line for line in read_metrics(folder) if "loss" in line]
    assert [point["_step"] for point in points] == list(range(len(lines))) == [line["step"] for line in lines]
    assert [point["loss"] for point in points] == [line["loss"] for line in lines]
    assert [point["epoch"] for point in points if "reward_mean" in point] == [0, 1]
    # What people would have to build by hand otherwise: histograms, captions that find a picture again, axes.
    with_rewards = [point for point in points if "reward_mean" in point]
    assert [sum(point["reward/values"]) for point in with_rewards] == [78, 78]  # of 80 rewards two failed
    assert {point["reward/_type"] for point in with_rewards} == {"histogram"}
    assert [point["reward_queries"] for point in with_rewards] == [80, 160]
    captions = [caption for point in with_rewards for caption in point["images/captions"]]
    pattern = r"[a-z]+ \| (?:[\d.]+|nan \| failed: .*) \| epoch [01], seed 42, sample \d+"
    assert len(captions) == 32 and all(re.fullmatch(pattern, caption) for caption in captions)
    evaluated = [point for point in points if "eval/epoch" in point]
    assert [point["eval/epoch"] for point in evaluated][-1] == 2 and len(evaluated) >= 2
    shown = evaluated[-1]["eval/train/images/captions"]
    assert len(shown) == 4 and all(re.fullmatch(r"\w+ \| seed [01] \| reward \S+ \| after 2 epochs", c) for c in shown)
    assert wandb_file.axes(files[0]) >= {("reward_mean", "epoch"), ("eval/*", "eval/epoch"), ("time/*", "epoch")}
    assert [point["epoch"] for point in points if "policy/logp_gap" in point] == [0, 1]
    pictures = list((folder / "wandb").glob("offline-run-*/files/media/images/images_*.png"))
    assert len(pictures) == 2 * 16
    assert all(line["reward"][7] is None for line in read_metrics(folder) if "reward" in line)
    assert not (tmp_path / "wandb").exists()


@pytest.mark.parametrize(
    "extra, says",
    [
        (["--config.train.batch_size=3"], "sample.batch_size (2) must be a multiple of train.batch_size (3)"),
        (["--config.log_with=wandbb"], '"wandbb" is no tracker of Accelerate'),
        (["--config.mixed_precision=fp16"], '"fp16" needs a CUDA GPU'),
        (["--config.pretrained.model=nobody/nothing"], '"nobody/nothing" is no folder here'),
        (["--config.resume_from=nowhere"], '"nowhere": no checkpoint there'),
        (["--config.lerning_rate=1"], "unknown option config.lerning_rate"),
        (["--confg.seed=1"], "unknown flag --confg.seed; options are written --config.KEY=VALUE"),
        (["train.learning_rate=1"], "unexpected arguments ['train.learning_rate=1']"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_work_ends_with_one_line_and_leaves_nothing(tmp_path, random_sd, extra, says):
    arguments = ["--config", str(ROOT / "config/base.py"), f"--config.pretrained.model={random_sd}", *SMALL_RUN, *extra]
    result = launch(arguments, tmp_path, HF_HUB_OFFLINE="1")
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and says in errors[0] and "Traceback" not in result.stderr
    assert not (tmp_path / "logs").exists()


def test_resuming_on_another_model_is_refused_and_harms_nothing(tmp_path, random_sd):
    folder = train(random_sd, tmp_path, "--config.num_epochs=1")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    other = save_random_sd(tmp_path / "other", seed=1)
    for extra, says in [
        (["--config.lora.rank=8"], "LoRA rank 4, but config.lora.rank is 8"),
        ([f"--config.pretrained.model={other}"], "has another UNet"),
    ]:
        arguments = ["--config", str(ROOT / "config/base.py"), f"--config.pretrained.model={random_sd}", *SMALL_RUN]
        result = launch([*arguments, f"--config.resume_from={folder}", *extra], tmp_path)
        assert result.returncode == 1 and says in result.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_model_that_moved_resumes_from_its_new_folder(tmp_path, random_sd):
    folder = train(random_sd, tmp_path, "--config.num_epochs=1")
    moved = shutil.copytree(random_sd, tmp_path / "moved")
    train(moved, tmp_path, "--config.num_epochs=2", f"--config.resume_from={folder / 'checkpoints'}")
    assert (folder / "checkpoints" / "checkpoint_2").is_dir()


def test_gradients_that_stay_not_finite_stop_the_run_and_save_nothing(tmp_path, random_sd):
    """An infinite learning signal: the clip range is so wide and the rate so high that weights overflow."""
    arguments = ["--config", str(ROOT / "config/base.py"), f"--config.pretrained.model={random_sd}", *SMALL_RUN]
    extra = ["--config.train.learning_rate=1e30", "--config.train.max_skipped_steps=2", "--config.num_epochs=5"]
    result = launch([*arguments, *extra], tmp_path)
    assert result.returncode != 0
    assert "not finite" in result.stderr or "more than config.max_failed_fraction" in result.stderr
    assert not list((run_folder(tmp_path) / "checkpoints").glob("checkpoint_*"))


def test_accelerate_launch_runs_the_embedded_model(tmp_path):
    """README's first command, cut short."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "ACCELERATE"))}
    arguments = ["--config.num_epochs=1", "--config.sample.num_steps=2", "--config.sample.num_batches_per_epoch=1"]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", str(ROOT / "scripts/train.py")),
            *("--config", str(ROOT / "config/tiny.py"), *arguments),
        ],
        cwd=tmp_path,
        env=environment | {"NETRC": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for line in (
        "samples per epoch: 48 = 48 x 1 batches",
        "batch per update:  24 = 24 x 1 accumulated",
        "updates per epoch: 2,",
        "trainable parameters",
    ):
        assert line in result.stdout
    assert (run_folder(tmp_path) / "checkpoints" / "checkpoint_1").is_dir()
