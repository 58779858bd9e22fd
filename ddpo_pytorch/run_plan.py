"""A config and a number of processes become a RunPlan: the batch arithmetic, and every user error it can tell.

All of it before a model is loaded; this file imports neither torch nor diffusers.
"""

import ast
import difflib
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

import ddpo_pytorch.prompts
import ddpo_pytorch.rewards
from ddpo_pytorch.named_functions import ConfigError, check_arguments, load_module, resolve_function, without_secrets
from ddpo_pytorch.prompts import PromptSet, parse_prompt_set
from ddpo_pytorch.stat_tracking import PerPromptStatTracker

# --- the options: type, allowed values (as the message names them), default where the original had no such key

Check = Callable[[Any], bool]
POSITIVE: tuple[Check, str] = (lambda v: v > 0, "greater than 0")
NOT_NEGATIVE: tuple[Check, str] = (lambda v: v >= 0, "0 or greater")
ANY: tuple[Check, str] = (lambda v: True, "")
SHARE: tuple[Check, str] = (lambda v: 0 < v <= 1, "greater than 0 and at most 1")
BETA: tuple[Check, str] = (lambda v: 0 <= v < 1, "at least 0 and less than 1")
REQUIRED = object()

OPTIONS: dict[str, tuple[type, tuple[Check, str], Any]] = {
    "run_name": (str, (lambda v: not set(v) & set("/\\\0"), 'a name for a folder, without "/"'), REQUIRED),
    "seed": (int, (lambda v: 0 <= v < 2**63, "from 0 to 2^63 - 1"), REQUIRED),
    "logdir": (str, (lambda v: bool(v), "not empty"), REQUIRED),
    "num_epochs": (int, POSITIVE, REQUIRED),
    "save_freq": (int, NOT_NEGATIVE, REQUIRED),
    "num_checkpoint_limit": (int, POSITIVE, REQUIRED),
    "mixed_precision": (str, (lambda v: v in ("no", "fp16", "bf16"), '"no", "fp16" or "bf16"'), REQUIRED),
    "allow_tf32": (bool, ANY, REQUIRED),
    "resume_from": (str, ANY, REQUIRED),
    "resume": (str, (lambda v: v in ("", "auto"), '"" or "auto"'), ""),
    "use_lora": (bool, ANY, REQUIRED),
    "log_with": (str, ANY, "wandb"),
    "num_log_images": (int, NOT_NEGATIVE, 16),
    "num_reward_workers": (int, POSITIVE, 2),
    "max_failed_fraction": (float, (lambda v: 0 <= v <= 1, "from 0 to 1"), 0.1),
    "reward_timeout": (float, POSITIVE, 600.0),
    "cpu_threads": (int, NOT_NEGATIVE, 0),
    "timeout_minutes": (float, POSITIVE, 60.0),
    "lora.rank": (int, POSITIVE, 4),
    "lora.target_modules": (
        tuple,
        (lambda v: len(v) > 0 and all(isinstance(name, str) for name in v), "names of UNet layers"),
        ("to_q", "to_k", "to_v", "to_out.0"),
    ),
    "pretrained.model": (str, (lambda v: v != "", "a hub id or a folder"), REQUIRED),
    "pretrained.revision": (str, ANY, REQUIRED),
    "sample.num_steps": (int, POSITIVE, REQUIRED),
    "sample.eta": (
        float,
        (lambda v: 0 < v <= 1, "greater than 0 and at most 1: without noise in the steps they have no probability"),
        REQUIRED,
    ),
    "sample.guidance_scale": (float, ANY, REQUIRED),
    "sample.batch_size": (int, POSITIVE, REQUIRED),
    "sample.num_batches_per_epoch": (int, POSITIVE, REQUIRED),
    "train.batch_size": (int, POSITIVE, REQUIRED),
    "train.use_8bit_adam": (bool, ANY, REQUIRED),
    "train.learning_rate": (float, POSITIVE, REQUIRED),
    "train.lr_warmup_steps": (int, NOT_NEGATIVE, 0),
    "train.adam_beta1": (float, BETA, REQUIRED),
    "train.adam_beta2": (float, BETA, REQUIRED),
    "train.adam_weight_decay": (float, NOT_NEGATIVE, REQUIRED),
    "train.adam_epsilon": (float, POSITIVE, REQUIRED),
    "train.gradient_accumulation_steps": (int, POSITIVE, REQUIRED),
    "train.max_grad_norm": (float, POSITIVE, REQUIRED),
    "train.num_inner_epochs": (int, POSITIVE, REQUIRED),
    "train.cfg": (bool, ANY, REQUIRED),
    "train.adv_clip_max": (float, POSITIVE, REQUIRED),
    "train.clip_range": (float, POSITIVE, REQUIRED),
    "train.timestep_fraction": (float, SHARE, REQUIRED),
    "train.max_skipped_steps": (int, POSITIVE, 20),
    "train.max_logp_gap": (float, NOT_NEGATIVE, 0.0),
    "train.recompute_log_probs": (bool, ANY, False),
    "train.target_kl": (float, NOT_NEGATIVE, 0.0),
    "train.gradient_checkpointing": (bool, ANY, False),
    "train.cfg_passes": (int, (lambda v: v in (1, 2), "1 or 2"), 1),
    "train.uncond_grad": (bool, ANY, True),
    "train.timesteps_per_forward": (int, POSITIVE, 1),
    "eval.every": (int, NOT_NEGATIVE, 0),
    "eval.prompts": (
        tuple,
        (lambda v: len(v) > 0, "of prompt sets"),
        ("train", "unseen_animals.txt", "everyday_objects.txt"),
    ),
    "eval.num_prompts": (int, POSITIVE, 8),
    "eval.num_seeds": (int, POSITIVE, 2),
    "eval.rewards": (tuple, ANY, ()),
    "save_best": (str, ANY, ""),
    "early_stop": (str, ANY, ""),
    "early_stop_patience": (int, POSITIVE, 2),
    "offload": (bool, ANY, False),
    "compile": (bool, ANY, False),
    "prompt_fn": (str, ANY, REQUIRED),
    "reward_fn": (str, ANY, REQUIRED),
}
# Dictionaries whose keys belong to somebody else's function, so that any key may be set.
FREE_DICTS: dict[str, dict] = {"prompt_fn_kwargs": {}, "reward_fn_kwargs": {}}
TRACKING = "per_prompt_stat_tracking"
TRAINED = "reward"  # what the trained reward is called in evaluations
TRACKING_OPTIONS = ("buffer_size", "min_count")
# Gone from the hub; the same weights are there under the other name.
MOVED_MODELS = {"runwayml/stable-diffusion-v1-5": "stable-diffusion-v1-5/stable-diffusion-v1-5"}


