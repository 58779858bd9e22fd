"""What a run leaves for people: dashboards, `metrics.jsonl`, picture grids and the reward curve.

Knows nothing of diffusion or of how the numbers came about.
"""

import contextlib
import functools
import importlib.metadata
import json
import math
import netrc
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import matplotlib
import numpy as np
from accelerate import Accelerator
from PIL import Image, ImageDraw, ImageFont

from ddpo_pytorch.exits import RunFailure

PROJECT = "ddpo-pytorch"
# What W&B draws over epochs, not over updates; reward_queries, the images scored so far, is there to be chosen instead.
AXES = {
    **dict.fromkeys(("reward", "reward_mean", "reward_std", "reward/*", "time/*", "policy/logp_gap*"), "epoch"),
    "eval/*": "eval/epoch",
}
PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "peft", "numpy", "wandb", "bitsandbytes")


def package_versions() -> dict[str, str]:
    """Versions of python and of the packages that matter to a run; those not installed are left out."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def wandb_offline_reason() -> str | None:
    """Why W&B should go offline by itself: no login here. None where there is one, or the user chose a mode."""
    import wandb

    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return None
    settings = wandb.setup().settings
    if settings.mode != "online" or settings.api_key or settings.identity_token_file:
        return None
    for file in [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]:
        try:
            if netrc.netrc(Path(file).expanduser()).authenticators(urlparse(settings.base_url).hostname or ""):
                return None
        except (OSError, netrc.NetrcParseError):
            continue
    return "no W&B login found, so W&B runs offline: `wandb login`, or set WANDB_API_KEY, to see runs on the web"


def start_trackers(
    accelerator: Accelerator, run_folder: Path, run_name: str, config: Mapping[str, Any], run_ids: dict[str, str]
) -> dict[str, str]:
    """Start the dashboards that the accelerator was made with; they write into the run's folder.

    Args:
        config: resolved; nested sections are shown as "section.key".
        run_ids: of the run that is resumed, by tracker name; empty for a new one.

    Returns:
        Run ids by tracker name, to be kept in checkpoints; filled on the main process only.
    """
    names = [getattr(name, "value", name) for name in accelerator.log_with]
    kwargs: dict[str, dict] = {}
    if "wandb" in names:
        import wandb

        kwargs["wandb"] = {"name": run_name, "dir": str(run_folder)}
        if (flush := "x_transaction_log_flush_interval") in wandb.Settings.model_fields:
            # On the disk at once, or a process that is killed takes the last 15 s of points with it.
            kwargs["wandb"]["settings"] = wandb.Settings(**{flush: 0.05})
        if accelerator.is_main_process:
            reason = wandb_offline_reason()
            if reason is not None:
                kwargs["wandb"]["mode"] = "offline"
                print(reason, flush=True)
        if "wandb" in run_ids:
            kwargs["wandb"] |= {"id": run_ids["wandb"], "resume": "allow"}
    # Nested sections as "section.key".
    scalars = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in flatten(config).items()}
    accelerator.init_trackers(PROJECT, config=scalars, init_kwargs=kwargs)
    if "wandb" in names and accelerator.is_main_process:
        run = accelerator.get_tracker("wandb", unwrap=True)
        for axis in set(AXES.values()):
            run.define_metric(axis)
        for pattern, axis in AXES.items():
            run.define_metric(pattern, step_metric=axis)
        return {"wandb": run.id}
    return {}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _plain(value: Any) -> Any:
    """A value as strict JSON has it: arrays as lists, NaN and infinities as null."""
    if isinstance(value, np.ndarray):
        return [_plain(v) for v in value.tolist()]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFailure(f"cannot write {path}: {error}") from None


class RunLog:
    """Sends numbers and pictures to the dashboards and into the run's folder. Acts on the main process alone."""

    def __init__(
        self, accelerator: Accelerator, run_folder: Path, first_epoch: int, goes_another_way: bool = False
    ) -> None:
        """
        Args:
            first_epoch: the epoch about to run; lines of this and later epochs, left by a run that went further than
                the checkpoint it is resumed from, are dropped from `metrics.jsonl`.
            goes_another_way: this run is not the same again, so that dashboards, which cannot drop what they have of
                these epochs, need a new run: `needs_new_run`.
        """
        self.accelerator = accelerator
        self.run_folder = run_folder
        self.metrics_file = run_folder / "metrics.jsonl"
        self.curve: list[tuple[int, float, float]] = []  # (epoch, reward mean, reward std)
        self.reward_queries = 0  # images scored so far
        self.sent_before = -1  # dashboards have all earlier steps, from a run that went further than its checkpoint
        self.needs_new_run = False
        # Pictures are drawn while training goes on.
        self._executor = ThreadPoolExecutor(1, "pictures")
        self._drawing: list[Future[None]] = []
        if accelerator.is_main_process:
            self._take_up(first_epoch, goes_another_way)

    def _take_up(self, first_epoch: int, goes_another_way: bool) -> None:
        # The last step that dashboards had when a run went further than its checkpoint before
        marker = self.run_folder / "dashboards.json"
        with contextlib.suppress(OSError, ValueError):
            self.sent_before = int(json.loads(marker.read_text())["last_step"])
        last_kept = -1
        lines = self.metrics_file.read_text().splitlines() if self.metrics_file.exists() else []
        kept = []
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # torn by a crash
                continue
            self.sent_before = max(self.sent_before, entry["step"])
            if entry["epoch"] < first_epoch:
                kept.append(line)
                last_kept = entry["step"]
                self._extend_curve(entry)
                self.reward_queries = entry.get("reward_queries", self.reward_queries)
        if goes_another_way and self.sent_before > last_kept:
            self.sent_before, self.needs_new_run = -1, True
        if self.sent_before > last_kept or marker.exists():  # before the lines that show it are gone
            self._replace(marker, json.dumps({"last_step": self.sent_before}))
        self._replace(self.metrics_file, "".join(line + "\n" for line in kept))
        for file in (self.run_folder / "images").glob("epoch_*.json"):
            if (number := file.stem.removeprefix("epoch_")).isdecimal() and int(number) >= first_epoch:
                file.unlink(missing_ok=True)

    def _replace(self, file: Path, text: str) -> None:
        aside = file.with_suffix(".writing")
        with _writing(file):
            aside.write_text(text)
            aside.replace(file)

    def _extend_curve(self, values: Mapping[str, Any]) -> None:
        if "reward_mean" in values:
            mean, std = (math.nan if values[k] is None else values[k] for k in ("reward_mean", "reward_std"))
            self.curve.append((values["epoch"], mean, std))

    def log(self, values: dict[str, Any], step: int, is_last: bool = False) -> None:
        """Log numbers and arrays; `values` must have "epoch".

        Args:
            is_last: of this step; W&B keeps a step back until it knows.

        Raises:
            RunFailure: a file cannot be written; of pictures it is said at the next call that is the last of a step.
        """
        if not self.accelerator.is_main_process:
            return
        if is_last:
            self.wait()
        if step >= self.sent_before:  # of the last one they may have only a part
            # W&B cannot draw a histogram with a NaN in it; a failed sample is one.
            finite = {k: v[np.isfinite(v)] if isinstance(v, np.ndarray) else v for k, v in values.items()}
            self.accelerator.log(finite, step=step, log_kwargs={"wandb": {"commit": True}} if is_last else {})
        line = {"step": step, **{k: _plain(v) for k, v in values.items()}}
        with _writing(self.metrics_file), self.metrics_file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._extend_curve(line)

    def wait(self) -> None:
        """Until all pictures are on disk.

        Raises:
            RunFailure: one cannot be written.
        """
        drawing, self._drawing = self._drawing, []
        for future in drawing:
            future.result()

    def log_images(
        self, images: Sequence[np.ndarray], captions: Sequence[str], epoch: int, step: int, origins: Sequence[str] = ()
    ) -> None:
        """Pictures over their captions, to the dashboards and as `images/epoch_NNN.jpg`.

        Args:
            images: uint8 (H, W, 3) each.
            origins: what else dashboards are to say of each, such as its seed.
        """
        if not images or not self.accelerator.is_main_process:
            return
        more = [f" | {origin}" for origin in origins] or [""] * len(images)
        self.send_images("images", images, [c + o for c, o in zip(captions, more, strict=True)], step)
        self.in_background(functools.partial(self._draw_grid, images, captions, epoch))

    def send_images(self, key: str, images: Sequence[np.ndarray], captions: Sequence[str], step: int) -> None:
        """Pictures to the dashboards alone."""
        if not images or not self.accelerator.is_main_process:
            return
        for tracker in self.accelerator.trackers if step >= self.sent_before else ():
            if tracker.name == "wandb":
                import wandb

                pictures = [
                    wandb.Image(image, caption=caption) for image, caption in zip(images, captions, strict=True)
                ]
                tracker.log({key: pictures}, step=step)
            elif tracker.name == "tensorboard":
                tracker.log_images({key: np.stack(images)}, step=step, dataformats="NHWC")
            elif hasattr(tracker, "log_images"):
                tracker.log_images({key: np.asarray(image_grid(images, captions))}, step=step)

    def in_background(self, call: Callable[[], None]) -> None:
        """Have something written while training goes on; on the main process alone. `wait` raises what it raised."""
        if self.accelerator.is_main_process:
            self._drawing.append(self._executor.submit(call))

    def log_extremes(
        self, best: tuple[np.ndarray, str, float], worst: tuple[np.ndarray, str, float], epoch: int
    ) -> None:
        """An epoch's best and worst picture, as files in `images` that `epoch_NNN.json` names.

        Args:
            best, worst: uint8 (H, W, 3), prompt and reward.
        """
        self.in_background(functools.partial(self._write_extremes, {"best": best, "worst": worst}, epoch))

    def _write_extremes(self, extremes: Mapping[str, tuple[np.ndarray, str, float]], epoch: int) -> None:
        target = self.run_folder / "images" / f"epoch_{epoch:03d}.json"
        document: dict[str, Any] = {"epoch": epoch}
        with _writing(target):
            target.parent.mkdir(exist_ok=True)
            for name, (image, prompt, reward) in extremes.items():
                file = target.with_name(f"{target.stem}_{name}.jpg")
                Image.fromarray(image).save(file, quality=95)
                document[name] = {"prompt": prompt, "reward": _plain(reward), "file": file.name}
            target.write_text(json.dumps(document, indent=1))

    def _draw_grid(self, images: Sequence[np.ndarray], captions: Sequence[str], epoch: int) -> None:
        target = self.run_folder / "images" / f"epoch_{epoch:03d}.jpg"
        with _writing(target):
            target.parent.mkdir(exist_ok=True)
            image_grid(images, captions).save(target, quality=90)

    def start_mean(self, epoch: int) -> float | None:
        """The first epoch's mean reward, if it is known and of an earlier epoch."""
        return self.curve[0][1] if self.curve and self.curve[0][0] < epoch else None

    def draw_curve(self) -> None:
        """Write `reward.png`: mean reward by epoch, with a band of one standard deviation."""
        if self.curve:
            self.in_background(functools.partial(self._draw_curve, list(self.curve)))

    def _draw_curve(self, curve: Sequence[tuple[int, float, float]]) -> None:
        # The object interface: pyplot would look for a display.
        from matplotlib.figure import Figure

        epochs, means, stds = (np.array(column) for column in zip(*curve, strict=True))
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(epochs, means, marker=".", label="mean")
        axes.fill_between(epochs, means - stds, means + stds, alpha=0.2, label="+- 1 standard deviation")
        axes.set(xlabel="epoch", ylabel="reward", title=self.run_folder.name)
        axes.grid(alpha=0.3)
        axes.legend()
        target = self.run_folder / "reward.png"
        with _writing(target):
            figure.savefig(target, dpi=120)


