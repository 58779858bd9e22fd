"""Save, find and restore checkpoints: everything that affects the next step, and nothing that could execute code.

`RUN/checkpoints/checkpoint_N` holds the state after N epochs: the trained weights in the layout that diffusers loads
(`pytorch_lora_weights.safetensors`, or a whole UNet in `unet/`), `optimizer.pt`, and `state.json` with the size and
digest of every other file. Random state is not among it, since random numbers are a function of (seed, epoch, process).
"""

import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

from ddpo_pytorch.distributed import exchange
from ddpo_pytorch.exits import RunFailure
from ddpo_pytorch.named_functions import ConfigError

# Folders of a run: its latest states, and the best one by an evaluation
CHECKPOINTS, BEST = "checkpoints", "best"
STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.pt"
CONFIG_FILE = "config.json"  # of a run's folder
LORA_FILE = "pytorch_lora_weights.safetensors"
CHECKPOINT_NAME = re.compile(r"checkpoint_(\d+)")
# What a checkpoint is called while it is written or deleted; left behind only by a process that was killed
UNFINISHED_NAME = re.compile(r"\.(writing|deleting)_checkpoint_\d+(_\d+)?")


@dataclass
class ModelIdentity:
    """What a checkpoint's weights belong to; resuming on anything else is refused."""

    pretrained_model: str
    base_unet: str | None  # policy.unet_fingerprint; None while the model is not loaded
    use_8bit_adam: bool
    use_lora: bool
    lora_rank: int | None
    lora_target_modules: list[str] | None


@dataclass
class TrainingState:
    """A run's position. `run_name` and `tracker_run_ids` let a resumed run go on in the same folder and dashboards."""

    epoch: int  # epochs completed
    global_step: int  # updates that were not skipped
    log_step: int  # the step under which the next update is logged; skipped ones are counted, so that none share one
    run_name: str
    model: ModelIdentity
    stat_tracker: dict[str, list[float]] | None = None
    reward: dict[str, list[float]] | None = None  # the scales of a weighted sum's components
    tracker_run_ids: dict[str, str] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    evaluation: dict[str, Any] = field(default_factory=dict)  # what evaluations have shown so far
    num_processes: int = 1
    config: dict[str, Any] = field(default_factory=dict)


def lora_state_dict(unet: UNet2DConditionModel) -> dict[str, torch.Tensor]:
    """The live LoRA factors (copying into them changes the UNet), under peft's names, which diffusers loads.

    diffusers' own conversion renames the factors of some layers and not of others, and its loader drops the former.
    """
    return get_peft_model_state_dict(unet)


def check_weights_agree(accelerator: Accelerator, unet: torch.nn.Module) -> None:
    """Raises RunFailure, on every process alike, if their trained weights differ. Every process must call it."""
    if accelerator.num_processes == 1:
        return
    with torch.no_grad():
        sums = torch.stack([p.float().sum() for p in unet.parameters() if p.requires_grad]).nan_to_num()
    if len(set(exchange(accelerator, hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()))) > 1:
        raise RunFailure("the processes' trained weights differ, so they do not train one model; nothing was saved")


@dataclass
class Snapshot:
    """A whole state on the CPU, which later training does not change.

    Attributes:
        weights: the LoRA factors under peft's names, or the whole UNet.
        unet_config: of the UNet.
        optimizer: its state_dict.
    """

    weights: dict[str, torch.Tensor]
    unet_config: Mapping[str, Any]
    optimizer: dict[str, Any]
    state: TrainingState


def _on_cpu(value: Any) -> Any:
    """A copy of a nest of tensors, on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_cpu(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(entry) for entry in value)
    return copy.deepcopy(value)


@torch.no_grad()
def take_snapshot(unet: UNet2DConditionModel, optimizer: torch.optim.Optimizer, state: TrainingState) -> Snapshot:
    """The present state, for `save_checkpoint` now or later.

    Args:
        unet: unwrapped.
    """
    weights = lora_state_dict(unet) if state.model.use_lora else unet.state_dict()
    return Snapshot(_on_cpu(weights), dict(unet.config), _on_cpu(optimizer.state_dict()), state)


def check_weights_finite(weights: Mapping[str, torch.Tensor]) -> None:
    """Raises RunFailure if any trained weight is NaN or infinite: such a model is never saved."""
    bad = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if bad:
        raise RunFailure(f"{len(bad)} trained tensors are not finite, first {bad[0]}; nothing was saved")


def _write_weights(folder: Path, snapshot: Snapshot) -> None:
    if snapshot.state.model.use_lora:
        StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=snapshot.weights)
        return
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(snapshot.unet_config)
    unet.load_state_dict(snapshot.weights, assign=True)
    unet.save_pretrained(folder / "unet")


def _digests(folder: Path) -> dict[str, list]:
    """Size and sha256 of every file in a checkpoint but its state file."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != STATE_FILE:
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
            digests[path.relative_to(folder).as_posix()] = [path.stat().st_size, digest.hexdigest()]
    return digests


