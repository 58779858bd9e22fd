"""What a model draws for the same prompts and the same noise, before, while and after it is trained, and what it earns.

Nothing here touches a training run: pictures have generators of their own, no statistic is kept, and random state is
set anew at the start of every epoch. Knows nothing of configs.
"""

import dataclasses
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from scipy.special import stdtrit

from ddpo_pytorch.diffusers_patch.pipeline_with_logprob import decode_latents, denoise_with_logprob
from ddpo_pytorch.exits import RunFailure
from ddpo_pytorch.images import to_uint8
from ddpo_pytorch.policy import Policy
from ddpo_pytorch.prompts import PromptSet
from ddpo_pytorch.scoring import RewardWorkers

TRAINED = "reward"  # the trained reward's label


@dataclass
class Picture:
    """One picture of an evaluation.

    Attributes:
        image: uint8 (H, W, 3).
        scores: by reward, NaN where it failed.
        failure: why a reward failed; None if none did.
    """

    set_name: str
    prompt: str
    seed: int
    image: np.ndarray
    scores: dict[str, float]
    failure: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What two pictures of one noise have in common."""
        return self.prompt, self.seed


@torch.no_grad()
def draw(
    model: Policy,
    prompts: Sequence[str],
    seeds: Sequence[int],
    on_step: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """A picture for each prompt and seed, as the policy samples: float32 (B, 3, H, W) in [0, 1], on the CPU.

    Every picture has a generator of its own, on the CPU: what it shows depends neither on the others in its batch, but
    for rounding, nor on the kind of device.

    Args:
        seeds: as many as prompts.
        on_step: called after every denoising step.
    """
    embeds = torch.stack(model.embed(prompts)[0])
    config = model.pipeline.unet.config
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    shape = (len(prompts), config.in_channels, config.sample_size, config.sample_size)
    latents = randn_tensor(shape, generator=generators, device=embeds.device, dtype=torch.float32)
    all_latents, _ = denoise_with_logprob(
        # Not a compiled one, which other batch shapes would have compiled anew, for training too.
        getattr(model.unet, "_orig_mod", model.unet),
        model.scheduler,
        latents * model.scheduler.init_noise_sigma,
        embeds,
        model.negative_prompt_embeds,
        model.guidance_scale,
        model.eta,
        generators,
        lambda *_: on_step(),
        cfg_passes=model.cfg_passes,
    )
    return (decode_latents(model.pipeline.vae, all_latents[-1]) / 2 + 0.5).clamp(0, 1).cpu()


def draw_and_score(
    model: Policy,
    sets: Sequence[PromptSet],
    seeds: Sequence[int],
    batch_size: int,
    workers: Mapping[str, RewardWorkers],
    share: tuple[int, int] = (0, 1),
    on_step: Callable[[], None] = lambda: None,
    on_wait: Callable[[], None] = lambda: None,
) -> list[tuple[int, Picture]]:
    """Draw and score every prompt with every seed.

    Args:
        seeds: the same for every prompt.
        share: (i, n), to do only every nth picture, from the ith on.
        workers: by reward. What one returns beside its rewards is left out, but for a weighted sum's components, which
            stand in its place: its scales move while it is trained.
        on_step: called after every denoising step.
        on_wait: called a few times a second while rewards are waited for.

    Returns:
        Pictures and their numbers, which go set by set, prompt by prompt, seed by seed.

    Raises:
        RunFailure: a reward function raised, or took too long.
    """
    wanted = [
        (prompt_set.name, prompt, metadata, seed)
        for prompt_set in sets
        for prompt, metadata in zip(prompt_set.prompts, prompt_set.metadata, strict=True)
        for seed in seeds
    ]
    mine = list(range(len(wanted)))[share[0] :: share[1]]
    images: list[np.ndarray] = []
    model.forget_prompts()
    for start in range(0, len(mine), batch_size):
        batch = [wanted[i] for i in mine[start : start + batch_size]]
        _, prompts, metadata, batch_seeds = map(list, zip(*batch, strict=True))
        drawn = draw(model, prompts, batch_seeds, on_step)
        for worker in workers.values():
            worker.submit(drawn, prompts, metadata)
        images += list(to_uint8(drawn.nan_to_num()))
    model.forget_prompts()
    scores: dict[str, np.ndarray] = {}
    failures: list[str | None] = [None] * len(mine)
    for label, worker in workers.items():
        if not mine:
            break
        result = worker.collect(on_batch=lambda: None, on_wait=on_wait)
        components = [part.label for part in getattr(worker.reward_fn, "components", ())]
        scores |= {part: result.details[part] for part in components} or {label: result.rewards}
        failures = [known or new for known, new in zip(failures, result.failures, strict=True)]
    return [
        (
            i,
            Picture(
                set_name=wanted[i][0],
                prompt=wanted[i][1],
                seed=wanted[i][3],
                image=images[n],
                scores={label: float(values[n]) for label, values in scores.items()},
                failure=failures[n],
            ),
        )
        for n, i in enumerate(mine)
    ]


def gather_pictures(own: Sequence[tuple[int, Picture]]) -> list[Picture]:
    """Every process's share of `draw_and_score`, on every process, by number; every process must call it."""
    return [picture for _, picture in sorted(gather_object(list(own)), key=lambda entry: entry[0])]


