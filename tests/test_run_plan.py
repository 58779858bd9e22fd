import subprocess
import sys

import pytest
from conftest import ROOT
from ml_collections import ConfigDict

from ddpo_pytorch.run_plan import (
    FREE_DICTS,
    OPTIONS,
    REQUIRED,
    TRACKING,
    ConfigError,
    apply_overrides,
    load_config,
    make_plan,
    split_overrides,
)

BASE = str(ROOT / "config" / "base.py")
DGX = str(ROOT / "config" / "dgx.py")
TINY = str(ROOT / "config" / "tiny.py")


def config_with(*arguments: str, spec: str = BASE) -> ConfigDict:
    config = load_config(spec)
    rest, overrides = split_overrides(list(arguments))
    assert rest == []
    apply_overrides(config, overrides)
    return config


def plan_with(*arguments: str, spec: str = BASE, num_processes: int = 1):
    return make_plan(config_with(*arguments, spec=spec), num_processes)


# --- the shipped configs


def test_base_has_the_defaults_of_the_original():
    config = load_config(BASE).to_dict()
    original = {
        "run_name": "",
        "seed": 42,
        "logdir": "logs",
        "num_epochs": 100,
        "save_freq": 20,
        "num_checkpoint_limit": 5,
        "mixed_precision": "fp16",
        "allow_tf32": True,
        "resume_from": "",
        "use_lora": True,
        "prompt_fn": "imagenet_animals",
        "prompt_fn_kwargs": {},
        "reward_fn": "jpeg_compressibility",
        "per_prompt_stat_tracking": {"buffer_size": 16, "min_count": 16},
        "sample": {"num_steps": 50, "eta": 1.0, "guidance_scale": 5.0, "batch_size": 1, "num_batches_per_epoch": 2},
    }
    assert {k: config[k] for k in original} == original
    train = {
        "batch_size": 1,
        "use_8bit_adam": False,
        "learning_rate": 3e-4,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_weight_decay": 1e-4,
        "adam_epsilon": 1e-8,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 1.0,
        "num_inner_epochs": 1,
        "cfg": True,
        "adv_clip_max": 5,
        "clip_range": 1e-4,
        "timestep_fraction": 1.0,
    }
    assert {k: config["train"][k] for k in train} == train
    assert config["pretrained"] == {
        "model": "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "revision": "main",
    }


def test_base_has_every_option_with_the_default_that_older_configs_get():
    config = load_config(BASE)
    flat = {f"{k}.{kk}": vv for k, v in config.items() if isinstance(v, ConfigDict) for kk, vv in v.items()}
    flat |= {k: v for k, v in config.items() if not isinstance(v, ConfigDict)}
    assert set(flat) - {f"{TRACKING}.buffer_size", f"{TRACKING}.min_count"} == set(OPTIONS)
    assert set(FREE_DICTS) < set(config)
    for key, (_, _, default) in OPTIONS.items():
        if default is not REQUIRED:
            assert flat[key] == default, key


@pytest.mark.parametrize(
    "name, num_processes, samples, batch, updates, epochs",
    [
        ("compressibility", 8, 256, 64, 4, 100),
        ("incompressibility", 8, 256, 64, 4, 100),
        ("aesthetic", 8, 256, 128, 2, 200),
        ("prompt_image_alignment", 6, 288, 144, 2, 200),
    ],
)
def test_dgx_has_the_published_batch_arithmetic(name, num_processes, samples, batch, updates, epochs):
    config = load_config(f"{DGX}:{name}")
    assert config.reward_fn == {"aesthetic": "aesthetic_score", "prompt_image_alignment": "llava_bertscore"}.get(
        name, f"jpeg_{name}"
    )
    plan = make_plan(config, num_processes)
    assert (plan.samples_per_epoch_total, plan.batch_per_update_total, plan.updates_per_epoch) == (
        samples,
        batch,
        updates,
    )
    assert config.num_epochs == epochs and config.pretrained.model == "CompVis/stable-diffusion-v1-4"


@pytest.mark.parametrize("name", ["", ":", ":nonsense"])
def test_dgx_without_a_known_name_lists_what_there_is(name):
    with pytest.raises(ConfigError, match="compressibility, incompressibility, aesthetic, prompt_image_alignment"):
        load_config(DGX + name)


