"""--dry_run and --help: everything is told, and nothing is started."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL_RUN, launch

from ddpo_pytorch.dry_run import seconds_of
from ddpo_pytorch.run_plan import OPTIONS, describe_options, load_config, make_plan

BASE = ROOT / "config" / "base.py"


def test_seconds_are_those_of_the_plans_arithmetic():
    config = load_config(str(BASE))
    config.sample.num_steps, config.sample.batch_size, config.sample.num_batches_per_epoch = 10, 4, 3
    config.train.batch_size, config.train.gradient_accumulation_steps, config.num_epochs = 2, 3, 5
    config.eval.every, config.eval.prompts, config.eval.num_prompts, config.eval.num_seeds = 2, ("train",), 4, 3
    plan = make_plan(config, 1)
    median = {"step": 1.0, "decode": 2.0, "reward": 3.0, "train": 0.5, "optimizer": 0.25}
    seconds = seconds_of(plan, {name: {"median_s": value} for name, value in median.items()})
    # Three batches of ten steps and a decoding; all rewards but the last batch's are hidden. Of 12 samples, in pairs,
    # six micro-batches at ten steps each; two updates.
    assert seconds["sampling"] == 36 and seconds["waiting for rewards"] == 3
    assert seconds["training"] == 60 * 0.5 + 2 * 0.25
    # Twelve pictures are three batches; after 0, 2, 4 and 5 epochs.
    assert seconds["evaluation"] == 45 and seconds["run"] == 5 * seconds["epoch"] + 4 * 45


def test_a_dry_run_tells_everything_and_starts_nothing(tmp_path, random_sd):
    arguments = ["--config", str(BASE), f"--config.pretrained.model={random_sd}", *SMALL_RUN, "--config.log_with=wandb"]
    result = launch([*arguments, "--dry_run"], tmp_path)
    assert result.returncode == 0, result.stderr
    told = dict(line.split(":", 1) for line in result.stdout.splitlines() if ":" in line)
    assert told["samples per epoch"].split()[0] == "4"
    assert re.search(r"\d\.\d\d GB resident at the peak, which is in \w+", told["memory"])
    assert re.search(r"\d+ (s|min|h)", told["time of the run"]) and "sampling" in told["time of an epoch"]
    assert "logs/test_DATE: about" in told["would write to"] and "GB are free" in told["would write to"]
    assert "Nothing was started" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_fails_as_the_run_would(tmp_path, random_sd):
    options = ["--config", str(BASE), *SMALL_RUN, "--dry_run", "--config.pretrained.model"]
    missing = launch([*options, "./nowhere"], tmp_path)
    assert missing.returncode == 1 and "there is no such folder" in missing.stderr
    assert [line[:7] for line in missing.stderr.splitlines()] == ["error: "]
    wrong = launch([*options, str(random_sd), "--config.train.batch_size=3"], tmp_path)
    assert wrong.returncode == 1 and "must be a multiple of train.batch_size (3)" in wrong.stderr


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_has_every_option_with_its_comment_and_the_configs_value(flag, tmp_path):
    (tmp_path / "config").symlink_to(ROOT / "config")
    script = str(ROOT / "scripts" / "train.py")
    command = [sys.executable, script, "--config", "config/tiny.py", "--config.seed=7", flag]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=os.environ).stdout
    assert set(re.findall(r"--config\.([\w.]+)=", shown)) >= set(OPTIONS)
    assert "--config.seed=7\n      Random seed." in shown and "--config.train.batch_size=24\n" in shown
    assert "--dry_run" in shown and "\nEvaluation\n" in shown


def test_every_option_of_base_has_a_comment():
    lines = describe_options(BASE.read_text(), load_config(str(BASE))).splitlines()
    bare = [a for a, b in zip(lines, [*lines[1:], ""], strict=True) if a.startswith("  --") and not b.startswith("   ")]
    # Their neighbours' comments are about them too.
    bare = [line.strip().removeprefix("--config.").partition("=")[0] for line in bare]
    of_adam = [f"train.adam_{name}" for name in ("beta2", "weight_decay", "epsilon")]
    assert bare == ["early_stop_patience", *of_adam]
