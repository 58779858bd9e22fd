"""How a run starts: its process group, its folder, its progress bars, and what it says about itself.

The one module besides the plan that reads the config.
"""

import datetime
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import (
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from diffusers import DDIMScheduler, StableDiffusionPipeline
from filelock import FileLock, Timeout
from ml_collections import ConfigDict
from tqdm import tqdm

from ddpo_pytorch import checkpoints, metrics, policy
from ddpo_pytorch.diffusers_patch.equal_halves import checkpoint as checkpointed
from ddpo_pytorch.diffusers_patch.equal_halves import share_halves
from ddpo_pytorch.distributed import exchange, fail_together
from ddpo_pytorch.exits import RunFailure
from ddpo_pytorch.named_functions import ConfigError, with_device, without_secrets
from ddpo_pytorch.rescue import Rescue
from ddpo_pytorch.run_plan import RunPlan
from ddpo_pytorch.scoring import RewardFn

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
        try:
            reward_fn = plan.reward_factory(**kwargs)
        except ConfigError:
            raise
        except (ValueError, OSError, ImportError) as error:
            raise ConfigError(f"config.reward_fn {name}: {error}") from error
        except (Exception, SystemExit) as error:
            raise RunFailure(f"config.reward_fn {name} raised {type(error).__name__}: {error}") from error
        if not callable(reward_fn):
            raise ConfigError(
                f"config.reward_fn {name} must return a function f(images, prompts, metadata); it returned "
                f"{type(reward_fn).__name__}"
            )
    return reward_fn


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
        in_run_folder = checkpoint.resolve().parent.name == "checkpoints"
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
                checkpoints.clean_up(run_folder / "checkpoints")
                checkpoints.set_aside_newer(run_folder / "checkpoints", resumed.epoch)
            document = {
                "config": without_secrets(config.to_dict()),
                "num_processes": accelerator.num_processes,
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
) -> None:
    """Write a checkpoint on the main process, if all processes' weights agree; an error there is one everywhere.

    Args:
        unet: unwrapped.
        is_due: False: keep the state for a run that ends before the next one is. What differs is never kept.
    """
    checkpoints.check_weights_agree(accelerator, unet)
    with fail_together(accelerator):
        if accelerator.is_main_process:
            folder = run_folder / "checkpoints"
            snapshot = checkpoints.take_snapshot(unet, optimizer, state)
            checkpoints.check_weights_finite(snapshot.weights)  # or it would replace a good state that is kept
            rescue.keep(snapshot, folder, num_checkpoint_limit)
            if is_due:
                rescue.save()


def changed_options(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """What a resumed run does otherwise than the run before it, as "key old -> new"; where it stops is not among it."""
    old, new = (metrics.flatten(json.loads(json.dumps(config, default=str))) for config in (saved, present))
    keys = sorted((old.keys() | new.keys()) - {"resume_from", "resume", "num_epochs"})
    return [f"{key} {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key)]


def goes_another_way(plan: RunPlan, resumed: checkpoints.TrainingState | None) -> bool:
    """Whether a resumed run does otherwise than the one before would have done."""
    if resumed is None:
        return False
    present = without_secrets(plan.config.to_dict())
    return resumed.num_processes != plan.num_processes or bool(changed_options(resumed.config, present))


def _processes(number: int) -> str:
    return f"{number} process{'es' if number > 1 else ''}"


def describe(
    plan: RunPlan,
    accelerator: Accelerator,
    model: policy.Policy,
    run_folder: Path,
    resumed: checkpoints.TrainingState | None,
) -> str:
    """The plan, for people."""
    config, device = plan.config, accelerator.device
    processes = _processes(plan.num_processes)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.unet.parameters()})
    sample, train = config.sample, config.train
    trainable = sum(p.numel() for p in policy.trainable_parameters(model.unet))
    kind = f"LoRA of rank {config.lora.rank}" if config.use_lora else "whole UNet"
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    lines: dict[str, Any] = {
        "samples per epoch": f"{plan.samples_per_epoch_total} = {sample.batch_size} x {sample.num_batches_per_epoch} "
        f"batches x {processes}, {sample.num_steps} steps each",
        "batch per update": f"{plan.batch_per_update_total} = {train.batch_size} x "
        f"{train.gradient_accumulation_steps} accumulated x {processes}, {plan.num_train_timesteps} steps each",
        "updates per epoch": f"{plan.updates_per_epoch}, over {config.num_epochs} epochs",
        "model": f"{config.pretrained.model}, {kind}, {trainable:,} trainable parameters",
        "device": f"{device} ({hardware}), mixed precision {config.mixed_precision}, "
        f"UNet weights {' and '.join(dtypes)}",
        "prompts, reward": f"{config.prompt_fn}, {config.reward_fn}",
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
    return "\n".join(f"{name + ':':<19}{value}" for name, value in lines.items())
