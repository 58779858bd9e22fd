"""What the README and docs/ say is done here as they say it."""

import ast
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, read_metrics, run_folder

from ddpo_pytorch.named_functions import load_module
from ddpo_pytorch.run_plan import (
    FREE_DICTS,
    OPTIONS,
    TRACKING,
    TRACKING_OPTIONS,
    apply_overrides,
    load_config,
    make_plan,
    split_overrides,
)
from ddpo_pytorch.scoring import checked_scores

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
PAGES["README.md"] = README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [
    (page, kind, text)
    for page, content in sorted(PAGES.items())
    for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", content, flags=re.MULTILINE | re.DOTALL)
]
SHELL_LINES = [
    part.strip()
    for _, kind, text in BLOCKS
    if kind == "bash"
    for line in text.replace("\\\n", " ").splitlines()
    for part in line.split(" && ")
]
TRAIN_LINES = [line for line in SHELL_LINES if "scripts/train.py" in line]
OTHER_LINES = [line for line in SHELL_LINES if re.search(r"scripts/(?!train)\w+\.py", line)]
OWN_FILES = {
    text.splitlines()[0].removeprefix("# "): text
    for _, kind, text in BLOCKS
    if kind == "python" and text[:5] == "# my_"
}
MY_REWARD = OWN_FILES["my_rewards.py"]


def words_after(line, script):
    words = shlex.split(line, comments=True)
    return words[words.index(script) + 1 :]


def test_there_is_something_to_check():
    assert len(PAGES) >= 8 and len(TRAIN_LINES) >= 12 and len(OTHER_LINES) >= 8 and len(OWN_FILES) >= 2
    assert len(README.splitlines()) < 400


@pytest.mark.parametrize("line", TRAIN_LINES)
def test_every_training_command_passes_the_plan(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").symlink_to(ROOT / "config")
    for name, text in OWN_FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "my_prompts.txt").write_text("a cat\na dog\n")
    rest, overrides = split_overrides(words_after(line, "scripts/train.py"))
    assert set(rest) - {"--config", "--dry_run", "--help"} <= {*rest[1:2]}
    spec = rest[1] if len(rest) > 1 else "config/base.py"
    if spec == "config/dgx.py" and "--help" not in rest:  # the line that lists what there is
        with pytest.raises(ValueError, match="NAME one of compressibility"):
            load_config(spec)
        return
    config = load_config(spec)
    apply_overrides(config, overrides)
    processes = 8 if "dgx" in spec else 1
    make_plan(config, 6 if "--num_processes 6" in line else processes)


