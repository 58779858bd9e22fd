"""One HTML page about a run, or several side by side, from the files in their folders.

Files may be torn or missing, as a run leaves them that is killed: what is not there is not on the page. The page needs
no network, and neither this module nor the page needs torch. How the page looks is in assets/report.html.
"""

import base64
import datetime
import html
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from ddpo_pytorch.named_functions import ConfigError, without_secrets

TEMPLATE = Path(__file__).parent / "assets" / "report.html"
PICTURE_WIDTH = 256  # pixels
GRID_WIDTH = 1024  # of a grid of training samples, whose captions are to be read still
PICTURE_BYTES = 9_000_000  # of all pictures of the sliders together, in base64
NUM_EXTREMES = 4  # best samples, and worst ones, of a run
GRIDS = "training samples"

Row = dict[str, float]


# --- reading what a run left


@dataclass
class Picture:
    """One picture of a slider.

    Attributes:
        file: None if it is not there.
        scores: by reward, None where it failed.
    """

    file: Path | None
    prompt: str = ""
    seed: int | None = None
    scores: dict[str, float | None] = field(default_factory=dict)
    failure: str | None = None


@dataclass
class Frame:
    """One position of a slider: an evaluation, or an epoch's training samples."""

    label: str
    sets: dict[str, list[Picture]]


@dataclass
class Metrics:
    """A `metrics.jsonl`.

    Attributes:
        epochs: by epoch, means over its updates of all that was logged; "reward_se" and "reward_queries" are added.
        evaluations: by the number of epochs completed.
        num_unreadable: lines that are no JSON, or lack their epoch.
    """

    epochs: dict[int, Row]
    evaluations: dict[int, Row]
    num_unreadable: int = 0


@dataclass
class Run:
    """A run's folder, read.

    Attributes:
        notes: what is missing, in words.
        extremes: "best" and "worst" samples, (epoch, picture) each, the most extreme first.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: Metrics
    frames: list[Frame]
    has_evaluations: bool
    extremes: dict[str, list[tuple[int, Picture]]]
    notes: list[str]

    def option(self, key: str) -> Any:
        """The value of "section.key"; None if there is none."""
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node


def _number(value: Any) -> float | None:
    """Finite numbers alone."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def read_metrics(text: str) -> Metrics:
    """A metrics.jsonl, whole or not; of an epoch that was run twice, by a run that was resumed, the second time."""
    lines: list[dict[str, Any]] = []
    num_unreadable, last_epoch = 0, -1
    for line in filter(str.strip, text.splitlines()):
        try:
            entry = json.loads(line)
            entry["epoch"] = int(entry["epoch"])
        except (ValueError, TypeError, KeyError, OverflowError):
            num_unreadable += 1
            continue
        epoch = entry["epoch"]
        if "reward" in entry or "reward_mean" in entry:
            if epoch <= last_epoch:  # run again
                lines = [e for e in lines if e["epoch"] < epoch or e.get("eval/epoch", math.inf) <= epoch]
            last_epoch = epoch
        lines.append(entry)

    found = Metrics({}, {}, num_unreadable)
    numbers: dict[int, dict[str, list[float]]] = {}
    for entry in lines:
        if (after := _number(entry.get("eval/epoch"))) is not None:
            found.evaluations[int(after)] = {k: v for k, v in entry.items() if _number(v) is not None}
            continue
        of_epoch = numbers.setdefault(entry["epoch"], {})
        for key, value in entry.items():
            if _number(value) is not None:
                of_epoch.setdefault(key, []).append(value)
        if isinstance(entry.get("reward"), list):
            of_epoch |= _of_rewards(entry["reward"])
    queries = 0.0
    for epoch in sorted(numbers):
        row = {key: _mean(values) for key, values in numbers[epoch].items()}
        queries = row.get("reward_queries", queries + row.get("num_samples", 0))
        found.epochs[epoch] = row | {"reward_queries": queries}
    for after, row in found.evaluations.items():
        before = [found.epochs[epoch]["reward_queries"] for epoch in found.epochs if epoch < after]
        row.setdefault("reward_queries", max(before, default=0))
    found.evaluations = dict(sorted(found.evaluations.items()))
    return found