def test_tiny_has_its_experiments():
    assert load_config(TINY).reward_fn == load_config(f"{TINY}:compressibility").reward_fn == "jpeg_compressibility"
    assert load_config(f"{TINY}:incompressibility").reward_fn == "jpeg_incompressibility"
    with pytest.raises(ConfigError, match='"x".*compressibility, incompressibility'):
        load_config(f"{TINY}:x")
    plan_with(spec=TINY)


# --- configs and files of one's own


def test_a_config_written_for_the_original_runs_unchanged(tmp_path, monkeypatch):
    """It has none of the later options, loads its sibling through `imp`, and names the model that left the hub."""
    monkeypatch.setattr(sys, "version_info", (3, 12))  # no `imp`, whichever python runs this
    monkeypatch.delitem(sys.modules, "imp", raising=False)
    own = tmp_path / "own.py"
    own.write_text(
        "import imp, os\n"
        "base = imp.load_source('base', os.path.join(os.path.dirname(__file__), 'base.py'))\n"
        "def get_config():\n"
        "    config = base.get_config()\n"
        "    config.train.adv_clip_max = 3\n"
        "    return config\n"
    )
    (tmp_path / "base.py").write_text(
        "import ml_collections\n"
        "def get_config():\n"
        "    config = ml_collections.ConfigDict(" + repr(original_config()) + ")\n"
        "    return config\n"
    )
    plan = make_plan(load_config(str(own)), 1)
    assert (
        plan.config.lora.rank == 4
        and plan.config.train.adv_clip_max == 3
        and plan.config.reward_fn_kwargs.to_dict() == {}
    )
    assert plan.config.pretrained.model == "stable-diffusion-v1-5/stable-diffusion-v1-5"


def original_config() -> dict:
    config = load_config(BASE).to_dict()
    for key, (_, _, default) in OPTIONS.items():
        section, _, name = key.rpartition(".")
        if default is not REQUIRED:
            del (config[section] if section else config)[name]
    del config["lora"], config["reward_fn_kwargs"]
    config["pretrained"]["model"] = "runwayml/stable-diffusion-v1-5"
    return config


@pytest.mark.parametrize(
    "spec, says",
    [
        ("none.py", "no file"),
        ("config/base", "PATH.py"),
        ("own.py", "no function get_config"),
        ("bad.py", "ConfigDict"),
    ],
)
def test_files_that_are_no_configs_are_refused(tmp_path, monkeypatch, spec, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_text("def get_config():\n    return {}\n")
    with pytest.raises(ConfigError, match=says):
        load_config(spec)


def test_functions_may_come_from_a_file_or_a_module(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def prompt(word='x'):\n    return word, {}\n"
        "def reward(scale=1):\n    return lambda images, prompts, metadata: [scale] * len(prompts)\n"
    )
    plan = plan_with(
        f"--config.prompt_fn={mine}:prompt", "--config.prompt_fn_kwargs.word=hello", f"--config.reward_fn={mine}:reward"
    )
    assert plan.prompt_fn(**plan.config.prompt_fn_kwargs) == ("hello", {})
    assert plan.reward_factory(scale=3)(None, ["a", "b"], [{}, {}]) == [3, 3]
    plan = plan_with("--config.reward_fn=ddpo_pytorch.rewards:jpeg_incompressibility")
    assert plan.reward_factory.__name__ == "jpeg_incompressibility"


def test_a_file_of_functions_may_have_dataclasses_and_siblings(tmp_path, monkeypatch):
    (tmp_path / "sibling_of_mine.py").write_text("WORD = 'hello'\n")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from sibling_of_mine import WORD\n"
        "@dataclass\n"
        "class Prompt:\n    word: str = WORD\n"
        "def prompt():\n    return Prompt().word, {}\n"
    )
    assert plan_with(f"--config.prompt_fn={tmp_path / 'mine.py'}:prompt").prompt_fn() == ("hello", {})
    (tmp_path / "module_of_mine.py").write_text("def prompt():\n    return 'here', {}\n")
    monkeypatch.chdir(tmp_path)
    assert plan_with("--config.prompt_fn=module_of_mine:prompt").prompt_fn() == ("here", {})


# --- the command line


def test_overrides_are_taken_out_of_the_command_line():
    argv = ["train.py", "--config", "a.py", "--config.seed=1", "--config.logdir", "x", "-config.run_name=a=b"]
    assert split_overrides(argv) == (argv[:3], [("seed", "1"), ("logdir", "x"), ("run_name", "a=b")])