def _digest_of(document: Mapping[str, Any]) -> str:
    """Of a state file, less this entry itself."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def save_checkpoint(folder: Path, snapshot: Snapshot, num_checkpoint_limit: int, is_suspect: bool = False) -> Path:
    """Write `folder/checkpoint_N`, N = the snapshot's epoch, aside and rename it into place; then prune the oldest.

    Args:
        folder: RUN/checkpoints.
        num_checkpoint_limit: how many to keep, this one included.
        is_suspect: call it suspect_checkpoint_N, which no search finds, and prune nothing.

    Returns:
        The checkpoint's folder.

    Raises:
        RunFailure: weights that are not finite, or what the disk said; older checkpoints are untouched.
    """
    check_weights_finite(snapshot.weights)
    name = f"checkpoint_{snapshot.state.epoch}"
    target = folder / (f"suspect_{name}" if is_suspect else name)
    aside = folder / f".writing_{name}_{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        _write_weights(aside, snapshot)
        torch.save(snapshot.optimizer, aside / OPTIMIZER_FILE)
        # Last, so that a folder with a whole state file is a whole checkpoint.
        document = json.loads(json.dumps({**asdict(snapshot.state), "files": _digests(aside)}, default=str))
        (aside / STATE_FILE).write_text(json.dumps({**document, "digest": _digest_of(document)}, indent=1))
        for path in aside.rglob("*"):
            _flush(path)
        replaced = _set_aside(target) if target.exists() else None  # not a whole one; those of later epochs were moved
        aside.rename(target)
        _flush(folder)
    except Exception as error:  # safetensors and torch have errors of their own for a full disk
        shutil.rmtree(aside, ignore_errors=True)
        said = " ".join(f"{error}".split())
        with contextlib.suppress(OSError):
            said += f" ({shutil.disk_usage(folder).free / 1e6:,.0f} MB free there)"
        raise RunFailure(f"cannot write the checkpoint {target}: {said}; older ones are as they were") from None
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    if is_suspect:
        return target
    own = [path for path in list_checkpoints(folder) if (path / STATE_FILE).is_file()]
    for old in own[:-num_checkpoint_limit]:
        with contextlib.suppress(OSError):  # it stays; the new one is there, which is what matters
            delete(old)
    return target


def _flush(path: Path) -> None:
    """Have the system write a file or folder to the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(handle)  # some file systems cannot for a folder
    finally:
        os.close(handle)


def delete(checkpoint: Path) -> None:
    """Remove a checkpoint so that it is never half there under its name."""
    shutil.rmtree(_set_aside(checkpoint), ignore_errors=True)