def _nearest(key: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(key, known, n=1)
    return f'; did you mean "{matches[0]}"?' if matches else f"; there are: {', '.join(known)}"


# --- the config file and the command line


def load_config(spec: str) -> ConfigDict:
    """What a config file's `get_config` returns.

    Args:
        spec: "path/to/config.py", or "path/to/config.py:NAME" to call get_config(NAME).

    Raises:
        ConfigError: no such file, or what get_config raised as ValueError: an unknown NAME.
    """
    path, has_name, name = (spec, "", "") if spec.endswith(".py") else spec.rpartition(":")
    if not path.endswith(".py"):
        raise ConfigError(f'--config must be PATH.py or PATH.py:NAME, got "{spec}"')
    if not Path(path).is_file():
        raise ConfigError(f'--config {spec}: there is no file "{path}" here ({Path.cwd()})')
    if sys.version_info >= (3, 12):
        # Config files of the original load their siblings through `imp`, which python no longer has.
        sys.modules.setdefault("imp", types.SimpleNamespace(load_source=load_module))  # type: ignore[call-overload]
    module = load_module("config_file", path)
    if not hasattr(module, "get_config"):
        raise ConfigError(f"--config {spec}: {path} has no function get_config")
    try:
        config = module.get_config(name) if has_name else module.get_config()
    except ValueError as error:
        raise ConfigError(f"--config {spec}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"--config {spec}: get_config must return an ml_collections.ConfigDict, got {type(config)}")
    return config


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Take `--config.KEY=VALUE` and `--config.KEY VALUE` out of a command line.

    Returns:
        What is left of `argv`, and the (KEY, VALUE) pairs in order.
    """
    rest, overrides = [], []
    arguments = iter(argv)
    for argument in arguments:
        key, equals, value = argument.lstrip("-").partition("=")
        if not (argument.startswith("-") and key.startswith("config.")):
            rest.append(argument)
            continue
        if not equals:
            value = next(arguments, "")
        overrides.append((key.removeprefix("config."), value))
    return rest, overrides


def without_secret_arguments(rest: Sequence[str], overrides: Sequence[tuple[str, str]]) -> list[str]:
    """A command line to be shown: as `split_overrides` took it apart, but for secrets, which are "***"."""
    shown = list(rest)
    for key, text in overrides:
        value = _literal(text)
        masked = without_secrets(value, key.rpartition(".")[2])
        shown.append(f"--config.{key}={text if masked == value else masked}")
    return shown


def _literal(text: str) -> Any:
    """The Python value that a text spells, or else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # as for {[1]: 2}, or many brackets
        return text


def _parsed(key: str, text: str, current: Any) -> Any:
    """The value that `text` means for an option whose present value is `current`."""
    if isinstance(current, str):
        return text
    if isinstance(current, bool):
        if text.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f'config.{key} must be True or False, got "{text}"')
        return text.lower() in ("true", "1")
    value = _literal(text)
    if isinstance(current, (tuple, list)):
        if isinstance(value, (tuple, list)):
            return tuple(value)
        inner = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text
        return tuple(part.strip(" '\"") for part in inner.split(",") if part.strip())
    if isinstance(current, ConfigDict):
        if key == TRACKING and text.lower() == "none":
            return None
        allowed = {TRACKING: "None or a dictionary", **dict.fromkeys(FREE_DICTS, "a dictionary")}
        if not isinstance(value, dict) or key not in allowed:
            raise ConfigError(f'config.{key} must be {allowed.get(key, "set entry by entry")}; got "{text}"')
        return ConfigDict(value)
    return value


def apply_overrides(config: ConfigDict, overrides: Sequence[tuple[str, str]]) -> None:
    """Set options from the command line, in place.

    Any key of the config or of OPTIONS can be set, whole numbers to fractions too (the plan refuses what must be
    whole), `per_prompt_stat_tracking` to None, and any entry of the kwargs dictionaries.

    Raises:
        ConfigError: unknown key (the nearest known one is named) or a text that is no value for it.
    """
    with_defaults(config)
    with config.unlocked(), config.ignore_type():
        for path, text in overrides:
            *parents, key = path.split(".")
            node: Any = config
            for i, parent in enumerate(parents):
                if i > 0 and parents[0] in FREE_DICTS and isinstance(node, ConfigDict):
                    node[parent] = node.get(parent, ConfigDict())
                if not isinstance(node, ConfigDict) or parent not in node:
                    raise ConfigError(f"unknown option config.{path}{_nearest(path, _known_keys(config))}")
                if node[parent] is None and parents[: i + 1] == [TRACKING]:
                    node[parent] = ConfigDict()
                node = node[parent]
            is_free = bool(parents) and (parents[0] in FREE_DICTS or parents == [TRACKING])
            if not isinstance(node, ConfigDict) or (key not in node and not is_free):
                raise ConfigError(f"unknown option config.{path}{_nearest(path, _known_keys(config))}")
            node[key] = _parsed(path, text, node[key]) if key in node else _literal(text)


def _known_keys(config: ConfigDict) -> list[str]:
    own = [f"{k}.{kk}" for k, v in config.items() if isinstance(v, ConfigDict) and k not in FREE_DICTS for kk in v]
    return sorted({*own, *OPTIONS, *FREE_DICTS, TRACKING})


def describe_options(source: str, config: ConfigDict) -> str:
    """All options for people, in the order and with the comments of config/base.py, with the values of a config.

    Args:
        source: the text of config/base.py.
    """
    source_lines = source.splitlines()
    [function] = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    sections = {"config": ""}  # variables by the option that they hold
    described: list[str] = []
    last_line = function.lineno
    for node in function.body:
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)):
            continue
        owner, _, key = ast.unparse(node.targets[0]).partition(".")
        path = sections[owner] + key
        above = [line.strip() for line in source_lines[last_line : node.lineno - 1]]
        described += [f"\n{line.strip('# ')}" for line in above if line.startswith("######")]
        comment = [line.lstrip("# ") for line in above if line.startswith("# ")]
        last_line = node.end_lineno or node.lineno
        for target in node.targets[1:]:
            sections[ast.unparse(target)] = f"{path}."
        value = functools.reduce(
            lambda found, name: found[name] if found is not None else None, path.split("."), config
        )
        if isinstance(value, ConfigDict) and path not in FREE_DICTS:
            continue
        shown = without_secrets(value.to_dict() if isinstance(value, ConfigDict) else value, key)
        described.append(f"  --config.{path}={shown!r}")
        described += [f"      {line}" for line in comment]
    return "\n".join(described).strip()