# --- statistics


@dataclass(frozen=True)
class Estimate:
    """A mean and how sure it is.

    Attributes:
        standard_error: of the mean; NaN with fewer than two numbers.
        interval: of 95 % confidence, by Student's t.
    """

    mean: float
    standard_error: float
    interval: tuple[float, float]
    count: int


def estimate(values: Iterable[float]) -> Estimate:
    """Of the numbers that are finite, taken as independent."""
    numbers = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
    if not numbers.size:
        return Estimate(math.nan, math.nan, (math.nan, math.nan), 0)
    mean = float(numbers.mean())
    if numbers.size == 1:
        return Estimate(mean, math.nan, (math.nan, math.nan), 1)
    error = float(numbers.std(ddof=1) / math.sqrt(numbers.size))
    half = float(stdtrit(numbers.size - 1, 0.975)) * error
    return Estimate(mean, error, (mean - half, mean + half), int(numbers.size))


Scored = Mapping[tuple[str, int], float]


def paired_differences(after: Scored, before: Scored) -> list[float]:
    """after - before for each (prompt, seed) that both have."""
    return [value - before[key] for key, value in after.items() if key in before]


def by_prompt(after: Scored, before: Scored) -> list[float]:
    """The mean difference of each prompt: what to take as independent where the question is about other prompts."""
    prompts = sorted({prompt for prompt, _ in after})
    parts = (paired_differences({k: v for k, v in after.items() if k[0] == prompt}, before) for prompt in prompts)
    return [estimate(part).mean for part in parts]


def diversity(pictures: Iterable[Picture]) -> float:
    """Mean distance between two pictures of one prompt: root mean square over pixels and channels in [0, 1].

    Averaged over pairs, then over prompts; NaN without a pair. 0 is one picture again and again.
    """
    by_prompt: dict[str, list[np.ndarray]] = {}
    for picture in pictures:
        by_prompt.setdefault(picture.prompt, []).append(picture.image.astype(np.float32) / 255)
    means = [
        np.mean([np.sqrt(np.mean((a - b) ** 2)) for a, b in itertools.combinations(images, 2)])
        for images in by_prompt.values()
        if len(images) > 1
    ]
    return float(np.mean(means)) if means else math.nan


def scores_of(pictures: Iterable[Picture], set_name: str, label: str) -> dict[tuple[str, int], float]:
    """By (prompt, seed), those of a set."""
    return {p.key: p.scores[label] for p in pictures if p.set_name == set_name and label in p.scores}


# --- what an evaluation leaves in the run's folder, and what training learns from it