def test_every_kind_of_option_can_be_set():
    config = config_with(
        "--config.train.adv_clip_max=2.5",
        "--config.train.learning_rate=1",
        "--config.use_lora=False",
        "--config.run_name=007",
        "--config.lora.target_modules=to_q,to_k",
        "--config.per_prompt_stat_tracking=None",
        "--config.prompt_fn_kwargs.path=animals.txt",
        "--config.prompt_fn_kwargs.low=3",
        "--config.reward_fn_kwargs={'a': 1, 'b': [1, 2]}",
        "--config.reward_fn_kwargs.c.d=0.5",
    )
    assert config.train.adv_clip_max == 2.5 and config.train.learning_rate == 1 and config.use_lora is False
    assert config.run_name == "007" and config.lora.target_modules == ("to_q", "to_k")
    assert config.per_prompt_stat_tracking is None
    assert config.prompt_fn_kwargs.to_dict() == {"path": "animals.txt", "low": 3}
    assert config.reward_fn_kwargs.to_dict() == {"a": 1, "b": [1, 2], "c": {"d": 0.5}}
    make_plan(config_with("--config.per_prompt_stat_tracking=None"), 1)


@pytest.mark.parametrize("text", ["to_q,to_k", "(to_q, to_k)", "('to_q', 'to_k')", "['to_q', 'to_k']", "'to_q','to_k'"])
def test_a_tuple_of_names_may_be_written_in_any_way(text):
    assert config_with(f"--config.lora.target_modules={text}").lora.target_modules == ("to_q", "to_k")
    assert config_with("--config.lora.target_modules=('to_q')").lora.target_modules == ("to_q",)


def test_tracking_that_a_config_left_out_can_be_turned_on():
    config = load_config(BASE)
    config.per_prompt_stat_tracking = None
    apply_overrides(
        config, [("per_prompt_stat_tracking.buffer_size", "8"), ("per_prompt_stat_tracking.min_count", "4")]
    )
    assert make_plan(config, 1).config.per_prompt_stat_tracking.to_dict() == {"buffer_size": 8, "min_count": 4}


@pytest.mark.parametrize(
    "key", [*OPTIONS, "per_prompt_stat_tracking.buffer_size", "per_prompt_stat_tracking.min_count"]
)
def test_every_option_can_be_set_on_the_command_line(key):
    default = config_with()
    for part in key.split("."):
        default = default[part]
    text = ",".join(default) if isinstance(default, tuple) else str(default)
    value = config_with(f"--config.{key}={text}")
    for part in key.split("."):
        value = value[part]
    assert value == default and type(value) is type(default)


@pytest.mark.parametrize(
    "argument, says",
    [
        ("--config.train.lerning_rate=1", 'did you mean "train.learning_rate"'),
        ("--config.tain.learning_rate=1", 'did you mean "train.learning_rate"'),
        ("--config.seed.x=1", "unknown option config.seed.x"),
        ("--config.use_lora=maybe", 'True or False, got "maybe"'),
        ("--config.per_prompt_stat_tracking=3", "None or a dictionary"),
        ("--config.prompt_fn_kwargs=None", "prompt_fn_kwargs must be a dictionary"),
        ("--config.train=None", "config.train must be set entry by entry"),
        ("--config.eval.evry=3", 'did you mean "eval.every"'),
    ],
)
def test_wrong_overrides_are_refused(argument, says):
    with pytest.raises(ConfigError, match=says):
        config_with(argument)