# --- the checks


def with_defaults(config: ConfigDict) -> ConfigDict:
    """Give a config written before an option existed that option's default, in place."""
    with config.unlocked():
        for key, (_, _, default) in OPTIONS.items():
            section, _, name = key.rpartition(".")
            if section in config and not isinstance(config[section], ConfigDict):
                raise ConfigError(
                    f"config.{section} must be a ConfigDict with options of its own; got {config[section]!r}"
                )
            if default is REQUIRED:
                continue
            node = config
            if section:
                if section not in config:
                    config[section] = ConfigDict()
                node = config[section]
            if name not in node:
                node[name] = default
        for key, empty in FREE_DICTS.items():
            if key not in config:
                config[key] = ConfigDict(empty)
            if not isinstance(config[key], ConfigDict):
                raise ConfigError(f"config.{key} must be a dictionary of arguments; got {config[key]!r}")
    return config


def _check_no_unknown_keys(config: ConfigDict) -> None:
    known = {*OPTIONS, *FREE_DICTS, TRACKING}
    sections = {key.partition(".")[0] for key in OPTIONS if "." in key}
    for key, value in config.items():
        inner = [f"{key}.{name}" for name in value] if key in sections and isinstance(value, ConfigDict) else [key]
        for path in inner:
            if path not in known:
                raise ConfigError(f"unknown option config.{path}{_nearest(path, sorted(known))}")


