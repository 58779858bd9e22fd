import json
import re

import pytest
import torch
from conftest import ROOT

from ddpo_pytorch import launch
from ddpo_pytorch.exits import RunFailure
from ddpo_pytorch.named_functions import ConfigError
from ddpo_pytorch.run_plan import apply_overrides, load_config, make_plan


def config_with(**options):
    config = load_config(str(ROOT / "config" / "base.py"))
    apply_overrides(config, [("mixed_precision", "no"), ("log_with", ""), *options.items()])
    return config


@pytest.mark.parametrize("name, says", [("wandbb", "no tracker of Accelerate.*wandb"), ("aim", "pip install aim")])
def test_trackers_that_cannot_be_had_are_refused(name, says):
    with pytest.raises(ConfigError, match=f'"{name}".*{says}'):
        launch.make_accelerator(config_with(log_with=name))


@pytest.mark.parametrize("processes_here, threads", [("1", 4), ("2", 2), ("8", 1)])
def test_processes_of_a_machine_share_its_cpu_threads(monkeypatch, processes_here, threads):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes_here)
    launch.make_accelerator(config_with(cpu_threads="4"))
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("name", ["", "mine"])
def test_a_new_run_has_its_name_date_and_resolved_config(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    config = config_with(run_name=name)
    run_name, folder = launch.open_run_folder(launch.make_accelerator(config), config, None, None)
    assert str(folder) == f"logs/{run_name}" and folder.is_dir()
    assert run_name.startswith("mine_20" if name else "20")
    document = json.loads((folder / "config.json").read_text())
    assert document["num_processes"] == 1 and document["config"]["seed"] == 42


def test_a_run_never_writes_into_the_folder_of_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_with()
    accelerator = launch.make_accelerator(config)
    _, folder = launch.open_run_folder(accelerator, config, None, None)
    monkeypatch.setattr(launch, "datetime", type("Frozen", (), {"datetime": Frozen(folder.name)}))
    with pytest.raises(ConfigError, match="cannot make the folder logs/.*File exists"):
        launch.open_run_folder(accelerator, config, None, None)


def test_a_resumed_run_says_which_options_it_changes():
    saved = {"seed": 1, "lora": {"target_modules": ["to_q"]}, "train": {"learning_rate": 1e-3}, "num_epochs": 2}
    present = {"seed": 1, "lora": {"target_modules": ("to_q",)}, "train": {"learning_rate": 1e-4}, "num_epochs": 4}
    assert launch.changed_options(saved, present) == ["train.learning_rate 0.001 -> 0.0001"]


class Frozen:
    """A clock that shows one moment."""

    def __init__(self, text: str) -> None:
        self.text = text

    def now(self) -> "Frozen":
        return self

    def strftime(self, pattern: str) -> str:
        return self.text


def reward_for(tmp_path, monkeypatch, source, **kwargs):
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    config = config_with(reward_fn="mine.py:reward", **{f"reward_fn_kwargs.{k}": v for k, v in kwargs.items()})
    return launch.make_reward(launch.make_accelerator(config), make_plan(config, 1))


def test_a_factory_with_a_device_gets_the_process_own(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    source = "def reward(device=None): return lambda images, prompts, metadata: device"
    assert reward_for(tmp_path, monkeypatch, source)(0, 0, 0) == torch.device("cpu")
    assert reward_for(tmp_path, monkeypatch, source, device="meta")(0, 0, 0) == "meta"


@pytest.mark.parametrize(
    "body, says",
    [
        ("raise OSError('no such model')", "config.reward_fn mine.py:reward: no such model"),
        ("import no_such_module", "config.reward_fn mine.py:reward: No module named 'no_such_module'"),
        ("1 / 0", "config.reward_fn mine.py:reward raised ZeroDivisionError: division by zero"),
        ("return 3", "must return a function f(images, prompts, metadata); it returned int"),
    ],
)
def test_a_reward_that_cannot_be_made_is_a_config_error(tmp_path, monkeypatch, body, says):
    with pytest.raises((ConfigError, RunFailure), match=re.escape(says)):
        reward_for(tmp_path, monkeypatch, f"def reward():\n    {body}\n")
