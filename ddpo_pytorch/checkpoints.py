"""Save, find and restore checkpoints: everything that affects the next step, and nothing that could execute code.

`RUN/checkpoints/checkpoint_N` holds the state after N epochs: the trained weights in the layout that diffusers loads
(`pytorch_lora_weights.safetensors`, or a whole UNet in `unet/`), `optimizer.pt`, and `state.json`. Random state is not
among it, since random numbers are a function of (seed, epoch, process).
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

from ddpo_pytorch.named_functions import ConfigError

STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.pt"
LORA_FILE = "pytorch_lora_weights.safetensors"
CHECKPOINT_NAME = re.compile(r"checkpoint_(\d+)")


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
    global_step: int
    run_name: str
    model: ModelIdentity
    stat_tracker: dict[str, list[float]] | None = None
    reward: dict[str, list[float]] | None = None  # the scales of a weighted sum's components
    tracker_run_ids: dict[str, str] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)


def lora_state_dict(unet: UNet2DConditionModel) -> dict[str, torch.Tensor]:
    """The live LoRA factors (copying into them changes the UNet), under peft's names, which diffusers loads.

    diffusers' own conversion renames the factors of some layers and not of others, and its loader drops the former.
    """
    return get_peft_model_state_dict(unet)


def check_weights_agree(accelerator: Accelerator, unet: torch.nn.Module) -> None:
    """Raises RuntimeError, on every process alike, if their trained weights differ. Every process must call it."""
    with torch.no_grad():
        own = torch.stack([p.float().sum() for p in unet.parameters() if p.requires_grad])
    gathered = accelerator.gather(own[None])
    if not (gathered.eq(gathered[0]) | gathered.isnan()).all():
        raise RuntimeError("the processes' trained weights differ, so they do not train one model; nothing was saved")


def check_weights_finite(unet: torch.nn.Module) -> None:
    """Raises RuntimeError if any trained weight is NaN or infinite: such a model is never saved."""
    bad = [name for name, p in unet.named_parameters() if p.requires_grad and not p.isfinite().all()]
    if bad:
        raise RuntimeError(f"{len(bad)} trained tensors are not finite, first {bad[0]}; nothing was saved")


def save_checkpoint(
    folder: Path,
    unet: UNet2DConditionModel,
    optimizer_state: dict,
    state: TrainingState,
    num_checkpoint_limit: int,
) -> Path:
    """Write `folder/checkpoint_N`, N = state.epoch, aside and rename it into place; then prune the oldest.

    Args:
        folder: RUN/checkpoints.
        unet: unwrapped.
        num_checkpoint_limit: how many to keep, this one included.

    Returns:
        The checkpoint's folder.

    Raises:
        RuntimeError: weights that are not finite.
        OSError: what the disk said; older checkpoints are untouched.
    """
    check_weights_finite(unet)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"checkpoint_{state.epoch}"
    aside = folder / f".writing_{target.name}_{os.getpid()}"
    try:
        aside.mkdir()
        if state.model.use_lora:
            StableDiffusionPipeline.save_lora_weights(aside, unet_lora_layers=lora_state_dict(unet))
        else:
            unet.save_pretrained(aside / "unet")
        torch.save(optimizer_state, aside / OPTIMIZER_FILE)
        # Last, so that a folder with a whole state file is a whole checkpoint.
        (aside / STATE_FILE).write_text(json.dumps(asdict(state), indent=1, default=str))
        if target.exists():  # left by a run that was resumed from before it
            shutil.rmtree(target)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for old in list_checkpoints(folder)[:-num_checkpoint_limit]:
        shutil.rmtree(old)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first; other files and folders there are passed over."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = CHECKPOINT_NAME.fullmatch(path.name)
        if match and (path / STATE_FILE).is_file():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def set_aside_newer(folder: Path, epoch: int) -> None:
    """Rename checkpoints of later epochs than the one resumed from: they are not this run's future any more."""
    for path in list_checkpoints(folder):
        if int(path.name.removeprefix("checkpoint_")) > epoch:
            target = folder / f"superseded_{path.name}"
            shutil.rmtree(target, ignore_errors=True)
            path.rename(target)


def find_checkpoint(resume_from: str) -> Path:
    """The checkpoint that a user points at: itself, or the newest in its parent or in the run's folder.

    Raises:
        ConfigError: none there.
    """
    path = Path(resume_from).expanduser()
    if (path / STATE_FILE).is_file():
        return path
    checkpoints = list_checkpoints(path) or list_checkpoints(path / "checkpoints")
    if not checkpoints:
        raise ConfigError(
            f'config.resume_from "{resume_from}": no checkpoint there; give a folder checkpoint_N with its '
            f"{STATE_FILE}, the folder of such, or a run's folder"
        )
    return checkpoints[-1]


def read_state(checkpoint: Path) -> TrainingState:
    """The position that a checkpoint holds.

    Raises:
        ConfigError: its state file is not one of ours.
    """
    try:
        values = json.loads((checkpoint / STATE_FILE).read_text())
        return TrainingState(**{**values, "model": ModelIdentity(**values["model"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{checkpoint / STATE_FILE} is not a training state of this program: {error}") from error


def find_resumed(resume_from: str, num_epochs: int) -> tuple[Path | None, TrainingState | None]:
    """The checkpoint to go on from and its state; (None, None) for a new run.

    Raises:
        ConfigError: none there, or one that has all the epochs already.
    """
    if not resume_from:
        return None, None
    checkpoint = find_checkpoint(resume_from)
    state = read_state(checkpoint)
    if state.epoch >= num_epochs:
        raise ConfigError(
            f"{checkpoint} has {state.epoch} epochs already, and config.num_epochs is {num_epochs}; raise it to go on"
        )
    return checkpoint, state


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
    """Load a checkpoint's optimizer state."""
    optimizer.load_state_dict(torch.load(checkpoint / OPTIMIZER_FILE, map_location="cpu", weights_only=True))