class Evaluations:
    """A run's folder `eval`, on the main process: `after_NNN.json`, N epochs completed, and pictures beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _file(self, epochs: int) -> Path:
        return self.folder / f"after_{epochs:03d}.json"

    def forget_later(self, epochs: int) -> None:
        """Remove evaluations of later epochs than the one that a run is resumed from."""
        for file in self.folder.glob("after_*.json"):
            if (number := file.stem.removeprefix("after_")).isdecimal() and int(number) > epochs:
                file.unlink(missing_ok=True)
                shutil.rmtree(file.with_suffix(""), ignore_errors=True)

    def write(self, epochs: int, pictures: Sequence[Picture]) -> None:
        """Write an evaluation; its JSON file last, so that what it names is there.

        Raises:
            RunFailure: it cannot be written.
        """
        target = self._file(epochs)
        sets: dict[str, dict[str, Any]] = {}
        try:
            target.with_suffix("").mkdir(parents=True, exist_ok=True)
            for set_name in dict.fromkeys(p.set_name for p in pictures):
                own = [p for p in pictures if p.set_name == set_name]
                entries = []
                for n, picture in enumerate(own):
                    name = f"{target.stem}/{set_name}_{n:03d}.jpg"
                    Image.fromarray(picture.image).save(self.folder / name, quality=95)
                    entries.append(described(picture) | {"file": name})
                sets[set_name] = {"diversity": _finite(diversity(own)), "pictures": entries}
            aside = target.with_suffix(".writing")
            aside.write_text(json.dumps({"epochs": epochs, "sets": sets}, indent=1))
            aside.replace(target)
        except OSError as error:
            raise RunFailure(f"cannot write the evaluation {target}: {error}") from None

    def read_scores(self, epochs: int) -> dict[tuple[str, str], dict[tuple[str, int], float]]:
        """An earlier evaluation's scores, by (set, reward) and (prompt, seed); empty if there is none."""
        found: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
        try:
            document = json.loads(self._file(epochs).read_text())
            for set_name, entry in document["sets"].items():
                for picture in entry["pictures"]:
                    for label, score in picture["scores"].items():
                        key = (picture["prompt"], picture["seed"])
                        found.setdefault((set_name, label), {})[key] = math.nan if score is None else score
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        return found


def described(picture: Picture) -> dict[str, Any]:
    """A picture less its pixels, as JSON has it."""
    return {
        "prompt": picture.prompt,
        "seed": picture.seed,
        "scores": {label: _finite(score) for label, score in picture.scores.items()},
        "failure": picture.failure,
    }


def caption(picture: Picture) -> str:
    """What stands below a picture: prompt, seed, and its scores."""
    scores = [f"{label} {score:.3g}" for label, score in picture.scores.items()]
    return " | ".join([picture.prompt, f"seed {picture.seed}", *scores])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def eval_metrics(epochs: int, pictures: Sequence[Picture], base: Mapping[tuple[str, str], Scored]) -> dict[str, float]:
    """An evaluation in numbers: mean and standard error by set and reward, and the paired difference to the start.

    Args:
        epochs: completed so far.
        base: the scores before training, as `Evaluations.read_scores` has them; empty if there are none.
    """
    values: dict[str, float] = {"eval/epoch": epochs}
    for set_name in dict.fromkeys(p.set_name for p in pictures):
        own = [p for p in pictures if p.set_name == set_name]
        for label in own[0].scores:
            scores = scores_of(own, set_name, label)
            now = estimate(scores.values())
            values[f"eval/{set_name}/{label}_mean"] = now.mean
            values[f"eval/{set_name}/{label}_se"] = now.standard_error
            if (set_name, label) in base:
                change = estimate(paired_differences(scores, base[set_name, label]))
                values[f"eval/{set_name}/{label}_change"] = change.mean
                values[f"eval/{set_name}/{label}_change_se"] = change.standard_error
        values[f"eval/{set_name}/diversity"] = diversity(own)
    return values