# --- what cannot work


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["sample.batch_size=8", "train.batch_size=3"], r"sample.batch_size \(8\).*multiple of train.batch_size \(3\)"),
        (["train.gradient_accumulation_steps=3"], r"samples per epoch and process \(2 .*multiple of.* \(3 "),
        (["sample.num_batches_per_epoch=1"], "one sample per epoch"),
        (["sample.eta=0.0"], "config.sample.eta .* 0.0"),
        (["sample.eta=1.5"], "config.sample.eta .* 1.5"),
        (["train.timestep_fraction=0.01"], "timestep_fraction 0.01 of sample.num_steps 50 leaves no step .* 1/50"),
        (["train.timestep_fraction=1.5"], "timestep_fraction .* at most 1; got 1.5"),
        (["train.cfg=False"], "train.cfg is False while sample.guidance_scale is 5.0"),
        (["per_prompt_stat_tracking.buffer_size=8"], r"buffer_size \(8\) must be at least min_count \(16\)"),
        (["per_prompt_stat_tracking.min_count=0"], "min_count .* greater than 0; got 0"),
        (["per_prompt_stat_tracking={'buffer_size': 8}"], "buffer_size and min_count"),
        (["prompt_fn=no_such"], 'prompt_fn "no_such".*imagenet_animals.*path/to/file.py:function'),
        (["reward_fn=no_such"], 'reward_fn "no_such".*jpeg_compressibility'),
        (["reward_fn=to_uint8"], 'reward_fn "to_uint8"'),
        (["reward_fn=none.py:f"], 'no file "none.py"'),
        (["reward_fn=no.such.module:f"], 'cannot import "no.such.module"'),
        (["reward_fn=ddpo_pytorch.rewards:f"], 'has no function "f"'),
        (["reward_fn_kwargs.x=1"], r"reward_fn_kwargs \{'x': 1\} do not fit jpeg_compressibility\(\)"),
        (["prompt_fn=from_file"], "prompt_fn_kwargs {} do not fit from_file.*path"),
        (["prompt_fn=from_file", "prompt_fn_kwargs.path=none.txt"], 'no prompt file "none.txt"'),
        (["prompt_fn=json:loads", "prompt_fn_kwargs.s='[1]'"], r"must return \(prompt, metadata\).*got \[1\]"),
        (["prompt_fn=json:loads", "prompt_fn_kwargs.s=1"], "prompt_fn json:loads raised TypeError: the JSON"),
        (["train.batch_size=0"], "train.batch_size must be a whole number, greater than 0; got 0"),
        (["train.batch_size=1.5"], "train.batch_size must be a whole number, greater than 0; got 1.5"),
        (["num_epochs=many"], "num_epochs must be a whole number.*got 'many'"),
        (["train.learning_rate=nan"], "train.learning_rate must be a number.*got 'nan'"),
        (["mixed_precision=fp8"], "mixed_precision must be.*fp16.*got 'fp8'"),
        (["pretrained.model="], "pretrained.model must be .*a hub id or a folder; got ''"),
        (["lora.rank=0"], "lora.rank"),
        (["lora.target_modules=()"], "lora.target_modules"),
        (["max_failed_fraction=2"], "max_failed_fraction must be a number, from 0 to 1; got 2"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(arguments, says):
    with pytest.raises(ConfigError, match=says) as caught:
        plan_with(*(f"--config.{argument}" for argument in arguments))
    assert "\n" not in str(caught.value)


def test_a_missing_option_is_named():
    config = load_config(BASE)
    with config.unlocked():
        del config.train["clip_range"]
    with pytest.raises(ConfigError, match="config.train.clip_range is missing"):
        make_plan(config, 1)


def test_without_guidance_train_cfg_is_free():
    plan_with("--config.train.cfg=False", "--config.sample.guidance_scale=1.0")


@pytest.mark.parametrize("fraction, steps", [(1.0, 100), (0.29, 29), (0.5, 50), (0.999, 99)])
def test_timestep_fraction_is_a_share_of_the_steps(fraction, steps):
    plan = plan_with("--config.sample.num_steps=100", f"--config.train.timestep_fraction={fraction}")
    assert plan.num_train_timesteps == steps


def test_planning_needs_no_torch():
    code = (
        "import sys, ddpo_pytorch.run_plan as r; r.make_plan(r.load_config('config/base.py'), 1);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'diffusers', 'accelerate')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    "section, key, says",
    [
        ("train", "batchsize", 'config.train.batchsize; did you mean "train.batch_size"'),
        ("", "num_epoch", 'config.num_epoch; did you mean "num_epochs"'),
        ("sample", "steps", 'config.sample.steps; did you mean "sample.num_steps"'),
    ],
)
def test_an_option_of_a_file_that_does_not_exist_is_refused_with_the_nearest(section, key, says):
    config = load_config(BASE)
    with config.unlocked():
        (config[section] if section else config)[key] = 1
    with pytest.raises(ConfigError, match=f"unknown option {says}"):
        make_plan(config, 1)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--config.resume=auto"], "finds a run by config.run_name, which must be set"),
        (["--config.resume=auto", "--config.run_name=a", "--config.resume_from=b"], "resume_from must be empty"),
        (["--config.resume=yes"], 'config.resume must be text, "" or "auto"; got \'yes\''),
        (["--config.save_best=eval/train/reward_mean"], "needs evaluations; set config.eval.every to 1 or more"),
        (["--config.eval.every=1", "--config.early_stop=reward_mean"], "of the very weights that are saved"),
        (
            ["--config.eval.every=1", "--config.save_best=-eval/trian/reward_mean"],
            'did you mean "eval/train/reward_mean"',
        ),
        (["--config.eval.every=1", "--config.eval.prompts=train,nothing.txt"], "'nothing.txt': no prompt file"),
        (["--config.eval.every=1", "--config.eval.prompts=a=chairs.txt[1:x]"], "no prompt file"),
        (["--config.eval.every=1", "--config.eval.prompts=train,train"], "has train twice"),
        (["--config.eval.every=1", "--config.eval.prompts="], "config.eval.prompts must be a tuple, of prompt sets"),
        (
            ["--config.eval.every=1", "--config.eval.rewards=clp_score"],
            'config.eval.rewards "clp_score" is no function',
        ),
        (
            ["--config.eval.every=1", "--config.eval.rewards=({'reward_fn': 'colorfulness', 'weight': 2},)"],
            "got weight",
        ),
        (
            [
                "--config.eval.every=1",
                "--config.eval.rewards=({'reward_fn': 'colorfulness', 'kwargs': {'gamma': 2}},)",
            ],
            "config.eval.rewards_kwargs",
        ),
        (["--config.reward_timeout=120", "--config.timeout_minutes=2"], "must be less than config.timeout_minutes"),
    ],
)
def test_what_cannot_go_together_is_refused(arguments, says):
    with pytest.raises(ConfigError, match=says):
        plan_with(*arguments)


