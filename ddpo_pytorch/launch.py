"""How a run starts: its process group, its folder, its progress bars, and what it says about itself.

The one module besides the plan that reads the config.
"""

import datetime
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import (
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from filelock import FileLock, Timeout
from ml_collections import ConfigDict
from peft.tuners.lora import LoraLayer
from tqdm import tqdm

from ddpo_pytorch import checkpoints, evaluation, metrics, policy
from ddpo_pytorch.diffusers_patch.equal_halves import checkpoint as checkpointed
from ddpo_pytorch.diffusers_patch.equal_halves import share_halves
from ddpo_pytorch.distributed import check_others, exchange, fail_together
from ddpo_pytorch.exits import RunFailure, say
from ddpo_pytorch.named_functions import ConfigError, with_device, without_secrets
from ddpo_pytorch.rescue import Rescue
from ddpo_pytorch.run_plan import RunPlan, load_config
from ddpo_pytorch.scoring import RewardFn, RewardWorkers

Item = TypeVar("Item")


class ProgressBar(tqdm):
    """A bar on the main process's terminal, and nowhere else; it vanishes when done."""

    def __init__(self, title: str, total: int, accelerator: Accelerator) -> None:
        hidden = None if accelerator.is_main_process else True  # None: hidden unless on a terminal
        super().__init__(desc=title, total=total, disable=hidden, leave=False, dynamic_ncols=True)

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items, and advance as each has been used."""
        for item in items:
            yield item
            self.update()


def make_accelerator(config: ConfigDict) -> Accelerator:
    """Process group, device and precision of this process, with the dashboards that the config asks for.

    Raises:
        ConfigError: an unknown tracker or one that is not installed.
    """
    names = [name.strip() for name in config.log_with.split(",") if name.strip()]
    known = sorted(str(name) for name in LOGGER_TYPE_TO_CLASS)
    for name in names:
        if name not in known:
            raise ConfigError(
                f'config.log_with "{name}" is no tracker of Accelerate, which has {", ".join(known)}; "" is none'
            )
        if name not in {str(tracker) for tracker in get_available_trackers()}:
            raise ConfigError(f'config.log_with "{name}" needs a package that is not here: pip install {name}')
    # float32 products in TensorFloat-32, or exactly
    torch.set_float32_matmul_precision("high" if config.allow_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.allow_tf32
    # A little longer than processes wait for each other (distributed.Phases), which knows whom for.
    timeout = datetime.timedelta(minutes=1.5 * config.timeout_minutes)
    try:
        accelerator = Accelerator(
            mixed_precision=config.mixed_precision,
            log_with=names or None,
            project_config=ProjectConfiguration(project_dir=config.logdir, logging_dir=config.logdir),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        )
    except ValueError as error:
        raise ConfigError(
            f'config.mixed_precision "{config.mixed_precision}" cannot be used here: {error}; "no" always works'
        ) from error
    if config.cpu_threads and accelerator.device.type == "cpu":
        torch.set_num_threads(max(1, config.cpu_threads // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    return accelerator


def make_reward(accelerator: Accelerator, plan: RunPlan) -> RewardFn:
    """The reward function that the config asks for, on this process's device; every process must call this.

    Raises:
        ConfigError: it cannot be made: a model or server is not to be had, or what was made is no function.
    """
    name = plan.config.reward_fn
    kwargs = with_device(plan.reward_factory, plan.config.reward_fn_kwargs.to_dict(), accelerator.device)
    with fail_together(accelerator):
        return _made_reward(plan.reward_factory, kwargs, f"config.reward_fn {name}")


def _made_reward(factory: Callable, kwargs: dict[str, Any], what: str) -> RewardFn:
    """What a reward factory returns, checked; `what` it is, for messages."""
    try:
        reward_fn = factory(**kwargs)
    except ConfigError:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"{what}: {error}") from error
    except (Exception, SystemExit) as error:
        raise RunFailure(f"{what} raised {type(error).__name__}: {error}") from error
    if not callable(reward_fn):
        raise ConfigError(
            f"{what} must return a function f(images, prompts, metadata); it returned {type(reward_fn).__name__}"
        )
    return reward_fn


def make_eval_rewards(accelerator: Accelerator, plan: RunPlan, reward_fn: RewardFn) -> dict[str, tuple[str, RewardFn]]:
    """The functions that score evaluations, with what each is called in messages, by label; every process must call it.

    Args:
        reward_fn: the trained one.

    Raises:
        ConfigError: as `make_reward`.
    """
    reward_fns = {evaluation.TRAINED: (plan.config.reward_fn, reward_fn)}
    with fail_together(accelerator):
        for entry in plan.eval_rewards:
            kwargs = with_device(entry["factory"], entry["kwargs"], accelerator.device)
            made = _made_reward(entry["factory"], kwargs, f"config.eval.rewards {entry['label']}")
            reward_fns[entry["label"]] = (entry["label"], made)
    return reward_fns


def eval_workers(
    reward_fns: Mapping[str, tuple[str, RewardFn]], device: torch.device, config: ConfigDict
) -> dict[str, RewardWorkers]:
    """Threads for the functions of `make_eval_rewards`. Failed samples never end an evaluation: they are NaN in it."""
    return {
        label: RewardWorkers(
            function,
            name=name,
            device=device,
            num_workers=config.num_reward_workers,
            timeout=config.reward_timeout,
            samples_per_epoch=1,
            max_failed_fraction=math.inf,
        )
        for label, (name, function) in reward_fns.items()
    }


def evaluate_together(
    accelerator: Accelerator,
    plan: RunPlan,
    model: policy.Policy,
    workers: Mapping[str, RewardWorkers],
    log: metrics.RunLog,
    evaluations: evaluation.Evaluations,
    progress: evaluation.Progress,
    epochs: int,
    step: int,
) -> tuple[dict[str, float], bool]:
    """Evaluate the policy after so many epochs, and log and keep the results; every process must call this.

    Args:
        progress: taken further, on every process alike.
        step: of the log.

    Returns:
        The evaluation's metrics, and whether `save_best` has its best state now; the metrics on the main process only.

    Raises:
        RunFailure: a reward function raised or took too long, or a file cannot be written.
    """
    config, started = plan.config, time.perf_counter()
    if config.offload:
        model.move_rest(accelerator.device)
    pictures_per_process = -(-sum(len(s.prompts) for s in plan.eval_sets) * config.eval.num_seeds // plan.num_processes)
    batches = -(-pictures_per_process // config.sample.batch_size)
    with (
        fail_together(accelerator),
        ProgressBar(f"after {epochs} epochs: evaluating", batches * config.sample.num_steps, accelerator) as bar,
    ):

        def on_step() -> None:
            bar.update()
            check_others(accelerator)

        own = evaluation.draw_and_score(
            model,
            plan.eval_sets,
            seeds=range(config.eval.num_seeds),
            batch_size=config.sample.batch_size,
            workers=workers,
            share=(accelerator.process_index, accelerator.num_processes),
            on_step=on_step,
            on_wait=lambda: check_others(accelerator),
        )
    pictures = evaluation.gather_pictures(own)
    values: dict[str, float] = {}
    has_best = False
    with fail_together(accelerator):
        if accelerator.is_main_process:
            evaluations.write(epochs, pictures)
            values = evaluation.eval_metrics(epochs, pictures, evaluations.read_scores(0))
            if config.save_best:
                has_best = evaluation.is_best(progress, values, config.save_best)
            if config.early_stop:
                at_best = evaluations.read_scores(progress.stop_best_epochs or 0)
                of_metric = at_best.get(evaluation.measured(config.early_stop), {})
                evaluation.has_dropped(
                    progress, pictures, values, config.early_stop, of_metric, config.early_stop_patience
                )
            epoch_and_time = {"epoch": max(0, epochs - 1), "time/eval_s": time.perf_counter() - started}
            log.log({**values, **epoch_and_time, "reward_queries": log.reward_queries}, step=step)
            for prompt_set in plan.eval_sets:
                shown = [p for p in pictures if p.set_name == prompt_set.name]
                captions = [f"{evaluation.caption(p)} | after {epochs} epochs" for p in shown]
                log.send_images(f"eval/{prompt_set.name}/images", [p.image for p in shown], captions, step)
            print(metrics.evaluation_summary(values), flush=True)
    state, has_best = exchange(accelerator, [progress.state_dict(), has_best])[0]
    progress.load_state_dict(state)
    return values, has_best


def make_policy(
    accelerator: Accelerator,
    config: ConfigDict,
    pipeline: StableDiffusionPipeline,
    scheduler: DDIMScheduler,
    checkpoint: Path | None = None,
) -> tuple[policy.Policy, torch.optim.Optimizer]:
    """The policy that the config describes, on this process's device, with the optimizer of what it trains.

    Args:
        pipeline: as `policy.load_pipeline` gives it.
        checkpoint: where weights come from; the optimizer's state does not.

    Raises:
        ConfigError: `lora.target_modules` fit no layer, or 8-bit Adam does not run here.
    """
    train, device = config.train, accelerator.device
    weight_dtype = policy.WEIGHT_DTYPES[config.mixed_precision]
    torch.manual_seed(config.seed)  # of the LoRA's first factors, which are the same on all processes
    policy.make_trainable(pipeline.unet, config.use_lora, config.lora.rank, config.lora.target_modules, weight_dtype)
    if checkpoint is not None:
        checkpoints.restore_weights(checkpoint, pipeline.unet, config.use_lora)
    policy.move(pipeline.vae, device=device, dtype=weight_dtype)
    policy.move(pipeline.text_encoder, device=device, dtype=weight_dtype)
    policy.move(pipeline.unet, device=device)
    optimizer = policy.make_optimizer(
        policy.trainable_parameters(pipeline.unet),
        learning_rate=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        weight_decay=train.adam_weight_decay,
        epsilon=train.adam_epsilon,
        use_8bit_adam=train.use_8bit_adam,
        fused=config.mixed_precision != "fp16",
    )
    share_halves(pipeline.unet)
    if train.gradient_checkpointing:
        pipeline.unet.enable_gradient_checkpointing(checkpointed)
    # Autocast alone: `update` averages gradients over processes, once per optimizer step.
    unet = accelerator.prepare_model(pipeline.unet, evaluation_mode=True)
    model = policy.make_policy(
        pipeline,
        torch.compile(unet) if config.compile else unet,
        scheduler,
        config.sample.guidance_scale,
        config.sample.eta,
        train.cfg_passes,
        train.uncond_grad,
    )
    return model, accelerator.prepare(optimizer)


class BaseAndTrained:
    """A UNet that is the base model and the trained one in turn, for pictures side by side."""

    def __init__(
        self,
        unet: UNet2DConditionModel,
        checkpoint: Path,
        model: checkpoints.ModelIdentity,
        weight_dtype: torch.dtype,
    ) -> None:
        """
        Args:
            unet: the base model, on the CPU; changed in place.
            model: what the checkpoint holds.
            weight_dtype: of frozen weights.
        """
        self.unet, self.use_lora = unet, model.use_lora
        self._weights: dict[float, dict[str, torch.Tensor]] = {}
        if not model.use_lora:
            self._weights[0.0] = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
        targets = model.lora_target_modules or []
        policy.make_trainable(unet, model.use_lora, model.lora_rank or 0, targets, weight_dtype)
        checkpoints.restore_weights(checkpoint, unet, model.use_lora)
        if not model.use_lora:
            self._weights[1.0] = {name: tensor.clone() for name, tensor in unet.state_dict().items()}

    def set_scale(self, scale: float) -> None:
        """0 is the base, 1 the trained model; of a LoRA anything between and beyond, of a whole UNet nothing else."""
        if not self.use_lora:
            self.unet.load_state_dict(self._weights[scale])
            return
        for layer in self.unet.modules():
            if isinstance(layer, LoraLayer):
                layer.set_scale(layer.active_adapters[0], scale)


def check_same_start(accelerator: Accelerator, checkpoint: Path | None) -> None:
    """Raises ConfigError on every process if they found other checkpoints to go on from; every process must call it."""
    own = f"{checkpoint.resolve().parents[1].name}/{checkpoint.name}" if checkpoint is not None else "none"
    found = exchange(accelerator, own)
    if len(set(found)) > 1:
        seen = ", ".join(f"process {rank} {name}" for rank, name in enumerate(found))
        raise ConfigError(
            f"the processes found different checkpoints to go on from: {seen}; config.logdir and config.resume_from "
            "must name one folder that all machines share"
        )


RUN_LOCK = "run.lock"
# Where launchers say which process this is
RANK_VARIABLES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_locks: dict[Path, FileLock] = {}  # held until the process ends


def _lock(file: Path) -> None:
    """Keep other processes from training here, for as long as this one lives.

    Raises:
        ConfigError: one does.
    """
    if (file := file.resolve()) in _locks:
        return
    lock = FileLock(file, timeout=5)  # seconds for one that was just killed
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"another process is training this run, since it holds {file}; wait for its end, or start one of another "
            "config.run_name"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write in the run's folder {file.parent}: {error}") from error
    except NotImplementedError:  # a file system without locks
        return
    _locks[file] = lock


def lock_what_is_resumed(config: ConfigDict) -> None:
    """Before its checkpoints are looked at, or another process might add some meanwhile. On the main process alone.

    Raises:
        ConfigError: another process is training it.
    """
    if any(os.environ.get(name, "0") != "0" for name in RANK_VARIABLES):
        return
    if config.resume == "auto" and Path(config.logdir).is_dir():
        _lock(_name_lock(config))
    elif config.resume_from:
        path = Path(config.resume_from).expanduser()
        for folder in (path, *path.parents[:2]):
            if (folder / checkpoints.CONFIG_FILE).is_file():
                return _lock(folder / RUN_LOCK)


def _name_lock(config: ConfigDict) -> Path:
    return Path(config.logdir) / f".{config.run_name}.lock"


def open_run_folder(
    accelerator: Accelerator,
    config: ConfigDict,
    checkpoint: Path | None,
    resumed: checkpoints.TrainingState | None,
) -> tuple[str, Path]:
    """The run's name and folder, the same on every process: a new one, or the one that is resumed.

    Writes `config.json` there: the resolved config, the number of processes and the packages' versions.
    """
    if checkpoint is not None and resumed is not None:
        run_name = resumed.run_name
        in_run_folder = checkpoint.resolve().parent.name in (checkpoints.CHECKPOINTS, checkpoints.BEST)
        run_folder = checkpoint.resolve().parents[1] if in_run_folder else Path(config.logdir) / run_name
    else:
        date = datetime.datetime.now().strftime("%Y.%m.%d_%H.%M.%S")
        run_name = exchange(accelerator, f"{config.run_name}_{date}" if config.run_name else date)[0]
        run_folder = Path(config.logdir) / run_name
    with fail_together(accelerator):
        if accelerator.is_main_process:
            try:
                run_folder.parent.mkdir(parents=True, exist_ok=True)
                if config.resume == "auto":
                    _lock(_name_lock(config))
                run_folder.mkdir(exist_ok=resumed is not None)
            except OSError as error:
                raise ConfigError(
                    f'config.logdir "{config.logdir}": cannot make the folder {run_folder}: {error}'
                ) from error
            _lock(run_folder / RUN_LOCK)
            if resumed is not None:
                for name in (checkpoints.CHECKPOINTS, checkpoints.BEST):
                    checkpoints.clean_up(run_folder / name)
                    checkpoints.set_aside_newer(run_folder / name, resumed.epoch)
            document = {
                "config": without_secrets(config.to_dict()),
                "num_processes": accelerator.num_processes,
                "hardware": f"{accelerator.device.type}, {_hardware(accelerator.device)}",
                "versions": metrics.package_versions(),
            }
            try:
                (run_folder / checkpoints.CONFIG_FILE).write_text(json.dumps(document, indent=2, default=str))
            except OSError as error:
                raise ConfigError(f"cannot write in the run's folder {run_folder}: {error}") from error
    accelerator.project_configuration.logging_dir = str(run_folder)
    return run_name, run_folder


def save_together(
    accelerator: Accelerator,
    run_folder: Path,
    unet: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: checkpoints.TrainingState,
    is_due: bool,
    num_checkpoint_limit: int,
    rescue: Rescue,
    is_best: bool = False,
) -> None:
    """Write a checkpoint on the main process, if all processes' weights agree; an error there is one everywhere.

    Args:
        unet: unwrapped.
        is_due: False: keep the state for a run that ends before the next one is. What differs is never kept.
        is_best: write it into the folder of the best one too, in the place of the one there.
    """
    checkpoints.check_weights_agree(accelerator, unet)
    with fail_together(accelerator):
        if accelerator.is_main_process:
            folder = run_folder / checkpoints.CHECKPOINTS
            snapshot = checkpoints.take_snapshot(unet, optimizer, state)
            checkpoints.check_weights_finite(snapshot.weights)  # or it would replace a good state that is kept
            rescue.keep(snapshot, folder, num_checkpoint_limit)
            if is_due:
                rescue.save()
            if is_best:
                checkpoints.save_checkpoint(run_folder / checkpoints.BEST, snapshot, num_checkpoint_limit=1)


def changed_options(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """What a resumed run does otherwise than the run before it, as "key old -> new"; where it stops is not among it."""
    old, new = (metrics.flatten(json.loads(json.dumps(config, default=str))) for config in (saved, present))
    of_no_matter = ("resume_from", "resume", "num_epochs", "eval.", "save_best", "early_stop")
    keys = sorted(key for key in old.keys() | new.keys() if not key.startswith(of_no_matter))
    return [f"{key} {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key)]


def goes_another_way(plan: RunPlan, resumed: checkpoints.TrainingState | None) -> bool:
    """Whether a resumed run does otherwise than the one before would have done."""
    if resumed is None:
        return False
    present = without_secrets(plan.config.to_dict())
    return resumed.num_processes != plan.num_processes or bool(changed_options(resumed.config, present))


def _processes(number: int) -> str:
    return f"{number} process{'es' if number > 1 else ''}"


def _hardware(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"


def why_stopped(config: ConfigDict, progress: evaluation.Progress) -> str:
    """Of a run that `early_stop` has ended."""
    return (
        f"stopped early: {config.early_stop} was clearly worse in {progress.worse} evaluations in a row than after "
        f"{progress.stop_best_epochs} epochs, where it was {progress.stop_best:.4g}"
    )


def write_report(run_folder: Path, base_config: str) -> None:
    """Write the run's `report.html`; a run does not end for want of one.

    Args:
        base_config: config file that the run's options are compared with.
    """
    try:
        from ddpo_pytorch import report

        base = load_config(base_config).to_dict() if Path(base_config).is_file() else None
        report.write_report([run_folder], run_folder / "report.html", base)
    except Exception as error:
        say(f"warning: {run_folder / 'report.html'} could not be written: {type(error).__name__}: {error}")


def _evaluations(plan: RunPlan) -> str:
    if not plan.eval_sets:
        return "none (eval.every is 0)"
    sets = ", ".join(f"{s.name} ({len(s.prompts)} prompts)" for s in plan.eval_sets)
    labels = ", ".join([plan.config.reward_fn, *(entry["label"] for entry in plan.eval_rewards)])
    every, seeds = plan.config.eval.every, plan.config.eval.num_seeds
    return f"before, after every {every} epochs and at the end: {sets}, {seeds} seeds each, by {labels}"


def plan_lines(plan: RunPlan) -> dict[str, str]:
    """What a plan comes to, by name, for people."""
    config, processes = plan.config, _processes(plan.num_processes)
    sample, train = config.sample, config.train
    return {
        "samples per epoch": f"{plan.samples_per_epoch_total} = {sample.batch_size} x {sample.num_batches_per_epoch} "
        f"batches x {processes}, {sample.num_steps} steps each",
        "batch per update": f"{plan.batch_per_update_total} = {train.batch_size} x "
        f"{train.gradient_accumulation_steps} accumulated x {processes}, {plan.num_train_timesteps} steps each",
        "updates per epoch": f"{plan.updates_per_epoch}, over {config.num_epochs} epochs",
        "model": f"{config.pretrained.model}, "
        + (f"LoRA of rank {config.lora.rank}" if config.use_lora else "whole UNet"),
        "prompts, reward": f"{config.prompt_fn}, {config.reward_fn}",
        "evaluations": _evaluations(plan),
    }


def aligned(lines: Mapping[str, str]) -> str:
    """Names and values as lines of two columns."""
    return "\n".join(f"{name + ':':<19}{value}" for name, value in lines.items())


def describe(
    plan: RunPlan,
    accelerator: Accelerator,
    model: policy.Policy,
    run_folder: Path,
    resumed: checkpoints.TrainingState | None,
) -> str:
    """The plan, for people."""
    config, device = plan.config, accelerator.device
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.unet.parameters()})
    trainable = sum(p.numel() for p in policy.trainable_parameters(model.unet))
    lines = plan_lines(plan) | {
        "to train": f"{trainable:,} trainable parameters",
        "device": f"{device} ({_hardware(device)}), mixed precision {config.mixed_precision}, "
        f"UNet weights {' and '.join(dtypes)}",
        "run folder": f"{run_folder}",
    }
    lines["config"] = ", ".join(
        f"{key} {value!r}" for key, value in metrics.flatten(without_secrets(config.to_dict())).items()
    )
    if resumed is not None:
        lines["resumed"] = f"after {resumed.epoch} epochs"
        if resumed.num_processes != plan.num_processes:
            lines["resumed"] += (
                f", which {_processes(resumed.num_processes)} ran: other prompts and noise are drawn now"
            )
        if changed := changed_options(resumed.config, without_secrets(config.to_dict())):
            lines["changed options"] = ", ".join(changed)
    return aligned(lines)
