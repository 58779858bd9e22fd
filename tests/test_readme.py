"""What the README says is done here as it says it."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, read_metrics, run_folder

from ddpo_pytorch.run_plan import apply_overrides, load_config, make_plan, split_overrides

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
SHELL_LINES = [
    line.split(" && ")[-1] for kind, text in BLOCKS if kind == "bash" for line in text.replace("\\\n", " ").splitlines()
]
TRAIN_LINES = [line for line in SHELL_LINES if "scripts/train.py" in line]
[MY_REWARD] = [text for kind, text in BLOCKS if kind == "python" and text.startswith("# my_rewards.py\n")]


def arguments_of(line):
    words = shlex.split(line, comments=True)
    return words[words.index("scripts/train.py") + 1 :]


@pytest.mark.parametrize("line", TRAIN_LINES)
def test_every_training_command_passes_the_plan(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").symlink_to(ROOT / "config")
    (tmp_path / "my_rewards.py").write_text(MY_REWARD)
    (tmp_path / "my_prompts.txt").write_text("a cat\na dog\n")
    [_, spec, *rest] = split_overrides(arguments_of(line))[0]
    assert rest == []
    if spec == "config/dgx.py":  # the line that lists what there is
        with pytest.raises(ValueError, match="NAME one of compressibility"):
            load_config(spec)
        return
    config = load_config(spec)
    apply_overrides(config, split_overrides(arguments_of(line))[1])
    processes = 8 if "dgx" in spec else 1
    make_plan(config, 6 if "--num_processes 6" in line else processes)


def test_every_experiment_in_the_tables_is_there():
    named = set(re.findall(r"config/(?:dgx|tiny)\.py:\w+", README))
    assert len(named) >= 8
    for spec in named:
        path, _, name = spec.partition(":")
        load_config(f"{ROOT / path}:{name}")


def test_the_example_of_a_reward_runs_as_it_stands(tmp_path):
    (tmp_path / "my_rewards.py").write_text(MY_REWARD)
    assert len(MY_REWARD.splitlines()) <= 10
    [line] = [line for line in TRAIN_LINES if "my_rewards.py" in line]
    arguments = [str(ROOT / a) if a == "config/tiny.py" else a for a in arguments_of(line)]
    short = ["--config.num_epochs=1", "--config.sample.num_steps=2", "--config.log_with="]
    short += ["--config.sample.batch_size=4", "--config.train.batch_size=4"]
    command = [sys.executable, "-m", "accelerate.commands.launch", str(ROOT / "scripts/train.py"), *arguments, *short]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE")}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    [rewards] = [entry for entry in read_metrics(run_folder(tmp_path)) if "reward" in entry]
    assert len(rewards["reward"]) == len(rewards["reward/red"]) == 8 and rewards["reward/failed_fraction"] == 0
    assert all(0 <= red <= 1 for red in rewards["reward/red"]) and rewards["reward_std"] > 0