def flags_of(script):
    """Names of the flags that a script defines, through absl or argparse."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            first = node.args[0]
            if node.func.attr.startswith("DEFINE_") and isinstance(first, ast.Constant):
                names.add(first.value)
            if node.func.attr == "add_argument" and isinstance(first, ast.Constant):
                names |= {a.value.lstrip("-") for a in node.args if isinstance(a, ast.Constant)}
    return names


@pytest.mark.parametrize("line", OTHER_LINES)
def test_every_other_command_has_flags_that_its_script_knows(line):
    [script] = [word for word in shlex.split(line, comments=True) if re.fullmatch(r"scripts/\w+\.py", word)]
    known = flags_of(script)
    assert known
    words = words_after(line, script)
    # Whose value looks like options of the config
    words = [w for before, w in zip(["", *words], words, strict=False) if before != "--compare_with"]
    arguments, overrides = split_overrides(words)
    given = {word.lstrip("-").partition("=")[0] for word in arguments if word.startswith("--")}
    assert {name.replace("-", "_").removeprefix("no") for name in given} <= known | {
        n.removeprefix("no") for n in known
    }
    if overrides:
        apply_overrides(load_config(str(ROOT / "config" / "base.py")), overrides)


def test_every_option_that_is_named_exists():
    sections = {key.partition(".")[0] for key in OPTIONS if "." in key}
    known = {*OPTIONS, *sections, *FREE_DICTS, TRACKING, *(f"{TRACKING}.{name}" for name in TRACKING_OPTIONS)}
    named = set()
    for page, text in PAGES.items():
        for span in re.findall(r"`([^`\n]+)`", text):
            match = re.match(r"(?:--)?config\.([a-z_]\w*(?:\.\w+)?)\b(?!\()", span)
            match = match or re.match(rf"((?:{'|'.join(sections)})\.[a-z]\w*)\b", span)
            if match:
                named.add((page, match[1]))
    named = {(page, key) for page, key in named if key.partition(".")[0] not in FREE_DICTS and key != "json"}
    assert len(named) >= 30
    assert not {(page, key) for page, key in named if key not in known}


def test_every_file_that_is_named_exists():
    found = set()
    for page, text in PAGES.items():
        folder = (ROOT / page).parent
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            found.add((page, target))
            assert (folder / target).exists(), f"{page} links to {target}"
        for name in re.findall(r"`((?:ddpo_pytorch|scripts|config|tests|docs)/[\w./]+\.(?:py|md|txt|sh))", text):
            found.add((page, name))
            assert (ROOT / name).exists(), f"{page} names {name}"
        for name in re.findall(r"`(test_\w+\.py)", text):
            assert (ROOT / "tests" / name).exists(), f"{page} names {name}"
    assert len(found) >= 40


def test_every_test_that_is_named_exists():
    for page, text in PAGES.items():
        for file, name in re.findall(r"`(?:tests/)?(test_\w+\.py)::(test_\w+)", text):
            functions = re.findall(r"^def (test_\w+)", (ROOT / "tests" / file).read_text(), flags=re.MULTILINE)
            assert any(function.startswith(name) for function in functions), f"{page} names {file}::{name}"


def test_every_function_that_a_page_points_at_exists():
    pointers = re.findall(r"`(ddpo_pytorch/[\w/]+\.py)`?::?`?(\w+)", "\n".join(PAGES.values()))
    pointers += re.findall(r"`(ddpo_pytorch/[\w/]+\.py)`, `(\w+)`", "\n".join(PAGES.values()))
    assert len(pointers) >= 5
    for file, name in pointers:
        assert re.search(rf"^(?:    )?(?:def|class) {name}\b", (ROOT / file).read_text(), flags=re.MULTILINE), (
            file,
            name,
        )


def test_every_metric_that_a_page_names_is_logged():
    sources = "\n".join(p.read_text() for f in ("ddpo_pytorch", "scripts") for p in (ROOT / f).rglob("*.py"))
    text = "\n".join(PAGES.values())
    metrics = {name for name in re.findall(r"`((?:policy|time|reward)/[a-z_]+)`", text) if not name.endswith("_")}
    assert len(metrics) >= 12
    of_components = {f"reward/{name}_mean" for name in ("jpeg_compressibility", "colorfulness")}
    assert not {name for name in metrics - of_components if f'"{name}"' not in sources}


@pytest.mark.parametrize("page, text", [(page, text) for page, kind, text in BLOCKS if kind == "python"])
def test_every_python_example_is_python(page, text):
    ast.parse(text)


@pytest.mark.parametrize("name", OWN_FILES)
def test_every_example_of_a_reward_scores_a_batch(name, tmp_path):
    (tmp_path / name).write_text(OWN_FILES[name])
    module = load_module(name.removesuffix(".py"), str(tmp_path / name))
    [factory] = [f for f in vars(module).values() if callable(f) and getattr(f, "__module__", "") == module.__name__]
    images = torch.rand(3, 3, 16, 16)
    images[1] = 0.5
    scores = checked_scores(factory()(images, ["a", "b", "c"], [{}] * 3), 3, name)
    assert scores.rewards.shape == (3,) and np.isfinite(scores.rewards).all() and scores.details
    assert len(set(scores.rewards.tolist())) == 3


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
    arguments = [str(ROOT / a) if a == "config/tiny.py" else a for a in words_after(line, "scripts/train.py")]
    short = ["--config.num_epochs=1", "--config.sample.num_steps=2", "--config.log_with=", "--config.eval.every=0"]
    short += ["--config.sample.batch_size=4", "--config.train.batch_size=4"]
    command = [sys.executable, "-m", "accelerate.commands.launch", str(ROOT / "scripts/train.py"), *arguments, *short]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE")}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    [rewards] = [entry for entry in read_metrics(run_folder(tmp_path)) if "reward" in entry]
    assert len(rewards["reward"]) == len(rewards["reward/red"]) == 8 and rewards["reward/failed_fraction"] == 0
    assert all(0 <= red <= 1 for red in rewards["reward/red"]) and rewards["reward_std"] > 0