def _get(config: ConfigDict, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, ConfigDict) or part not in node:
            raise ConfigError(f"config.{key} is missing; config/base.py has every option")
        node = node[part]
    return node


def _check_value(key: str, value: Any) -> None:
    kind, (is_allowed, allowed), _ = OPTIONS[key]
    fits = {
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value),
        str: isinstance(value, str),
        tuple: isinstance(value, (tuple, list)),
    }[kind]
    names = {bool: "True or False", int: "a whole number", float: "a number", str: "text", tuple: "a tuple"}
    if not fits or not is_allowed(value):
        raise ConfigError(f"config.{key} must be {names[kind]}{', ' + allowed if allowed else ''}; got {value!r}")


def _prompt_sets(config: ConfigDict, prompt_fn: Callable) -> tuple[PromptSet, ...]:
    """What `eval.prompts` names, at most `eval.num_prompts` of each."""
    sets: list[PromptSet] = []
    draw = functools.partial(prompt_fn, **config.prompt_fn_kwargs.to_dict())
    for spec in config.eval.prompts:
        try:
            sets.append(parse_prompt_set(spec, draw, config.eval.num_prompts))
        except Exception as error:
            raise ConfigError(f"config.eval.prompts {spec!r}: {error}") from error
    names = [prompt_set.name for prompt_set in sets]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(
            f"config.eval.prompts has {', '.join(sorted(twice))} twice; write one as OTHER_NAME=FILE, or leave it out"
        )
    return tuple(sets)


def _eval_rewards(config: ConfigDict, example: tuple[str, dict]) -> tuple[dict[str, Any], ...]:
    """What `eval.rewards` names beside the trained one, as `rewards.resolve_components` has them."""
    if not config.eval.rewards:
        return ()
    entries = [{"reward_fn": entry} if isinstance(entry, str) else entry for entry in config.eval.rewards]
    resolved = ddpo_pytorch.rewards.resolve_components(entries, "eval.rewards", has_weights=False)
    if any(entry["label"] == TRAINED for entry in resolved):
        raise ConfigError(f'config.eval.rewards: "{TRAINED}" is the trained one; give the entry another label')
    for entry in resolved:
        check = ddpo_pytorch.rewards.check_factory
        check(entry["factory"], entry["kwargs"], entry["label"], example, "eval.rewards")
    return tuple(resolved)


def _check_eval(config: ConfigDict, sets: Sequence[PromptSet], labels: Sequence[str]) -> None:
    statistics = ("mean", "change")
    known = [f"eval/{s.name}/{label}_{name}" for s in sets for label in labels for name in statistics]
    for key in ("save_best", "early_stop"):
        metric = config[key].removeprefix("-")
        if not metric:
            continue
        if not config.eval.every:
            raise ConfigError(f"config.{key} {config[key]!r} needs evaluations; set config.eval.every to 1 or more")
        if metric not in known:
            raise ConfigError(
                f"config.{key} must be a metric of the evaluations, which are of the very weights that are saved"
                f'{_nearest(metric, known)}; "-" before it where less is better; got {config[key]!r}'
            )


