"""Draw and score the same prompts with the same noise, by the model as it was and as it was trained.

    python scripts/sample.py --checkpoint logs/RUN
    python scripts/sample.py --checkpoint logs/RUN --prompts "a cat, a dog" --seeds 8 --lora_scale 0.5,1 --eta 0,1
    python scripts/sample.py --checkpoint logs/RUN/checkpoints/checkpoint_8 --prompts everyday_objects.txt \\
        --rewards colorfulness

Model, prompts, rewards and steps are those of the run, and any of its options can be set: --config.KEY=VALUE. Leaves
grid.jpg, results.json and every picture in a folder of the run. Needs no dashboards.
"""

import contextlib
import dataclasses
import datetime
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from ml_collections import ConfigDict

from ddpo_pytorch.exits import RunFailure, explain_and_leave, leave
from ddpo_pytorch.named_functions import ConfigError, remember_secrets
from ddpo_pytorch.prompts import TRAIN_SET, PromptSet, parse_prompts
from ddpo_pytorch.run_plan import RunPlan, apply_overrides, make_plan, split_overrides, with_defaults

CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A run's folder, for its newest checkpoint, or a checkpoint.")
PROMPTS = flags.DEFINE_string(
    "prompts", TRAIN_SET, '"train" (8 of the training prompts), a file, FILE.txt[LOW:HIGH], or a list: "a cat, a dog".'
)
SEEDS = flags.DEFINE_integer("seeds", 4, "Pictures of each prompt, of seeds 0, 1, ...", 1)
LORA_SCALE = flags.DEFINE_list("lora_scale", ["1"], "How much of the LoRA: 1 is as trained; several: 0.5,1,1.5.")
ETA = flags.DEFINE_list("eta", None, "Noise in each step, 0 to 1, one or several; by default the run's.")
NUM_STEPS = flags.DEFINE_integer("num_steps", None, "DDIM steps; by default the run's.", 1)
GUIDANCE_SCALE = flags.DEFINE_float("guidance_scale", None, "Classifier-free guidance; by default the run's.")
REWARDS = flags.DEFINE_list("rewards", [], "Rewards beside the run's own, by name.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "Pictures at a time; halved where they do not fit.", 1)
OUTPUT = flags.DEFINE_string("output", None, "Folder for the results; by default a new one in the run's.")

GRID_GROUPS = 32  # prompts and seeds in the grid; all pictures are in the folder
GRID_WIDTH = 256  # pixels of a picture in the grid


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model that draws: the base (scale 0) or the trained one."""

    eta: float
    scale: float
    name: str


def variants(etas: Sequence[float], scales: Sequence[float]) -> list[Variant]:
    """For each eta the base, then the trained model at each scale."""
    found = []
    for eta in etas:
        of_eta = f", eta {eta:g}" if len(etas) > 1 else ""
        for scale in (0.0, *scales):
            name = "base" if scale == 0 else "trained" if scale == 1 else f"LoRA x {scale:g}"
            found.append(Variant(eta, scale, name + of_eta))
    return found


def numbers(name: str, texts: Sequence[str], low: float, high: float) -> list[float]:
    """A flag's numbers, each once, in the order given."""
    try:
        values = [float(text) for text in texts]
    except ValueError:
        values = []
    if not values or not all(low <= value <= high for value in values):
        raise ConfigError(f"--{name} takes numbers from {low:g} to {high:g}, as in 0.5,1; got {','.join(texts)}")
    return list(dict.fromkeys(values))


def planned(checkpoint: Path, saved: dict[str, Any], overrides: list[tuple[str, str]]) -> tuple[ConfigDict, RunPlan]:
    """The run's config and plan, for one process that samples."""
    if not saved:
        raise ConfigError(f"{checkpoint} has no config in it, as checkpoints of this version have")
    config = with_defaults(ConfigDict(saved))
    apply_overrides(config, overrides)
    remember_secrets(config.to_dict())
    with config.unlocked(), config.ignore_type():
        config.log_with = config.resume = config.resume_from = config.save_best = config.early_stop = ""
        config.compile = False
        config.eval.every, config.eval.prompts, config.eval.num_prompts = 1, (TRAIN_SET,), 8
        config.eval.num_seeds = SEEDS.value
        config.eval.rewards = (*config.eval.rewards, *(n for n in REWARDS.value if n not in config.eval.rewards))
        if NUM_STEPS.value is not None:
            config.sample.num_steps = NUM_STEPS.value
            config.train.timesteps_per_forward = 1
        if GUIDANCE_SCALE.value is not None:
            config.sample.guidance_scale = GUIDANCE_SCALE.value
        if BATCH_SIZE.value is not None:
            config.sample.batch_size = config.train.batch_size = BATCH_SIZE.value
    hidden = [key for key, value in kwargs_of(config) if value == "***"]
    if hidden:
        raise ConfigError(
            f"{checkpoint} does not hold the secret config.{hidden[0]}; give it: --config.{hidden[0]}=VALUE"
        )
    # Batches and updates are of no matter here: one process, and whatever batch was asked for.
    with config.unlocked():
        config.train.gradient_accumulation_steps = 1
        config.train.timestep_fraction = 1.0
        config.sample.num_batches_per_epoch = max(2, config.sample.num_batches_per_epoch)
    return config, make_plan(config, num_processes=1)


def kwargs_of(config: ConfigDict) -> Iterator[tuple[str, Any]]:
    """Arguments of the config's functions, by the names under which they are set."""
    for key in ("reward_fn_kwargs", "prompt_fn_kwargs"):
        for name, value in config[key].items():
            yield f"{key}.{name}", value


def run(overrides: list[tuple[str, str]]) -> None:
    if not CHECKPOINT.value:
        raise ConfigError("--checkpoint is missing: a run's folder, such as logs/RUN, or one of its checkpoints")
    scales = [s for s in numbers("lora_scale", LORA_SCALE.value, -10, 10) if s != 0]
    etas = numbers("eta", ETA.value, 0, 1) if ETA.value is not None else None
    try:
        given = parse_prompts(PROMPTS.value) if PROMPTS.value != TRAIN_SET else None
    except ValueError as error:
        raise ConfigError(f"--prompts {PROMPTS.value}: {error}") from error

    if OUTPUT.value and (output := Path(OUTPUT.value)).exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} is there already, and not an empty folder; nothing is written over")

    # Not before the flags stand: these take seconds to import.
    import torch
    from accelerate.utils import find_executable_batch_size
    from tqdm import tqdm

    from ddpo_pytorch import checkpoints, evaluation, launch, policy
    from ddpo_pytorch.evaluation import Picture

    checkpoint, skipped = checkpoints.find_checkpoint(CHECKPOINT.value, "--checkpoint")
    for problem in skipped:
        print(f"warning: {problem}", flush=True)
    if checkpoint is None:
        raise ConfigError(f"--checkpoint {CHECKPOINT.value}: this run has no checkpoint yet")
    state = checkpoints.read_state(checkpoint)
    if not state.model.use_lora and set(scales) - {1.0}:
        raise ConfigError(f"--lora_scale {','.join(LORA_SCALE.value)}: {checkpoint} holds a whole UNet, which has none")
    config, plan = planned(checkpoint, state.config, overrides)
    prompt_set: PromptSet = given or plan.eval_sets[0]
    wanted = variants(etas or [config.sample.eta], scales)

    # LOAD   rewards, the base model, and what was trained of it
    if config.mixed_precision == "fp16" and not torch.cuda.is_available():
        with config.unlocked():
            config.mixed_precision = "no"
        print("fp16 needs a GPU; drawing in float32", flush=True)
    accelerator = launch.make_accelerator(config)
    device, dtype = accelerator.device, policy.WEIGHT_DTYPES[config.mixed_precision]
    rewards = launch.make_eval_rewards(accelerator, plan, launch.make_reward(accelerator, plan))
    # With noise in the steps, which is what the schedule is checked for; eta 0 has no need of it.
    scheduler = policy.load_scheduler(
        config.pretrained.model, config.pretrained.revision, config.sample.num_steps, 1.0, device
    )
    pipeline = policy.load_pipeline(config.pretrained.model, config.pretrained.revision, scheduler)
    identity = dataclasses.replace(state.model, base_unet=policy.unet_fingerprint(pipeline.unet))
    checkpoints.check_identity(state.model, identity, checkpoint)
    models = launch.BaseAndTrained(pipeline.unet, checkpoint, state.model, dtype)
    for module in (pipeline.unet, pipeline.vae, pipeline.text_encoder):
        policy.move(module, device=device)
    for module in (pipeline.vae, pipeline.text_encoder):
        policy.move(module, dtype=dtype)
    unet = accelerator.prepare_model(pipeline.unet, evaluation_mode=True)
    model = policy.make_policy(pipeline, unet, scheduler, config.sample.guidance_scale, wanted[0].eta)
    count = len(prompt_set.prompts) * SEEDS.value
    print(
        f"{checkpoint}: {len(wanted)} x {count} pictures of {len(prompt_set.prompts)} prompts, "
        f"{config.sample.num_steps} steps, guidance {config.sample.guidance_scale:g}, on {device}",
        flush=True,
    )

    # DRAW
    def drawn_by(variant: Variant, bar: Any) -> list[Picture]:
        models.set_scale(variant.scale)
        model.eta = variant.eta
        done = bar.n

        def draw_all(batch_size: int) -> list[tuple[int, Picture]]:
            bar.n = done
            workers = launch.eval_workers(rewards, device, config)
            try:
                return evaluation.draw_and_score(
                    model, [prompt_set], range(SEEDS.value), batch_size, workers, on_step=bar.update
                )
            finally:
                for worker in workers.values():
                    worker.close()

        fitting = find_executable_batch_size(draw_all, starting_batch_size=min(count, config.sample.batch_size))
        return [picture for _, picture in fitting()]

    steps = -(-count // min(count, config.sample.batch_size)) * config.sample.num_steps
    pictures: dict[str, list[Picture]] = {}
    with tqdm(total=len(wanted) * steps, desc="drawing", disable=None, dynamic_ncols=True) as bar:
        for variant in wanted:
            pictures[variant.name] = drawn_by(variant, bar)

    # WRITE
    output = output_folder(checkpoint)
    bases = {variant.eta: pictures[variant.name] for variant in wanted if variant.scale == 0}
    results = [
        {"name": v.name, "lora_scale": v.scale, "eta": v.eta}
        | evaluation.compared(pictures[v.name], bases[v.eta] if v.scale != 0 else [])
        for v in wanted
    ]
    settings = {
        "checkpoint": str(checkpoint),
        "epochs": state.epoch,
        "model": config.pretrained.model,
        "num_steps": config.sample.num_steps,
        "guidance_scale": config.sample.guidance_scale,
        "mixed_precision": config.mixed_precision,
        "prompts": list(prompt_set.prompts),
        "seeds": list(range(SEEDS.value)),
    }
    with writing(output):
        write_pictures(output, wanted, pictures, settings, results)
    print(table(results))
    print(f"written: {output / 'grid.jpg'}, {output / 'results.json'}, {len(wanted) * count} pictures")


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFailure(f"cannot write in {folder}: {error}") from None


def output_folder(checkpoint: Path) -> Path:
    """Where results go: what was asked for, or a new folder in the run's."""
    if OUTPUT.value:
        folder = Path(OUTPUT.value)
    else:
        date = datetime.datetime.now().strftime("%Y.%m.%d_%H.%M.%S")
        folder = checkpoint.resolve().parents[1] / "samples" / f"{checkpoint.name}_{date}"
        if folder.is_relative_to(Path.cwd()):
            folder = folder.relative_to(Path.cwd())
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_pictures(
    output: Path,
    wanted: Sequence[Variant],
    pictures: dict[str, list[Any]],
    settings: dict[str, Any],
    results: list[dict[str, Any]],
) -> None:
    """The grid, with a row for each prompt and seed or several of them, every picture, and results.json."""
    import numpy as np
    from PIL import Image

    from ddpo_pytorch.evaluation import described
    from ddpo_pytorch.metrics import image_grid

    entries = []
    for variant in wanted:
        folder = variant.name.replace(", ", "_").replace(" ", "_")
        (output / folder).mkdir(exist_ok=True)
        for n, picture in enumerate(pictures[variant.name]):
            file = f"{folder}/{n:04d}.png"
            Image.fromarray(picture.image).save(output / file)
            entries.append(described(picture) | {"variant": variant.name, "file": file})
    groups = list(zip(*(pictures[variant.name] for variant in wanted), strict=True))[:GRID_GROUPS]
    shown = [(variant, picture) for group in groups for variant, picture in zip(wanted, group, strict=True)]
    images = []
    for _, picture in shown:
        image = Image.fromarray(picture.image)
        image.thumbnail((GRID_WIDTH, GRID_WIDTH))
        images.append(np.asarray(image))
    captions = [
        " | ".join(
            [picture.prompt, f"seed {picture.seed}", variant.name]
            + [f"{label} {score:.3g}" for label, score in picture.scores.items()]
        )
        for variant, picture in shown
    ]
    # As many seeds in a row as fit and divide theirs, so that every prompt begins a row.
    beside = max(k for k in range(1, SEEDS.value + 1) if SEEDS.value % k == 0 and (k == 1 or k * len(wanted) <= 8))
    columns = len(wanted) * beside
    image_grid(images, captions, columns).save(output / "grid.jpg", quality=92)
    document = {**settings, "variants": results, "pictures": entries}
    (output / "results.json").write_text(json.dumps(document, indent=1))


def table(results: Sequence[dict[str, Any]]) -> str:
    """Every variant's rewards and diversity, with the 95 % interval of the difference to the base."""

    def number(value: float | None, form: str = ".4g") -> str:
        return "-" if value is None else f"{value:{form}}"

    rows = [["", "reward", "mean", "+-", "change", "95 % interval", "failed", "diversity"]]
    for result, (label, entry) in itertools.chain.from_iterable(
        ((result, item) for item in result["rewards"].items()) for result in results
    ):
        change = entry.get("change")
        cells = [result["name"], label, number(entry["mean"]), number(entry["standard_error"], ".2g")]
        if change is None:
            cells += ["", ""]
        else:
            low, high = change["ci95"]
            cells += [number(change["mean"], "+.3g"), f"{number(low, '+.3g')} to {number(high, '+.3g')}"]
        rows.append([*cells, str(entry["failed"] or ""), number(result["diversity"], ".3g")])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(argv: list[str]) -> None:
    arguments, overrides = split_overrides(argv)
    try:
        try:
            rest = flags.FLAGS(arguments)
        except flags.Error as error:
            raise ConfigError(f"{error}; options of the config are written --config.KEY=VALUE") from error
        if len(rest) > 1:
            raise ConfigError(f"unexpected arguments {rest[1:]}")
        run(overrides)
    except SystemExit:  # of --help
        raise
    except BaseException as error:
        explain_and_leave(error)
    leave(0)


if __name__ == "__main__":
    app.define_help_flags()
    main(sys.argv)