def caption(
    prompt: str, reward: float, details: Mapping[str, float], notes: Mapping[str, str], failure: str | None
) -> str:
    """What stands below a picture: the whole prompt, the reward, and what else the reward function said of it."""
    parts = [prompt, f"{reward:.2f}", *(f"{name} {value:.3g}" for name, value in details.items())]
    parts += [f"{name}: {_shortened(text)}" for name, text in notes.items() if text]
    return " | ".join(parts + ([f"failed: {_shortened(failure)}"] if failure else []))


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 120 else line[:119] + "…"


def reward_metrics(epoch: int, rewards: np.ndarray, details: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """An epoch's rewards and their statistics over the samples that were scored.

    Args:
        rewards: float64 (n,), NaN for failed samples.
        details: float64 (n,) by name: a weighted sum's components, and other numbers per image.
    """
    values: dict[str, Any] = {f"reward/{name}": numbers for name, numbers in details.items()}
    values |= {f"reward/{name}_mean": _mean(numbers) for name, numbers in details.items()}
    return values | {
        "reward": rewards,
        "epoch": epoch,
        "reward_mean": _mean(rewards),
        "reward_std": _std(rewards),
        "reward/failed_fraction": float(np.isnan(rewards).mean()),
    }


def _std(values: np.ndarray) -> float:
    """Of those that are finite; exactly 0 where all are equal, which rounding of their mean would hide."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return math.nan
    return float(np.std(finite)) if finite.min() < finite.max() else 0.0


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


def duration(seconds: float) -> str:
    """For people: "50 s", "12 min", "3.4 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def summary(
    values: Mapping[str, Any], start: float | None = None, seconds_left: float | None = None, num_epochs: int = 0
) -> str:
    """An epoch in one line, with the means of what makes up its reward.

    Args:
        start: the first epoch's mean reward, if that is an earlier one.
        seconds_left: until the end of the run.
    """
    means = [
        f"{key.removeprefix('reward/').removesuffix('_mean')} {value:.4g}"
        for key, value in values.items()
        if key.startswith("reward/") and key.endswith("_mean") and isinstance(value, float)
    ]
    parts = f" ({', '.join(means)})" if means else ""
    failed = f", {values['reward/failed_fraction']:.1%} failed" if values["reward/failed_fraction"] else ""
    skipped = f", {values['policy/skipped_steps']} updates skipped" if values["policy/skipped_steps"] else ""
    mean = round(values["reward_mean"], 12) + 0.0  # a weighted sum's mean may be 0 up to rounding
    change = f" ({mean - start:+.3g} since the start)" if start is not None else ""
    kl = f", KL {values['policy/kl_nats']:.2g} nats" if "policy/kl_nats" in values else ""
    clipped = f", {values['policy/clip_active']:.0%} clipped" if "policy/clip_active" in values else ""
    left = f", {duration(seconds_left)} left" if seconds_left else ""
    of = f"/{num_epochs - 1}" if num_epochs else ""
    spread = f"{values['reward_std']:.3g}"
    return (
        f"epoch {values['epoch']}{of}: reward {mean:.4g} +- {spread}{change}{parts}{failed}{kl}{clipped}, "
        f"logp_gap {values['policy/logp_gap']:.1e}, {values['time/epoch_s']:.1f} s{left}{skipped}"
    )