def _set_aside(checkpoint: Path) -> Path:
    aside = checkpoint.with_name(f".deleting_{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)
    return aside


def problem_of(checkpoint: Path) -> str | None:
    """Why a checkpoint is not whole; None if it is. Reads all of it."""
    try:
        read_state(checkpoint)
        document = json.loads((checkpoint / STATE_FILE).read_text())
        if "digest" in document and document["digest"] != _digest_of(document):
            return f"{STATE_FILE} has changed"
        recorded = document["files"]
        entries = [(name, size, digest) for name, (size, digest) in recorded.items()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{STATE_FILE} is not readable ({error})"
    weights = [name for name in recorded if name.endswith((".safetensors", ".safetensors.index.json"))]
    if OPTIMIZER_FILE not in recorded or not weights:
        return f"{STATE_FILE} lists no weights or no {OPTIMIZER_FILE}"
    try:
        found = _digests(checkpoint)
    except OSError as error:
        return f"its files are not readable ({error})"
    for name, size, digest in entries:
        if name not in found:
            return f"{name} is missing"
        if found[name][0] != size:
            return f"{name} has {found[name][0]} bytes of {size}"
        if found[name][1] != digest:
            return f"{name} has changed"
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders named checkpoint_N in a folder, whole or not, oldest first; everything else is passed over."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = CHECKPOINT_NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def set_aside_newer(folder: Path, epoch: int) -> None:
    """Rename checkpoints of later epochs than the one resumed from: they are not this run's future any more."""
    for path in list_checkpoints(folder):
        if int(path.name.removeprefix("checkpoint_")) > epoch:
            target = folder / f"superseded_{path.name}"
            shutil.rmtree(target, ignore_errors=True)
            path.rename(target)


def clean_up(folder: Path) -> None:
    """Remove what a killed process left half written or half deleted."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if UNFINISHED_NAME.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint in a folder, and what was wrong with newer ones."""
    skipped: list[str] = []
    for checkpoint in reversed(list_checkpoints(folder)):
        problem = problem_of(checkpoint)
        if problem is not None:
            skipped.append(f"{checkpoint} is not whole: {problem}")
        elif (epoch := read_state(checkpoint).epoch) != int(checkpoint.name.removeprefix("checkpoint_")):
            skipped.append(f"{checkpoint} is another one under this name: it holds the state after {epoch} epochs")
        else:
            return checkpoint, skipped
    return None, skipped


def find_checkpoint(resume_from: str, option: str = "config.resume_from") -> tuple[Path | None, list[str]]:
    """The checkpoint that a user points at: itself, or the newest whole one in its parent or in the run's folder.

    Args:
        option: what it was given as, for messages.

    Returns:
        Its folder, None for a run that has none yet; and what was wrong with newer ones.

    Raises:
        ConfigError: none there, or the one pointed at is not whole.
    """
    path = Path(resume_from).expanduser()
    if (path / STATE_FILE).is_file() or CHECKPOINT_NAME.fullmatch(path.name):
        problem = problem_of(path)
        if problem is None:
            return path, []
        other, _ = newest_whole(path.parent)
        hint = f"; {other} is whole" if other is not None else ""
        raise ConfigError(f'{option} "{resume_from}" is not a whole checkpoint: {problem}{hint}')
    skipped: list[str] = []
    for folder in (path, path / "checkpoints"):
        checkpoint, problems = newest_whole(folder)
        skipped += problems
        if checkpoint is not None:
            return checkpoint, skipped
    if not skipped and (path / CONFIG_FILE).is_file():  # a run that was killed in its first epochs
        return None, [f"{path} has no checkpoint yet, so a new run starts"]
    raise ConfigError(
        f'{option} "{resume_from}": no checkpoint there; give a folder checkpoint_N with its '
        f"{STATE_FILE}, the folder of such, or a run's folder" + "".join(f"; {problem}" for problem in skipped)
    )


def find_run(logdir: str, run_name: str) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of the newest run of this name that has one; None if there is none.

    Returns:
        Its folder, and what was wrong with newer ones.
    """
    name = re.compile(re.escape(run_name) + r"_\d{4}\.\d\d\.\d\d_\d\d\.\d\d\.\d\d")
    folder = Path(logdir)
    runs = [path for path in folder.iterdir() if name.fullmatch(path.name)] if folder.is_dir() else []
    skipped: list[str] = []
    for run in sorted(runs, reverse=True):
        checkpoint, problems = newest_whole(run / "checkpoints")
        skipped += problems
        if checkpoint is not None:
            return checkpoint, skipped
    return None, skipped


def read_state(checkpoint: Path) -> TrainingState:
    """The position that a checkpoint holds.

    Raises:
        ConfigError: its state file is not one of ours.
    """
    try:
        values = json.loads((checkpoint / STATE_FILE).read_text())
        values.pop("files", None)
        values.pop("digest", None)
        state = TrainingState(**{**values, "model": ModelIdentity(**values["model"])})
        if not all(isinstance(n, int) and n >= 0 for n in (state.epoch, state.global_step, state.log_step)):
            raise ValueError("its epoch or steps are no numbers")
        return state
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{checkpoint / STATE_FILE} is not a training state of this program: {error}") from error


def find_resumed(
    resume_from: str, resume: str, logdir: str, run_name: str, num_epochs: int
) -> tuple[Path | None, TrainingState | None, list[str]]:
    """The checkpoint to go on from, its state, and what was wrong with newer ones; (None, None, ...) for a new run.

    Raises:
        ConfigError: none there, or, unless it was found by its name, one that has all the epochs already.
    """
    if resume == "auto":
        checkpoint, skipped = find_run(logdir, run_name)
    elif resume_from:
        checkpoint, skipped = find_checkpoint(resume_from)
    else:
        checkpoint, skipped = None, []
    if checkpoint is None:
        if resume == "auto" and skipped:
            skipped.append(f'no checkpoint of "{run_name}" is whole, so it starts over, in a new folder')
        return None, None, skipped
    state = read_state(checkpoint)
    if state.epoch >= num_epochs and resume != "auto":
        raise ConfigError(nothing_left(checkpoint, state, num_epochs))
    return checkpoint, state, skipped


def nothing_left(checkpoint: Path, state: TrainingState, num_epochs: int) -> str:
    """What to say of a run that has all its epochs."""
    return f"{checkpoint} has {state.epoch} epochs already, and config.num_epochs is {num_epochs}; raise it to go on"


def stopped_early(checkpoint: Path, state: TrainingState) -> str:
    """What to say of a run that `early_stop` has ended."""
    return (
        f"{checkpoint} was stopped early after {state.epoch} epochs, since a held-out metric fell; set "
        "config.early_stop empty to go on"
    )


def check_identity(saved: ModelIdentity, present: ModelIdentity, checkpoint: Path) -> None:
    """Refuse a checkpoint of another model; what is not known yet (None) is not compared.

    Raises:
        ConfigError: with what differs.
    """
    if saved.use_8bit_adam != present.use_8bit_adam:
        raise ConfigError(
            f"{checkpoint} was trained with train.use_8bit_adam {saved.use_8bit_adam}, and its optimizer state fits no "
            f"other; set it {saved.use_8bit_adam} to resume"
        )
    if saved.use_lora != present.use_lora:
        kinds = {True: "a LoRA", False: "a whole UNet"}
        raise ConfigError(
            f"{checkpoint} holds {kinds[saved.use_lora]}, but config.use_lora is {present.use_lora}; set it "
            f"{saved.use_lora} to resume"
        )
    if present.base_unet is not None and saved.base_unet != present.base_unet:
        raise ConfigError(
            f'{checkpoint} was trained on "{saved.pretrained_model}", and config.pretrained.model '
            f'"{present.pretrained_model}" has another UNet; set it to the checkpoint\'s to resume'
        )
    if saved.lora_rank != present.lora_rank:
        raise ConfigError(
            f"{checkpoint} has LoRA rank {saved.lora_rank}, but config.lora.rank is {present.lora_rank}; set it to "
            f"{saved.lora_rank} to resume"
        )
    if sorted(saved.lora_target_modules or []) != sorted(present.lora_target_modules or []):
        raise ConfigError(
            f"{checkpoint} has a LoRA on {saved.lora_target_modules}, but config.lora.target_modules is "
            f"{present.lora_target_modules}; set it to the checkpoint's to resume"
        )


@torch.no_grad()
def restore_weights(checkpoint: Path, unet: UNet2DConditionModel, use_lora: bool) -> None:
    """Copy a checkpoint's trained weights into an unwrapped UNet.

    Raises:
        ConfigError: other tensors than the UNet has.
    """
    if use_lora:
        saved = {k.removeprefix("unet."): v for k, v in load_file(checkpoint / LORA_FILE).items()}
        live = lora_state_dict(unet)
    else:
        saved = UNet2DConditionModel.from_pretrained(checkpoint / "unet").state_dict()
        live = unet.state_dict()
    if {k: v.shape for k, v in saved.items()} != {k: v.shape for k, v in live.items()}:
        raise ConfigError(f"the weights in {checkpoint} do not fit this UNet: {len(saved)} tensors against {len(live)}")
    for name, tensor in saved.items():
        live[name].copy_(tensor)


def restore_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint's optimizer state; learning rate, betas and the like stay those of `optimizer`."""
    saved = torch.load(checkpoint / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
    # Before, since where a step's number belongs depends on them.
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        group.update({key: value for key, value in own.items() if key != "params"})
    optimizer.load_state_dict(saved)