def _of_rewards(rewards: Sequence[Any]) -> dict[str, list[float]]:
    """What an epoch's rewards say beside what is logged of them."""
    values = [value for value in rewards if _number(value) is not None]
    statistics = {"num_samples": [float(len(rewards))]}
    if len(values) > 1:
        mean = _mean(values)
        variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
        statistics["reward_se"] = [math.sqrt(variance / len(values))]
    return statistics


def _read_json(file: Path) -> dict[str, Any]:
    """An object; empty if there is none that can be read."""
    try:
        document = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbered(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """Files such as epoch_012.jpg by their number, which is what follows the last "_"."""
    files = [(file.stem.rpartition("_")[2], file) for file in folder.glob(pattern)]
    return sorted((int(number), file) for number, file in files if number.isdecimal())


def _inside(folder: Path, name: Any) -> Path | None:
    """A file of a folder by the name in a document, unless that leads elsewhere."""
    file = folder / str(name)
    return file if file.is_file() and file.resolve().is_relative_to(folder.resolve()) else None


def _read_evaluation(file: Path, epochs: int) -> Frame:
    sets = {}
    for set_name, entry in _dict(_read_json(file).get("sets")).items():
        listed = _dict(entry).get("pictures")
        pictures = [
            Picture(
                file=_inside(file.parent, picture.get("file")),
                prompt=str(picture.get("prompt")),
                seed=picture.get("seed") if isinstance(picture.get("seed"), int) else None,
                scores={str(label): _number(score) for label, score in _dict(picture.get("scores")).items()},
                failure=str(picture["failure"]) if picture.get("failure") else None,
            )
            for picture in (listed if isinstance(listed, list) else [])
            if isinstance(picture, dict)
        ]
        if pictures:
            sets[str(set_name)] = pictures
    return Frame(f"after {epochs} epoch{'s' if epochs != 1 else ''}" if epochs else "before training", sets)


def _read_extremes(folder: Path) -> dict[str, list[tuple[int, Picture]]]:
    found: dict[str, list[tuple[int, Picture]]] = {"best": [], "worst": []}
    for epoch, file in _numbered(folder, "epoch_*.json"):
        document = _read_json(file)
        for name, samples in found.items():
            sample = _dict(document.get(name))
            if (reward := _number(sample.get("reward"))) is not None:
                picture = _inside(folder, sample.get("file"))
                samples.append((epoch, Picture(picture, str(sample.get("prompt")), scores={"reward": reward})))
    for name, samples in found.items():
        samples.sort(key=lambda sample: sample[1].scores["reward"] or 0.0, reverse=name == "best")
        del samples[NUM_EXTREMES:]
    return found


def check_folder(folder: Path) -> None:
    """Raises ConfigError if this is no run's folder; the message says what would be one."""
    if not folder.is_dir():
        raise ConfigError(f'there is no folder "{folder}" here ({Path.cwd()}); give a run\'s, such as logs/RUN')
    if not any((folder / name).is_file() for name in ("config.json", "metrics.jsonl")):
        runs = sorted(file.parent.name for file in folder.glob("*/config.json"))
        hint = f"; runs in it: {', '.join(runs)}" if runs else "; give one that scripts/train.py made, such as logs/RUN"
        raise ConfigError(f'"{folder}" is no run\'s folder: it has neither config.json nor metrics.jsonl{hint}')


def read_run(folder: Path) -> Run:
    """All that a run has left in its folder so far.

    Raises:
        ConfigError: this is no run's folder.
    """
    check_folder(folder)
    notes = []
    document = _read_json(folder / "config.json")
    if not document:
        notes.append("config.json is missing or torn, so options and versions are not known")
    try:
        metrics = read_metrics((folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        metrics = Metrics({}, {})
    if metrics.num_unreadable:
        plural = metrics.num_unreadable > 1
        notes.append(f"{metrics.num_unreadable} line{'s' * plural} of metrics.jsonl cannot be read, torn by a crash")
    if not any("reward_mean" in row for row in metrics.epochs.values()):
        notes.append("no epoch has its rewards yet")
    elif "time/epoch_s" not in metrics.epochs[max(metrics.epochs)]:
        notes.append(f"epoch {max(metrics.epochs)} is not complete")

    frames = [_read_evaluation(file, after) for after, file in _numbered(folder / "eval", "after_*.json")]
    frames = [frame for frame in frames if frame.sets]
    has_evaluations = bool(frames)
    if not has_evaluations:
        grids = _numbered(folder / "images", "epoch_*.jpg")
        frames = [Frame(f"epoch {epoch}", {GRIDS: [Picture(file)]}) for epoch, file in grids]
        shown = ", so the training samples' grids are shown instead" if grids else ", and no pictures"
        notes.append(f"there are no evaluations (config.eval.every){shown}")
    return Run(
        name=folder.resolve().name,
        folder=folder,
        config=without_secrets(_dict(document.get("config"))),
        environment={key: value for key, value in document.items() if key != "config"},
        metrics=metrics,
        frames=frames,
        has_evaluations=has_evaluations,
        extremes=_read_extremes(folder / "images"),
        notes=notes,
    )


# --- numbers for people


def _with_error(value: float, error: float | None, sign: str = "") -> str:
    """A number with as many places as its error makes sense of."""
    if not error or math.isnan(error):
        return f"{value:{sign}.4g}"
    places = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:{sign}.{places}f} ± {error:.{places}f}" if places < 8 else f"{value:{sign}.4g} ± {error:.2g}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def facts(run: Run) -> list[tuple[str, str, str]]:
    """What to know of a run first: (name, value, details)."""
    found = []
    epochs, rewarded = run.metrics.epochs, [row for row in run.metrics.epochs.values() if "reward_mean" in row]
    if rewarded:
        first, last = rewarded[0], rewarded[-1]
        ends = [first, last] if len(rewarded) > 1 else [first]
        shown = [_with_error(row["reward_mean"], row.get("reward_se")).partition(" ± ") for row in ends]
        errors = "".join(f"± {error} " for *_, error in shown if error)
        where = "first and last epoch" if len(ends) > 1 else "the only epoch"
        found.append(("Reward", " → ".join(value for value, *_ in shown), f"{errors}(standard error), {where}"))
        if len(ends) > 1:
            change = last["reward_mean"] - first["reward_mean"]
            error = math.hypot(first.get("reward_se", math.nan), last.get("reward_se", math.nan))
            ratio = f"{change / error:+.1f} standard errors" if error > 0 else "standard error not known"
            found.append(("Change", _with_error(change, error, "+").partition(" ± ")[0], ratio))
    completed = sum("time/epoch_s" in row for row in epochs.values())
    planned = run.option("num_epochs")
    note = "" if not planned or completed >= planned else "so far, or ended before"
    found.append(("Epochs", f"{completed} of {planned}" if planned else f"{completed}", note))
    if rewarded:
        queries = rewarded[-1]["reward_queries"]
        found.append(("Reward queries", f"{queries:,.0f}", f"{queries / len(rewarded):.4g} images an epoch"))
    if completed:
        seconds = [row["time/epoch_s"] for row in epochs.values() if "time/epoch_s" in row]
        start = run.metrics.evaluations.get(0, {}).get("time/eval_s", 0.0)  # the others are within epochs
        found.append(("Time", _duration(sum(seconds) + start), f"{_duration(_mean(seconds))} an epoch"))
    if model := run.option("pretrained.model"):
        rank = f"LoRA of rank {run.option('lora.rank')}" if run.option("use_lora") else "whole UNet"
        found.append(("Model", Path(model).name if Path(model).is_absolute() else str(model), rank))
    if reward_fn := run.option("reward_fn"):
        found.append(("Reward function", str(reward_fn), f"prompts: {run.option('prompt_fn')}"))
    return found


def _labels(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Prompt sets by what they were scored with, in the order of first sight."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for row in run.metrics.evaluations.values():
            for key in row:
                # A set's name may have a slash no more than a folder may.
                if match := re.fullmatch(r"eval/([^/]+)/(.+)_mean", key):
                    sets = found.setdefault(match[2], [])
                    sets += [match[1]] if match[1] not in sets else []
    return found


def evaluation_rows(run: Run) -> list[list[str]]:
    """For each prompt set and reward: the paired change, before training, at the end; then of diversity."""
    evaluations = run.metrics.evaluations
    if not evaluations:
        return []
    start, end = evaluations.get(0, {}), evaluations[max(evaluations)]

    def shown(row: Row, key: str, sign: str = "", error: str = "") -> str:
        return _with_error(row[key], row.get(error), sign) if key in row else "–"

    rows = []
    for label, sets in _labels([run]).items():
        for name in sets:
            stem = f"eval/{name}/{label}"
            means = [shown(row, f"{stem}_mean", error=f"{stem}_se") for row in (start, end)]
            change = shown(end, f"{stem}_change", "+", f"{stem}_change_se") if max(evaluations) else "–"
            rows.append([name, label, change, *means])
    for key in [key for key in end if re.fullmatch(r"eval/[^/]+/diversity", key)]:
        change = f"{end[key] - start[key]:+.2g}" if key in start and max(evaluations) else "–"
        ends = [f"{row[key]:.3g}" if key in row else "–" for row in (start, end)]
        rows.append([key.split("/")[1], "diversity", change, *ends])
    return rows


# --- curves


def _line(run: int, name: str, number: int, rows: Mapping[int, Row], key: str, band: str = "") -> dict[str, Any]:
    """A curve for the page, which draws those of one `number` in one style, and those of one `run` in one colour.

    Args:
        rows: by epoch, or by the number of epochs completed.
        band: key of what is above and below it.
    """
    return {
        "run": run,
        "name": name,
        "number": number,
        "epoch": list(rows),
        "queries": [row["reward_queries"] for row in rows.values()],
        "y": [row.get(key) for row in rows.values()],
        "band": [row.get(band) for row in rows.values()] if band else [],
    }


def charts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Curves in groups, for the page; one that has no number in any run is left out."""
    of_training = [(i, run.metrics.epochs) for i, run in enumerate(runs)]
    of_evaluations = [(i, run.metrics.evaluations) for i, run in enumerate(runs)]
    components = sorted(
        {
            key.removeprefix("reward/").removesuffix("_mean")
            for _, rows in of_training
            for row in rows.values()
            for key in row
            if key.startswith("reward/") and key.endswith("_mean")
        }
    )

    def lines(keys: Mapping[str, str], band: str = "", source: Sequence = of_training) -> list[dict[str, Any]]:
        return [_line(i, name, n, rows, key, band) for i, rows in source for n, (key, name) in enumerate(keys.items())]

    def chart(title: str, note: str, drawn: list[dict[str, Any]], **more: Any) -> Iterator[dict[str, Any]]:
        drawn = [line for line in drawn if any(y is not None for y in line["y"])]
        if drawn:
            yield {
                "title": title,
                "note": note,
                "lines": drawn,
                "marks": {},
                "from_zero": True,
                "stacked": False,
                **more,
            }

    def marks(key: str) -> dict[str, float]:
        """Values of an option, to be drawn as horizontal lines."""
        values = {_number(run.option(key)) for run in runs}
        return {f"{key} {value:g}": value for value in values if value}

    rewards = [
        *chart(
            "Reward",
            "Mean of an epoch's training samples, with a band of one standard deviation over samples; a bad sign is a "
            "flat curve, or a rise that the evaluations of unseen prompts do not share.",
            lines({"reward_mean": "mean"}, band="reward_std"),
            from_zero=False,
        )
    ]
    for name in components:
        rewards += chart(
            f"Reward: {name}",
            "Mean of what the reward function says beside the reward, or of a component of it; a bad sign is one "
            "component that rises at another's cost.",
            lines({f"reward/{name}_mean": "mean"}),
            from_zero=False,
        )
    rewards += chart(
        "Spread of rewards",
        "Standard deviation within a prompt's samples, from which the policy learns, and between prompts' means; a bad "
        "sign is a spread within prompts near 0: all pictures of a prompt earn the same, the policy has collapsed.",
        lines({"reward/std_within_prompts": "within prompts", "reward/std_between_prompts": "between prompts"}),
    )
    if any(row.get("reward/failed_fraction") for _, rows in of_training for row in rows.values()):
        rewards += chart(
            "Failed rewards",
            "Share of samples that could not be scored; a bad sign is any rise: what fails is not learned from.",
            lines({"reward/failed_fraction": "failed"}),
        )

    evaluations: list[dict[str, Any]] = []
    for label, sets in _labels(runs).items():
        is_trained = label == "reward" or label in components
        drawn = [
            _line(i, name, n, rows, f"eval/{name}/{label}_mean", f"eval/{name}/{label}_se")
            for i, rows in of_evaluations
            for n, name in enumerate(sets)
        ]
        bad_sign = (
            "prompts that training never sees falling, or still while those of training rise: over-optimisation."
            if is_trained
            else "a fall while the trained reward rises: that one is being fooled."
        )
        evaluations += chart(
            f"Evaluation: {label}",
            "Mean over the same prompts and seeds each time, by prompt set, with a band of one standard error; a bad "
            f"sign is {bad_sign}",
            drawn,
            from_zero=False,
        )
    set_names = list(dict.fromkeys(name for sets in _labels(runs).values() for name in sets))
    evaluations += chart(
        "Diversity",
        "Mean distance of two pictures of one prompt, root mean square over pixels from 0 to 1; a bad sign is a steep "
        "fall: the policy draws one picture again and again.",
        lines({f"eval/{name}/diversity": name for name in set_names}, source=of_evaluations),
    )

    policy = [
        *chart(
            "KL per step (nats)",
            "Distance of the policy from the one that sampled, mean over an epoch's updates; a bad sign is growth "
            "while evaluations of unseen prompts fall: over-optimisation.",
            lines({"policy/kl_nats": "KL"}),
        ),
        *chart(
            "Clip share",
            "Share of samples outside clip_range (clipfrac), and of those whose gradient that removes (active); a bad "
            "sign is active near 0 in all updates, steps too small to matter, or above 0.5, too large.",
            lines({"policy/clip_active": "active", "clipfrac": "clipfrac"}),
        ),
        *chart(
            "Gradient norm",
            "Norm before it is scaled down to train.max_grad_norm, mean over an epoch's updates; a bad sign is a curve "
            "above that limit all the time, whose step sizes the limit decides, or sudden peaks.",
            lines({"grad_norm": "gradient norm"}),
            marks=marks("train.max_grad_norm"),
        ),
        *chart(
            "Loss",
            "PPO's clipped surrogate, mean over an epoch's updates; it need not fall; a bad sign is a peak far from 0.",
            lines({"loss": "loss"}),
            from_zero=False,
        ),
        *chart(
            "Gap of log-probabilities",
            "Largest difference between sampling and training for one policy, which is rounding alone, in nats per "
            "dimension; a bad sign is a gap near train.clip_range: then ratios are noise.",
            lines({"policy/logp_gap": "gap"}),
            marks=marks("train.clip_range"),
        ),
    ]

    phases = {"time/sample_s": "sampling", "time/reward_s": "rewards", "time/train_s": "training"}
    if len(runs) == 1:
        rest = {
            epoch: row | {"rest": max(0.0, row["time/epoch_s"] - sum(row.get(key, 0.0) for key in phases))}
            for epoch, row in runs[0].metrics.epochs.items()
            if "time/epoch_s" in row
        }
        machine = chart(
            "Seconds per epoch",
            "What an epoch's seconds were spent on: rewards are what sampling did not hide of them, the rest is "
            "evaluations and files; a bad sign is a phase that grows, or rewards as long as sampling.",
            [_line(0, name, n, rest, key) for n, (key, name) in enumerate({**phases, "rest": "rest"}.items())],
            stacked=True,
        )
    else:
        timed = {"time/epoch_s": "all", **phases}
        machine = itertools.chain.from_iterable(
            chart(
                f"Seconds per epoch: {name}",
                f"Seconds of an epoch, {name} of it; a bad sign is a curve that rises.",
                lines({key: name}),
            )
            for key, name in timed.items()
        )
    titled = {"Reward": rewards, "Evaluations": evaluations, "Policy": policy, "Time": list(machine)}
    return [{"title": title, "charts": group} for title, group in titled.items() if group]


# --- options


def _flatten(nest: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in nest.items():
        inside = isinstance(value, Mapping) and value
        flat |= _flatten(value, f"{prefix}{key}.") if inside else {f"{prefix}{key}": value}
    return flat


def option_rows(configs: Sequence[Mapping[str, Any]], base: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Options of runs beside those of a base config, as JSON text; None where a config has no such option."""

    def as_text(nest: Mapping[str, Any]) -> dict[str, str]:
        # Through JSON, as config.json has been: a tuple is a list there. 3.0 and 3 are one number.
        plain = json.loads(json.dumps(nest, default=str))
        flat = {key: int(v) if isinstance(v, float) and v.is_integer() else v for key, v in _flatten(plain).items()}
        return {key: json.dumps(value, ensure_ascii=False) for key, value in flat.items()}

    own, theirs = [as_text(config) for config in configs], as_text(base or {})
    keys = dict.fromkeys(key for flat in (theirs, *own) for key in flat)
    sections = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    # What is a dictionary's entry here may be an empty dictionary there.
    keys_shown = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    rows = []
    for key in sorted(keys_shown, key=lambda key: sections.index(key.partition(".")[0])):
        values = [flat.get(key) for flat in own]
        rows.append(
            {
                "key": key,
                "base": theirs.get(key),
                "values": values,
                "differs": [base is not None and value != theirs.get(key) for value in values],
                "varies": len(set(values)) > 1,
            }
        )
    return rows


# --- pictures


def _shrunk(file: Path, width: int) -> str | None:
    try:
        with Image.open(file) as image:
            if image.format == "JPEG" and image.width <= width:
                image.load()  # raises if it is torn
                data = file.read_bytes()
            else:
                image.draft("RGB", (width, width))  # decodes at half the size or less, where that is enough
                shrunk = image.convert("RGB")
                shrunk.thumbnail((width, 100 * width))
                buffer = io.BytesIO()
                shrunk.save(buffer, format="JPEG", quality=85)
                data = buffer.getvalue()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


class PictureCache:
    """Pictures as they stand in pages. The last page's are kept, since a run writes its page after every epoch."""

    def __init__(self) -> None:
        self._of_page: dict[tuple[Path, int, int], str | None] = {}
        self._of_last_page: dict[tuple[Path, int, int], str | None] = {}

    def start_page(self) -> None:
        self._of_last_page, self._of_page = self._of_page, {}

    def data_uri(self, file: Path | None, width: int = PICTURE_WIDTH) -> str | None:
        """A picture as an address that holds it, at most so many pixels wide; None if it cannot be read."""
        if file is None:
            return None
        try:
            key = (file, file.stat().st_mtime_ns, width)
        except OSError:
            return None
        if key not in self._of_page:
            kept = self._of_last_page
            self._of_page[key] = kept[key] if key in kept else _shrunk(file, width)
        return self._of_page[key]


_pictures = PictureCache()


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Some of the items, the first and the last among them."""
    if count >= len(items):
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def fitting_frames(
    frames: Sequence[Frame], budget: float, size_of: Callable[[Picture], int]
) -> tuple[list[Frame], str | None]:
    """As many frames as fit, evenly spread; of two that are too large still, the first pictures of each set.

    Args:
        budget: bytes.
        size_of: bytes of a picture on the page; asked for few more than are taken.

    Returns:
        The frames, and what was left out, in words.
    """

    def size(kept: Iterable[Frame]) -> int:
        return sum(size_of(picture) for frame in kept for pictures in frame.sets.values() for picture in pictures)

    if not frames:
        return [], None
    ends = evenly(frames, 2)
    guess = budget / max(1.0, size(ends) / len(ends))
    kept = evenly(frames, max(2, int(guess * 1.2)))
    while len(kept) > 2 and (total := size(kept)) > budget:
        kept = evenly(frames, max(2, min(len(kept) - 1, int(len(kept) * budget / total))))
    reason = f"{len(kept)} of {len(frames)} are shown, evenly spread," if len(kept) < len(frames) else ""
    if (total := size(kept)) > budget:
        share = budget / total
        few = [{name: p[: max(1, int(len(p) * share))] for name, p in frame.sets.items()} for frame in kept]
        kept = [Frame(frame.label, sets) for frame, sets in zip(kept, few, strict=True)]
        reason += f"{' and' if reason else ''} only the first pictures of each set,"
    return kept, f"{reason} to keep this page small; all are in the run's folder" if reason else None


def _picture_for_page(picture: Picture, width: int = PICTURE_WIDTH) -> dict[str, Any]:
    return {
        "src": _pictures.data_uri(picture.file, width),
        "prompt": picture.prompt,
        "seed": picture.seed,
        "scores": picture.scores,
        "failure": picture.failure,
    }


def _sliders(run: Run, budget: float) -> tuple[list[dict[str, Any]], str | None]:
    width = PICTURE_WIDTH if run.has_evaluations else GRID_WIDTH
    kept, left_out = fitting_frames(
        run.frames, budget, lambda picture: len(_pictures.data_uri(picture.file, width) or "")
    )
    names = dict.fromkeys(name for frame in kept for name in frame.sets)
    sliders = []
    for name in names:
        frames = [
            {"label": frame.label, "pictures": [_picture_for_page(picture, width) for picture in frame.sets[name]]}
            for frame in kept
            if name in frame.sets
        ]
        sliders.append({"name": name, "frames": frames, "is_grid": not run.has_evaluations})
    return sliders, left_out


# --- the page


def _short_names(runs: Sequence[Run]) -> None:
    """Give runs whose folders have one name their parents' too."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = "/".join(run.folder.resolve().parts[-2:])


def page_data(runs: Sequence[Run], base_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """All that the page shows, for JSON."""
    described = []
    for run in runs:
        sliders, left_out = _sliders(run, PICTURE_BYTES / len(runs))
        described.append(
            {
                "name": run.name,
                "folder": str(run.folder),
                "notes": run.notes,
                "facts": facts(run),
                "evaluation": evaluation_rows(run),
                "sliders": sliders,
                "left_out": left_out,
                "extremes": {
                    name: [_picture_for_page(picture) | {"epoch": epoch} for epoch, picture in samples]
                    for name, samples in run.extremes.items()
                },
            }
        )
    has_options = any(run.config for run in runs)
    return {
        "written": datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        "runs": described,
        "groups": charts(runs),
        "has_base": base_config is not None,
        "options": option_rows([run.config for run in runs], base_config) if has_options else [],
        "environment": option_rows([run.environment for run in runs], None),
    }


def render(data: Mapping[str, Any], title: str) -> str:
    """The page; whatever texts of prompts, names and options hold, it is shown, and never run."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Within <script> an HTML parser looks for "</script" and "<!--"; the others are for parsers of old.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    parts = {"__TITLE__": html.escape(title), "__DATA__": text}
    return re.sub("__TITLE__|__DATA__", lambda match: parts[match[0]], TEMPLATE.read_text(encoding="utf-8"))


def write_report(run_folders: Sequence[Path], output: Path, base_config: Mapping[str, Any] | None) -> Path:
    """Write the page about these runs, in the place of an earlier one.

    Args:
        run_folders: one at least; none has to be complete.
        base_config: nested options that those of the runs are compared with; None: they are only listed.

    Returns:
        The file.

    Raises:
        ConfigError: a folder is no run's, or the page cannot be written there.
    """
    runs = [read_run(Path(folder)) for folder in run_folders]
    _pictures.start_page()
    _short_names(runs)
    page = render(page_data(runs, base_config), ", ".join(run.name for run in runs))
    output = Path(output)
    if output.is_dir():
        raise ConfigError(f'the report must be a file, such as "{output / "report.html"}"; "{output}" is a folder')
    aside = output.with_name(output.name + ".writing")
    try:
        aside.write_text(page, encoding="utf-8", errors="replace")  # a torn letter of a prompt is a "?"
        aside.replace(output)
    except OSError as error:
        raise ConfigError(f'cannot write the report "{output}": {error}') from error
    return output