def evaluation_summary(values: Mapping[str, float]) -> str:
    """An evaluation in one line: every set's rewards, and how they changed since the start."""
    parts = []
    for key, mean in values.items():
        if not (key.startswith("eval/") and key.endswith("_mean")):
            continue
        stem = key.removesuffix("_mean")
        change, error = (values.get(f"{stem}_{name}", math.nan) for name in ("change", "change_se"))
        since = f" ({change:+.3g} +- {error:.2g})" if math.isfinite(change) and values["eval/epoch"] else ""
        parts.append(f"{stem.removeprefix('eval/')} {mean:.4g}{since}")
    return f"evaluation after {values['eval/epoch']:.0f} epochs: " + ", ".join(parts)


def image_grid(images: Sequence[np.ndarray], captions: Sequence[str], columns: int | None = None) -> Image.Image:
    """Pictures in rows, each over its caption, which is broken into as many lines as it needs.

    Args:
        images: uint8 (H, W, 3), all of one size; pictures under 128 pixels are doubled to it.
        columns: by default as many as make the grid about square.
    """
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    height, width = images[0].shape[:2]
    scale = max(1, math.ceil(128 / width))
    cell_width, picture_height = width * scale, height * scale
    # matplotlib's font, which has more of the world's letters than Pillow's own
    font_file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    font = ImageFont.truetype(str(font_file), max(10, cell_width // 16))
    wrapped = [_wrap(caption, font, cell_width - 4) for caption in captions]
    line_height = math.ceil(font.size * 1.25)
    caption_height = max(len(lines) for lines in wrapped) * line_height + 4
    grid = Image.new("RGB", (columns * cell_width, rows * (picture_height + caption_height)), "white")
    draw = ImageDraw.Draw(grid)
    for i, (image, lines) in enumerate(zip(images, wrapped, strict=True)):
        x, y = i % columns * cell_width, i // columns * (picture_height + caption_height)
        grid.paste(Image.fromarray(image).resize((cell_width, picture_height), Image.Resampling.NEAREST), (x, y))
        draw.text((x + 2, y + picture_height + 1), "\n".join(lines), fill="black", font=font, spacing=2)
    return grid


def _wrap(text: str, font: Any, width: float) -> list[str]:
    """Break a text at spaces so that each line fits; a word too long for a line is broken where it must be."""
    lines = [""]
    for word in text.split():
        candidate = f"{lines[-1]} {word}".strip()
        if font.getlength(candidate) <= width:
            lines[-1] = candidate
            continue
        if lines[-1]:
            lines.append("")
        for character in word:
            if lines[-1] and font.getlength(lines[-1] + character) > width:
                lines.append("")
            lines[-1] += character
    return lines