@dataclass
class Progress:
    """What evaluations have shown so far; kept in checkpoints.

    Attributes:
        best, best_epochs: of the metric that `save_best` names.
        stop_best_epochs: when the metric that `early_stop` names was at its best.
        worse: evaluations in a row in which it was clearly worse than then.
    """

    best: float | None = None
    best_epochs: int | None = None
    stop_best: float | None = None
    stop_best_epochs: int | None = None
    worse: int = 0
    stopped: bool = False

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state; what it does not have stays."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, state.get(field.name, getattr(self, field.name)))


def measured(metric: str) -> tuple[str, str]:
    """The prompt set and the reward that a metric "eval/SET/LABEL_mean" is of, with or without "-" before it."""
    set_name, _, label = metric.removeprefix("-").removeprefix("eval/").rpartition("_")[0].partition("/")
    return set_name, label


def _signed(metric: str) -> tuple[str, float]:
    """The metric's name and the sign under which more is better: "-NAME" is one of which less is."""
    return metric.removeprefix("-"), -1.0 if metric.startswith("-") else 1.0


def is_best(progress: Progress, values: Mapping[str, float], metric: str) -> bool:
    """Whether a metric is better than at any evaluation before; notes it in `progress`.

    Args:
        metric: "NAME" or "-NAME".
    """
    name, sign = _signed(metric)
    value = values.get(name, math.nan)
    if not math.isfinite(value) or (progress.best is not None and sign * value <= sign * progress.best):
        return False
    progress.best, progress.best_epochs = value, int(values["eval/epoch"])
    return True


def has_dropped(
    progress: Progress,
    pictures: Sequence[Picture],
    values: Mapping[str, float],
    metric: str,
    at_best: Scored,
    patience: int,
    num_errors: float = 2.0,
) -> bool:
    """Whether a metric is clearly below its best for `patience` evaluations in a row; notes where it is in `progress`.

    Clearly: the paired difference to the evaluation where it was at its best is more than `num_errors` of its own
    standard errors. Of one pair, or of differences that are all equal, any drop is.

    Args:
        metric: "eval/SET/LABEL_mean" or ..._change, "-" before it where less is better.
        at_best: the scores of then, as `Evaluations.read_scores` has them; empty if they are gone.
    """
    name, sign = _signed(metric)
    value = values.get(name, math.nan)
    if not math.isfinite(value):
        return False
    if progress.stop_best is None or sign * value > sign * progress.stop_best or not at_best:
        progress.stop_best, progress.stop_best_epochs, progress.worse = value, int(values["eval/epoch"]), 0
        return False
    difference = estimate(paired_differences(scores_of(pictures, *measured(metric)), at_best))
    error = 0.0 if math.isnan(difference.standard_error) else difference.standard_error
    progress.worse = progress.worse + 1 if sign * difference.mean < -num_errors * error else 0
    progress.stopped = progress.worse >= patience
    return progress.stopped


# --- several models, side by side


def _as_json(found: Estimate) -> dict[str, Any]:
    interval = [_finite(bound) for bound in found.interval]
    return {
        "mean": _finite(found.mean),
        "standard_error": _finite(found.standard_error),
        "ci95": interval,
        "count": found.count,
    }


def compared(pictures: Sequence[Picture], base: Sequence[Picture]) -> dict[str, Any]:
    """What a model's pictures earn, and the paired difference to the base's, by reward; and their diversity.

    Args:
        pictures: of one prompt set.
        base: of the same prompts and seeds; empty for the base itself.

    Returns:
        For JSON. "change" is over pairs of pictures, "change_over_prompts" over prompts' mean differences: mostly the
        wider one, which holds for other prompts of the kind too.
    """
    rewards: dict[str, Any] = {}
    for label in pictures[0].scores:
        own, theirs = (scores_of(part, pictures[0].set_name, label) for part in (pictures, base))
        rewards[label] = _as_json(estimate(own.values())) | {"failed": sum(map(math.isnan, own.values()))}
        if base:
            rewards[label]["change"] = _as_json(estimate(paired_differences(own, theirs)))
            rewards[label]["change_over_prompts"] = _as_json(estimate(by_prompt(own, theirs)))
    return {"rewards": rewards, "diversity": _finite(diversity(pictures))}
