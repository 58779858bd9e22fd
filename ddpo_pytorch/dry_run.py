"""What a run would do, need and take, from its plan and from one step of each kind; starts nothing."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpo_pytorch import launch
from ddpo_pytorch.exits import RunFailure
from ddpo_pytorch.metrics import duration
from ddpo_pytorch.run_plan import RunPlan

# By which launchers tell a process that it is one of several, which the measured one is not
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def measured_steps(benchmark: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """One batch's denoising steps, decoding and rewards, and one micro-batch of training, in a process of their own.

    Args:
        benchmark: scripts/benchmark.py.
        arguments: --config and its overrides.

    Returns:
        What its --json holds.

    Raises:
        RunFailure: with what it said, if it fails; as the run itself would.
    """
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHED and not k.startswith("TORCHELASTIC")}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        options = ["--reps=2", "--nocount_flops", "--phases=sample,decode,reward,train", f"--json={results}"]
        command = [sys.executable, str(benchmark), *arguments, *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not results.is_file():
            said = [line for line in done.stderr.splitlines() if line.strip()]
            errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
            raise RunFailure(errors[-1] if errors else f"one step on trial failed: {said[-1] if said else 'no reason'}")
        return json.loads(results.read_text())


def seconds_of(plan: RunPlan, phases: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Seconds of an epoch's phases, of an evaluation and of the whole run, from one step of each kind.

    What processes wait for each other is not in it.

    Args:
        phases: "median_s" of "step", "decode", "reward", "train" and "optimizer", per batch or micro-batch.
    """
    config = plan.config
    one = {name: phases[name]["median_s"] for name in ("step", "decode", "reward", "train", "optimizer")}
    per_batch = config.sample.num_steps * one["step"] + one["decode"]
    batches = config.sample.num_batches_per_epoch
    sample = batches * per_batch
    reward = max(one["reward"], batches * one["reward"] / config.num_reward_workers - sample)  # the rest is hidden
    train = plan.micro_batches_per_epoch * one["train"] + plan.updates_per_epoch * one["optimizer"]
    epoch = sample + reward + train
    pictures = sum(len(s.prompts) for s in plan.eval_sets) * config.eval.num_seeds
    # A batch of fewer pictures takes less.
    evaluation = pictures / plan.num_processes / config.sample.batch_size * (per_batch + one["reward"])
    evaluations = sum(plan.evaluates(epochs) for epochs in range(config.num_epochs + 1))
    return {
        "sampling": sample,
        "waiting for rewards": reward,
        "training": train,
        "epoch": epoch,
        "evaluation": evaluation,
        "run": config.num_epochs * epoch + evaluations * evaluation,
    }


def describe(plan: RunPlan, benchmark: Path, arguments: Sequence[str]) -> str:
    """For people: the plan, memory, time, and where things would be written."""
    config = plan.config
    found = measured_steps(benchmark, arguments)
    seconds = seconds_of(plan, found["phases"])
    parts = ", ".join(f"{name} {duration(seconds[name])}" for name in ("sampling", "waiting for rewards", "training"))
    peak = max(found["phases"].items(), key=lambda item: item[1]["peak_gb"])
    kind = "of the GPU's allocator" if found["device"].startswith("cuda") else "resident"
    logdir = Path(config.logdir).resolve()
    existing = next(folder for folder in (logdir, *logdir.parents) if folder.is_dir())
    writable = os.access(existing, os.W_OK)
    name = f"{config.run_name}_DATE" if config.run_name else "DATE"
    # Weights and two moments of each, float32
    checkpoint_mb = 12 * found["trainable_parameters"] / 1e6
    saved = config.num_epochs // config.save_freq if config.save_freq else 0
    kept = min(config.num_checkpoint_limit, max(1, saved))
    lines = launch.plan_lines(plan) | {
        "device": f"{found['device']} ({found['hardware']}, {found['threads']} threads), mixed precision "
        f"{config.mixed_precision}",
        "to train": f"{found['trainable_parameters']:,} trainable parameters",
        "memory": f"{peak[1]['peak_gb']:.2f} GB {kind} at the peak, which is in {peak[0]}",
        "time of an epoch": f"{duration(seconds['epoch'])}: {parts}",
        "time of the run": f"{duration(seconds['run'])}"
        + (f", each evaluation {duration(seconds['evaluation'])} of it" if plan.eval_sets else ""),
        "would write to": f"{Path(config.logdir) / name}{'' if writable else ', WHICH CANNOT BE WRITTEN'}: about "
        f"{kept * checkpoint_mb:,.0f} MB for {kept} checkpoints of {checkpoint_mb:,.1f} MB; "
        f"{shutil.disk_usage(existing).free / 1e9:,.0f} GB are free",
        "dashboards": config.log_with or "none",
    }
    note = "Nothing was started. Times are from the last two of three steps of each kind, on one process."
    return launch.aligned(lines) + f"\n{note}"