def _drawn_on_trial(prompt_fn: Callable, kwargs: dict, name: str) -> tuple[str, dict]:
    """One prompt and its metadata: a missing file or a wrong result shows now, not after the model is loaded."""
    try:
        result = prompt_fn(**kwargs)
    except ValueError as error:
        raise ConfigError(f"config.prompt_fn {name}: {error}") from error
    except Exception as error:
        raise ConfigError(f"config.prompt_fn {name} raised {type(error).__name__}: {error}") from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], str)):
        raise ConfigError(
            f"config.prompt_fn {name} must return (prompt, metadata), text and a dictionary; got {result!r}"
        )
    return result


# --- the plan


@dataclass(frozen=True)
class RunPlan:
    """What a run will do. Sizes named `_per_process` count one process's share, `_total` all of them."""

    config: ConfigDict
    num_processes: int
    samples_per_epoch_per_process: int
    samples_per_epoch_total: int
    batch_per_update_total: int
    updates_per_inner_epoch: int
    num_train_timesteps: int
    prompt_fn: Callable[..., tuple[str, dict]]
    reward_factory: Callable[..., Callable]
    eval_sets: tuple[PromptSet, ...]  # of the evaluations; none without them
    eval_rewards: tuple[dict[str, Any], ...]
    warnings: tuple[str, ...]  # what can work, but hardly ever should

    def evaluates(self, epochs: int) -> bool:
        """Whether there is an evaluation after so many epochs: of the start, of every so many, and of the end."""
        every = self.config.eval.every
        return every > 0 and (epochs % every == 0 or epochs == self.config.num_epochs)

    @property
    def updates_per_epoch(self) -> int:
        return self.updates_per_inner_epoch * self.config.train.num_inner_epochs

    @property
    def micro_batches_per_epoch(self) -> int:
        """Of one process."""
        groups = self.updates_per_epoch * self.config.train.gradient_accumulation_steps
        return groups * (self.num_train_timesteps // self.config.train.timesteps_per_forward)

    @property
    def denoising_steps_per_epoch(self) -> int:
        """Of one process, a whole batch at a time."""
        return self.config.sample.num_batches_per_epoch * self.config.sample.num_steps


def make_plan(config: ConfigDict, num_processes: int) -> RunPlan:
    """Check a config and work out its batch arithmetic.

    Args:
        config: as `get_config` returned it, overrides applied; options that it lacks get their defaults, in place.
        num_processes: of all machines together.

    Raises:
        ConfigError: anything that cannot work, with the value given and what would be right.
    """
    with_defaults(config)
    _check_no_unknown_keys(config)
    for key in OPTIONS:
        _check_value(key, _get(config, key))
    _check_tracking(config)
    sample, train = config.sample, config.train
    if config.resume == "auto" and (config.resume_from or not config.run_name):
        raise ConfigError(
            'config.resume "auto" finds a run by config.run_name, which must be set, and config.resume_from must be '
            f"empty; got run_name {config.run_name!r}, resume_from {config.resume_from!r}"
        )
    if config.pretrained.model in MOVED_MODELS:
        with config.unlocked():
            config.pretrained.model = MOVED_MODELS[config.pretrained.model]

    # DDPO-IS compares two likelihoods of one step: both must come from the same formula.
    if sample.guidance_scale > 1 and not train.cfg:
        raise ConfigError(
            f"train.cfg is False while sample.guidance_scale is {sample.guidance_scale}: training would score other "
            "predictions than those sampled; set train.cfg True, or sample.guidance_scale 1.0"
        )

    # Rounded first, since 100 * 0.29 is 28.999999999999996.
    num_train_timesteps = int(round(sample.num_steps * train.timestep_fraction, 6))
    if num_train_timesteps < 1:
        raise ConfigError(
            f"train.timestep_fraction {train.timestep_fraction} of sample.num_steps {sample.num_steps} leaves no step "
            f"to train on; it must be at least 1/{sample.num_steps}"
        )
    if num_train_timesteps % train.timesteps_per_forward:
        raise ConfigError(
            f"train.timesteps_per_forward ({train.timesteps_per_forward}) must divide the {num_train_timesteps} "
            f"trained timesteps ({sample.num_steps} x train.timestep_fraction {train.timestep_fraction})"
        )

    if sample.batch_size % train.batch_size:
        raise ConfigError(
            f"sample.batch_size ({sample.batch_size}) must be a multiple of train.batch_size ({train.batch_size})"
        )
    per_process = sample.batch_size * sample.num_batches_per_epoch
    total = per_process * num_processes
    per_update_per_process = train.batch_size * train.gradient_accumulation_steps
    if total == 1:
        raise ConfigError(
            "one sample per epoch (sample.batch_size 1 x sample.num_batches_per_epoch 1 x 1 process) has nothing to be "
            "compared with, so its advantage is always 0; sample at least 2"
        )
    if per_process % per_update_per_process:
        raise ConfigError(
            f"samples per epoch and process ({per_process} = sample.batch_size {sample.batch_size} x "
            f"sample.num_batches_per_epoch {sample.num_batches_per_epoch}) must be a multiple of the samples per "
            f"update and process ({per_update_per_process} = train.batch_size {train.batch_size} x "
            f"train.gradient_accumulation_steps {train.gradient_accumulation_steps})"
        )

    if config.reward_timeout >= 60 * config.timeout_minutes:
        raise ConfigError(
            f"config.reward_timeout ({config.reward_timeout:g} s) must be less than config.timeout_minutes "
            f"({config.timeout_minutes:g} minutes): processes wait for each other's rewards"
        )

    prompt_fn = resolve_function(config.prompt_fn, ddpo_pytorch.prompts, "prompt_fn")
    reward_factory = resolve_function(config.reward_fn, ddpo_pytorch.rewards, "reward_fn")
    check_arguments(prompt_fn, config.prompt_fn_kwargs.to_dict(), "prompt_fn")
    example = _drawn_on_trial(prompt_fn, config.prompt_fn_kwargs.to_dict(), config.prompt_fn)
    reward_kwargs = config.reward_fn_kwargs.to_dict()
    ddpo_pytorch.rewards.check_factory(reward_factory, reward_kwargs, config.reward_fn, example)
    eval_sets = _prompt_sets(config, prompt_fn) if config.eval.every else ()
    eval_rewards = _eval_rewards(config, example) if config.eval.every else ()
    trained = [TRAINED]
    if config.reward_fn == "weighted_sum":  # whose scales move; its components' do not
        trained = [entry["label"] for entry in ddpo_pytorch.rewards.resolve_components(reward_kwargs["components"])]
        if twice := set(trained) & {entry["label"] for entry in eval_rewards}:
            raise ConfigError(f"config.eval.rewards: {', '.join(sorted(twice))} is a component of the trained reward")
    _check_eval(config, eval_sets, [*trained, *(entry["label"] for entry in eval_rewards)])
    return RunPlan(
        config=config,
        num_processes=num_processes,
        samples_per_epoch_per_process=per_process,
        samples_per_epoch_total=total,
        batch_per_update_total=per_update_per_process * num_processes,
        updates_per_inner_epoch=per_process // per_update_per_process,
        num_train_timesteps=num_train_timesteps,
        prompt_fn=prompt_fn,
        reward_factory=reward_factory,
        eval_sets=eval_sets,
        eval_rewards=eval_rewards,
        warnings=tuple(_warnings(config)),
    )


def _warnings(config: ConfigDict) -> Iterator[str]:
    rate = config.train.learning_rate
    if not config.use_lora and rate > 5e-5:
        yield (
            f"warning: train.learning_rate {rate:g} with use_lora False is far above what trains a whole UNet; the "
            "paper's is 1e-5"
        )


def _check_tracking(config: ConfigDict) -> None:
    tracking = _get(config, TRACKING)
    if tracking is None:
        return
    if not isinstance(tracking, ConfigDict) or set(tracking) != set(TRACKING_OPTIONS):
        given = tracking.to_dict() if isinstance(tracking, ConfigDict) else tracking
        raise ConfigError(f"config.{TRACKING} must be None or have {' and '.join(TRACKING_OPTIONS)}; got {given!r}")
    for name in TRACKING_OPTIONS:
        value = tracking[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"config.{TRACKING}.{name} must be a whole number, greater than 0; got {value!r}")
    try:
        PerPromptStatTracker(tracking.buffer_size, tracking.min_count)
    except ValueError as error:
        raise ConfigError(str(error)) from error