def test_evaluations_are_of_the_start_of_every_so_many_epochs_and_of_the_end():
    plan = plan_with("--config.eval.every=4", "--config.num_epochs=10", "--config.eval.num_prompts=3")
    assert [epochs for epochs in range(11) if plan.evaluates(epochs)] == [0, 4, 8, 10]
    assert [(s.name, len(s.prompts)) for s in plan.eval_sets] == [
        ("train", 3),
        ("unseen_animals", 3),
        ("everyday_objects", 3),
    ]
    none = plan_with("--config.num_epochs=10")
    assert not any(none.evaluates(epochs) for epochs in range(11)) and none.eval_sets == ()


def test_a_weighted_sum_is_evaluated_by_its_components():
    mixed = ["--config.reward_fn=weighted_sum", "--config.eval.every=1"]
    mixed.append("--config.reward_fn_kwargs={'components': ({'reward_fn': 'jpeg_compressibility', 'label': 'size'},)}")
    assert plan_with(*mixed, "--config.save_best=eval/train/size_mean").config.save_best
    with pytest.raises(ConfigError, match='did you mean "eval/train/size_mean"|there are: eval/train/size_mean'):
        plan_with(*mixed, "--config.save_best=eval/train/reward_mean")
    with pytest.raises(ConfigError, match="size is a component of the trained reward"):
        plan_with(*mixed, "--config.eval.rewards=({'reward_fn': 'colorfulness', 'label': 'size'},)")


def test_a_whole_unet_at_a_loras_rate_is_warned_about():
    [warning] = plan_with("--config.use_lora=False").warnings
    assert "0.0003 with use_lora False" in warning and "1e-5" in warning
    assert plan_with("--config.use_lora=False", "--config.train.learning_rate=1e-5").warnings == ()
    assert plan_with().warnings == ()


@pytest.mark.parametrize("name", ["team/run", "..\\run"])
def test_a_name_that_is_no_folder_name_is_refused(name):
    config = load_config(BASE)
    config.run_name = name
    with pytest.raises(ConfigError, match='config.run_name must be text, a name for a folder, without "/"'):
        make_plan(config, 1)


@pytest.mark.parametrize("section", ["lora", "train", "pretrained", "prompt_fn_kwargs", "reward_fn_kwargs"])
@pytest.mark.parametrize("value", [5, None, "x"])
def test_a_section_that_is_none_is_refused(section, value):
    config = load_config(BASE)
    with config.ignore_type():
        config[section] = value
    with pytest.raises(ConfigError, match=f"config.{section} must be a "):
        make_plan(config, 1)


def test_timesteps_in_a_forward_pass_must_divide_those_that_are_trained():
    config = load_config(BASE)
    config.train.timesteps_per_forward = 4
    with pytest.raises(ConfigError, match=r"timesteps_per_forward \(4\) must divide the 50 trained timesteps"):
        make_plan(config, 1)
    config.train.timestep_fraction = 0.8
    assert make_plan(config, 1).micro_batches_per_epoch == 2 * 10
