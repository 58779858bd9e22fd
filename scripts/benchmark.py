"""Measure what a config costs: seconds, samples per second, peak memory and FLOPs of each phase.

    python scripts/benchmark.py --config config/tiny.py [--config.KEY=VALUE ...]
    python scripts/benchmark.py --config config/base.py --random_weights sd15      needs no weights
    ... --compare_with="--config.compile=True"     two settings in turn, each in processes of its own
    ... --budget 6                                 the first setting that fits in 6 GB
    ... --estimate                                 a GPU's memory from counted bytes; needs no GPU

The model is made and run by the functions that scripts/train.py uses. GB are 10^9 bytes.
"""

import copy
import dataclasses
import functools
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from absl import app, flags
from ml_collections import ConfigDict

from ddpo_pytorch.exits import RunFailure, explain_and_leave, leave
from ddpo_pytorch.named_functions import ConfigError, without_secrets
from ddpo_pytorch.run_plan import (
    RunPlan,
    apply_overrides,
    load_config,
    make_plan,
    split_overrides,
    without_secret_arguments,
)

PHASES = ("sample", "decode", "reward", "train", "epoch")
# From heaviest to lightest, all with the same gradients and batches; on a CPU also from fastest to slowest.
SETTINGS: list[dict[str, str]] = [
    {},
    {"train.cfg_passes": "2"},
    {"train.gradient_checkpointing": "True"},
    {"train.cfg_passes": "2", "train.gradient_checkpointing": "True"},
    {"train.cfg_passes": "2", "train.gradient_checkpointing": "True", "offload": "True"},
]

CONFIG = flags.DEFINE_string("config", "config/base.py", "Config file, as scripts/train.py takes it.")
RANDOM_WEIGHTS = flags.DEFINE_enum("random_weights", None, ["sd15", "sd21", "sdxl"], "An architecture, not downloaded.")
REPS = flags.DEFINE_integer("reps", 3, "Calls of each phase after the first, of which the median is told.", 1)
PHASES_ASKED = flags.DEFINE_list("phases", None, f"Some of {','.join(PHASES)}; all, or no epoch of random weights.")
JSON = flags.DEFINE_string("json", None, "File for all results.")
COMPARE = flags.DEFINE_string("compare", None, "File of an earlier run's --json: prints ratios this/that.")
COMPARE_WITH = flags.DEFINE_string(
    "compare_with", None, 'Overrides of a second setting, run in turn: ratios B/A. Several are separated by ";".'
)
AGAINST_PLAIN = flags.DEFINE_bool(
    "against_plain", False, "A is the plain path: peft's layers, both halves of guidance whole, one AdamW loop."
)
PLAIN = flags.DEFINE_bool("plain", False, "Measure the plain path.")
COUNT_FLOPS = flags.DEFINE_bool("count_flops", True, "Count FLOPs too, in passes of their own.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "Processes of each setting with --compare_with.", 1)
BUDGET = flags.DEFINE_float("budget", None, "GB: find the first setting whose phases all fit, lightest last.")
ESTIMATE = flags.DEFINE_bool("estimate", False, "Count bytes instead of measuring.")

Overrides = list[tuple[str, str]]


def phases_to_run() -> list[str]:
    if PHASES_ASKED.value is None:
        return [name for name in PHASES if name != "epoch" or RANDOM_WEIGHTS.value is None]
    if unknown := [name for name in PHASES_ASKED.value if name not in PHASES]:
        raise ConfigError(f'--phases: there is no phase "{unknown[0]}"; there are {", ".join(PHASES)}')
    if RANDOM_WEIGHTS.value == "sdxl" and "epoch" in PHASES_ASKED.value:
        raise ConfigError("--random_weights sdxl has no epoch: scripts/train.py does not train SDXL yet")
    return PHASES_ASKED.value


def planned(overrides: Overrides) -> tuple[ConfigDict, RunPlan]:
    """The config as one process without dashboards runs it."""
    config = load_config(CONFIG.value)
    apply_overrides(config, overrides)
    config.log_with = ""
    return config, make_plan(config, num_processes=1)


def read_results(file: str) -> dict[str, Any]:
    try:
        results = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--compare {file}: it cannot be read as JSON: {error}") from error
    if not isinstance(results, dict) or "phases" not in results:
        raise ConfigError(f"--compare {file}: it has no phases, so --json did not write it")
    return results


# --- one process, measured


def measure(config: ConfigDict, plan: RunPlan, names: Sequence[str], overrides: Overrides) -> dict[str, Any]:
    """Every phase of `names`, in the order of an epoch."""
    import torch

    from ddpo_pytorch import benchmarking, launch, metrics, policy, rollout, update
    from ddpo_pytorch.benchmarking import PeakMemory, phase, synchronize, timed
    from ddpo_pytorch.diffusers_patch.pipeline_with_logprob import decode_latents, denoise_with_logprob
    from ddpo_pytorch.scoring import RewardWorkers
    from ddpo_pytorch.trajectories import take

    sample, train = config.sample, config.train
    if PLAIN.value:
        policy.speed_up = lambda unet: 0
        launch.share_halves = lambda unet: None
        make_optimizer = policy.make_optimizer
        policy.make_optimizer = lambda *args, **options: make_optimizer(*args, **{**options, "fused": False})
    # LOAD   as scripts/train.py does
    accelerator = launch.make_accelerator(config)
    device = accelerator.device
    policy.check_device(device, config.mixed_precision, train.use_8bit_adam)
    reward_fn = launch.make_reward(accelerator, plan)
    workers = RewardWorkers(
        reward_fn,
        name=config.reward_fn,
        device=device,
        num_workers=config.num_reward_workers,
        timeout=config.reward_timeout,
        samples_per_epoch=plan.samples_per_epoch_total,
        max_failed_fraction=config.max_failed_fraction,
    )
    pipeline, scheduler = load_model(config, device)
    model, optimizer = launch.make_policy(accelerator, config, pipeline, scheduler)

    def count_flops(run: Callable[[], Any]) -> float | None:
        return benchmarking.count_flops(run) if COUNT_FLOPS.value else None

    dtype = policy.WEIGHT_DTYPES[config.mixed_precision]
    peak_flops = benchmarking.matmul_peak(device, dtype)
    calls, batch, phases = 1 + REPS.value, sample.batch_size, {}
    prompts, metadata = rollout.draw_prompts(
        plan.prompt_fn, config.prompt_fn_kwargs.to_dict(), count=batch, name=config.prompt_fn
    )
    generator = torch.Generator(device).manual_seed(config.seed)
    eager = dataclasses.replace(model, unet=getattr(model.unet, "_orig_mod", model.unet))  # for the counter of FLOPs

    # SAMPLE   prompts, then as many of the schedule's steps as there are calls, from the first to the last
    def encode() -> None:
        model.forget_prompts()
        model.embed(prompts)

    memory = PeakMemory(device)
    seconds = timed(encode, calls, device)
    if "sample" in names and RANDOM_WEIGHTS.value != "sdxl":
        phases["text"] = phase(seconds, memory.read(), batch)
    model.scheduler = some_steps(scheduler, calls)
    memory, marks, memory_read = PeakMemory(device), [time.perf_counter()], {}

    def on_step(*_: Any) -> None:
        synchronize(device)
        marks.append(time.perf_counter())
        if len(marks) == calls + 1:
            memory_read.update(memory.read())

    images, trajectories = model.sample(prompts, generator, on_step)
    model.scheduler = scheduler
    if "sample" in names:
        embeds = torch.stack(model.embed(prompts)[0])
        start = trajectories.latents[:, 0].to(device)
        one_step = functools.partial(
            denoise_with_logprob, eager.unet, some_steps(scheduler, 1), start, embeds, model.negative_prompt_embeds
        )
        guidance = (sample.guidance_scale, sample.eta, generator)
        flops = count_flops(lambda: one_step(*guidance, cfg_passes=train.cfg_passes))
        seconds = [after - before for before, after in zip(marks[:-1], marks[1:], strict=True)]
        phases["step"] = phase(seconds, memory_read, batch / sample.num_steps, flops, peak_flops)
    if "decode" in names:
        final = trajectories.latents[:, -1].to(device)
        memory = PeakMemory(device)
        with torch.no_grad():
            seconds = timed(lambda: decode_latents(pipeline.vae, final), calls, device)
        phases["decode"] = phase(seconds, memory.read(), batch)

    # REWARD
    def score() -> None:
        workers.submit(images, prompts, metadata)
        workers.collect(on_batch=lambda: None)

    if "reward" in names:
        memory = PeakMemory(device)
        phases["reward"] = phase(timed(score, calls, device), memory.read(), batch)

    # TRAIN   one update of an unchanged policy, a micro-batch for each call; then optimizer steps alone
    gaps: dict[str, float] = {}
    if "train" in names:
        if config.offload:
            model.move_rest("cpu")
        advantages = torch.linspace(-1, 1, batch)
        repeats = train.timesteps_per_forward
        samples = torch.arange(train.batch_size).repeat_interleave(repeats)

        def micro_batch(call: int) -> Any:
            steps = (torch.arange(repeats) + call).repeat(train.batch_size) % calls
            return take(trajectories, advantages, samples, steps, device)

        def micro_batches() -> Iterator[Any]:
            for call in range(calls):
                synchronize(device)
                marks.append(time.perf_counter())
                yield micro_batch(call)
            synchronize(device)
            marks.append(time.perf_counter())
            memory_read.update(memory.read())

        memory, memory_read, marks = PeakMemory(device), {}, []
        result = update.optimizer_step(
            accelerator,
            model,
            optimizer,
            micro_batches(),
            num_micro_batches=calls,
            learning_rate=train.learning_rate,
            clip_range=train.clip_range,
            adv_clip_max=train.adv_clip_max,
            max_grad_norm=train.max_grad_norm,
        )
        gaps = {"logp_gap": result.logp_gap, "logp_gap_timestep": result.logp_gap_timestep}
        flops = count_flops(lambda: eager.log_prob(micro_batch(0)).sum().backward())
        seconds = [after - before for before, after in zip(marks[:-1], marks[1:], strict=True)]
        passes = train.num_inner_epochs * plan.num_train_timesteps / repeats
        phases["train"] = phase(seconds, memory_read, train.batch_size / passes, flops, peak_flops)
        for p in policy.trainable_parameters(model.unet):
            p.grad = torch.full_like(p, 1e-3)
        memory = PeakMemory(device)
        per_update = plan.batch_per_update_total / train.num_inner_epochs
        phases["optimizer"] = phase(timed(optimizer.step, calls, device), memory.read(), per_update)
        optimizer.zero_grad(set_to_none=True)

    # EPOCH
    if "epoch" in names:
        epoch = functools.partial(one_epoch, config, plan, accelerator, model, optimizer, reward_fn, workers)
        memory, parts = PeakMemory(device), []
        seconds = timed(lambda: parts.append(epoch(len(parts))), calls, device)
        phases["epoch"] = phase(seconds, memory.read(), plan.samples_per_epoch_total) | {"parts": parts}
        gaps = {key: max(part[key] for part in parts) for key in ("logp_gap",)}
    workers.close()
    return {
        "command": shlex.join(sys.argv),
        "random_weights": RANDOM_WEIGHTS.value,
        "hardware": benchmarking.hardware_name(device),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "matmul_flops_per_s": peak_flops,
        "reps": REPS.value,
        "trainable_parameters": sum(p.numel() for p in policy.trainable_parameters(model.unet)),
        "phases": phases,
        **gaps,
        "derived": derived(phases),
        "overrides": without_secret_arguments([], overrides),
        "config": without_secrets(config.to_dict()),
        "versions": metrics.package_versions(),
    }


def load_model(config: ConfigDict, device: Any) -> tuple[Any, Any]:
    """Pipeline and scheduler, of the config's model or of one with random weights."""
    from ddpo_pytorch import benchmarking, policy

    name, (model, revision) = RANDOM_WEIGHTS.value, (config.pretrained.model, config.pretrained.revision)
    schedule = str(benchmarking.EMBEDDED_MODEL) if name else model  # which has Stable Diffusion's
    scheduler = policy.load_scheduler(schedule, revision, config.sample.num_steps, config.sample.eta, device)
    if name is not None:
        where = "meta" if device.type == "meta" else "cpu"
        return benchmarking.random_pipeline(name, scheduler, where), scheduler
    pipeline = policy.load_pipeline(model, revision, scheduler)
    if device.type == "meta":
        for module in (pipeline.vae, pipeline.text_encoder, pipeline.unet):
            policy.move(module, device=device)
    return pipeline, scheduler


def some_steps(scheduler: Any, count: int) -> Any:
    """A scheduler that makes `count` of a schedule's steps, from the first to the last."""
    short = copy.copy(scheduler)
    last = len(scheduler.timesteps) - 1
    short.timesteps = scheduler.timesteps[[round(i * last / max(1, count - 1)) for i in range(count)]]
    return short


def one_epoch(
    config: ConfigDict,
    plan: RunPlan,
    accelerator: Any,
    model: Any,
    optimizer: Any,
    reward_fn: Any,
    workers: Any,
    epoch: int,
) -> dict[str, float]:
    """Sampling, rewards and training as scripts/train.py has them; what files and dashboards cost is not in it."""
    from ddpo_pytorch import rollout, update
    from ddpo_pytorch.distributed import seed_epoch
    from ddpo_pytorch.stat_tracking import PerPromptStatTracker
    from ddpo_pytorch.trajectories import shuffled_updates, take

    sample, train, device = config.sample, config.train, accelerator.device
    started = time.perf_counter()
    if config.offload:
        model.move_rest(device)
    streams = seed_epoch(config.seed, epoch, 0, device)
    prompts, metadata = rollout.draw_prompts(
        plan.prompt_fn, config.prompt_fn_kwargs.to_dict(), plan.samples_per_epoch_per_process, config.prompt_fn
    )
    samples = rollout.sample_epoch(
        model, prompts, metadata, sample.batch_size, streams.noise, workers, on_step=lambda: None
    )
    sampled = time.perf_counter()
    scores = workers.collect(on_batch=lambda: None)
    all_prompts, all_scores, *_ = rollout.gather_samples(
        accelerator, samples, scores, config.reward_fn, config.max_failed_fraction, config.num_log_images
    )
    rewards = rollout.combined_rewards(reward_fn, all_scores)
    tracking = config.per_prompt_stat_tracking
    tracker = PerPromptStatTracker(tracking.buffer_size, tracking.min_count) if tracking is not None else None
    advantages = rollout.own_share(accelerator, rollout.compute_advantages(tracker, all_prompts, rewards))
    rewarded = time.perf_counter()
    if config.offload:
        model.move_rest("cpu")
    if train.recompute_log_probs:
        update.recompute_log_probs(model, samples.trajectories, train.batch_size, train.timesteps_per_forward)
    results = [
        update.optimizer_step(
            accelerator,
            model,
            optimizer,
            (take(samples.trajectories, advantages, *i, device) for i in indices),
            num_micro_batches=len(indices),
            learning_rate=train.learning_rate,
            clip_range=train.clip_range,
            adv_clip_max=train.adv_clip_max,
            max_grad_norm=train.max_grad_norm,
        )
        for _ in range(train.num_inner_epochs)
        for indices in shuffled_updates(
            num_samples=len(prompts),
            num_steps=sample.num_steps,
            num_train_steps=plan.num_train_timesteps,
            batch_size=train.batch_size,
            groups_per_update=train.gradient_accumulation_steps,
            generator=streams.shuffle,
            timesteps_per_forward=train.timesteps_per_forward,
        )
    ]
    return {
        "sample_s": sampled - started,
        "reward_s": rewarded - sampled,
        "train_s": time.perf_counter() - rewarded,
        "reward_hidden_share": workers.hidden_share,
        "logp_gap": results[0].logp_gap,
    }


def derived(phases: dict[str, Any]) -> dict[str, float]:
    """Whole images per second of one process, from the phases' medians; rewards are taken as hidden."""

    def rate(*names: str) -> float:
        return 1 / sum(1 / phases[name]["samples_per_s"] for name in names if name in phases)

    rates = {}
    if {"step", "decode"} <= set(phases):
        rates["sampling_images_per_s"] = rate("text", "step", "decode")
    if "train" in phases:
        rates["training_images_per_s"] = rate("train", "optimizer")
    if len(rates) == 2:
        rates["images_per_s"] = rate("text", "step", "decode", "train", "optimizer")
        rates["hours_of_100_epochs_of_256"] = 25600 / rates["images_per_s"] / 3600
    return rates


# --- what is said, and what runs in processes of its own

COLUMNS = ["phase", "first s", "median s", "samples/s", "before GB", "peak GB", "TFLOP", "of matmul peak"]


def row(cells: Sequence[Any]) -> str:
    return (
        f"{cells[0]:<12}"
        + "".join(f"{c if isinstance(c, str) else f'{c:.4g}':>12}" for c in cells[1:-1])
        + (f"{cells[-1] if isinstance(cells[-1], str) else f'{cells[-1]:.1%}':>16}")
    )


def table(results: dict[str, Any]) -> str:
    lines = [row(COLUMNS)]
    for name, p in results["phases"].items():
        cells = [p[key] for key in ("first_s", "median_s", "samples_per_s", "before_gb", "peak_gb")]
        lines.append(row([name, *cells, p["flops"] / 1e12 if "flops" in p else "", p.get("peak_share", "")]))
    lines += [
        f"{results['hardware']}, {results['device']}, {results['threads']} threads, {results['dtype']}: "
        f"{results['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s in a large matrix product",
        *(f"{key}: {value:.4g}" for key, value in results["derived"].items()),
    ]
    if "logp_gap" in results:
        lines.append(f"logp_gap before the first update: {results['logp_gap']:.2g}")
    return "\n".join(lines)


def ratios(this: Mapping[str, Any], that: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """this/that of the median seconds and the peak, for each phase that both results have."""
    common = [name for name in this["phases"] if name in that["phases"]]
    return {
        name: {key: this["phases"][name][key] / that["phases"][name][key] for key in ("median_s", "peak_gb")}
        for name in common
    }


def medians(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several processes' results of one setting as one: the medians of their numbers, by phase."""
    phases = [result["phases"] for result in results]
    keys = ("first_s", "median_s", "samples_per_s", "before_gb", "peak_gb", "flops", "peak_share")
    return {
        **results[0],
        "phases": {
            name: {k: statistics.median(p[name][k] for p in phases) for k in keys if k in phases[0][name]}
            for name in phases[0]
        },
    }


def ratio_table(this: dict[str, Any], that: dict[str, Any], title: str) -> str:
    lines = [title, f"{'phase':<14}{'seconds':>12}{'peak':>12}"]
    for name, ratio in ratios(this, that).items():
        lines.append(f"{name:<14}{ratio['median_s']:>12.3f}{ratio['peak_gb']:>12.3f}")
    return "\n".join(lines)


def in_own_process(names: Sequence[str], overrides: Overrides, is_plain: bool = False) -> dict[str, Any]:
    """Results of this config with these overrides, from a process of its own.

    Raises:
        RunFailure: it failed, with its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, __file__, f"--config={CONFIG.value}", f"--reps={REPS.value}", f"--json={file}"]
        command += [f"--phases={','.join(names)}", *["--plain"] * is_plain]
        command += [] if COUNT_FLOPS.value else ["--nocount_flops"]
        command += [f"--random_weights={RANDOM_WEIGHTS.value}"] if RANDOM_WEIGHTS.value else []
        command += [f"--config.{key}={value}" for key, value in overrides]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            last = (process.stderr.strip().splitlines() or ["it said nothing"])[-1].removeprefix("error: ")
            raise RunFailure(f"the process with {shown(overrides) or 'the config as it is'} failed: {last}")
        return json.loads(file.read_text())


def shown(overrides: Overrides) -> str:
    return " ".join(argument.removeprefix("--config.") for argument in without_secret_arguments([], overrides))


def title(setting: dict[str, str]) -> str:
    return shown(list(setting.items())) or "as it is"


def compare_with(names: Sequence[str], ours: Overrides, others: Sequence[Overrides]) -> dict[str, Any]:
    """A B C A B C ..., so that what else the machine does meets all; medians over the processes, and ratios to A."""
    is_plain = AGAINST_PLAIN.value
    sides = [("the plain path" if is_plain else "as it is", ours, is_plain)]
    sides += [("as it is", ours, False)] if is_plain else []
    sides += [(shown(theirs), [*ours, *theirs], False) for theirs in others]
    runs: list[list[dict[str, Any]]] = [[] for _ in sides]
    for _ in range(ROUNDS.value):
        for (_, overrides, plain), results in zip(sides, runs, strict=True):
            results.append(in_own_process(names, overrides, plain))
    middle = [medians(results) for results in runs]
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    for letter, (name, _, _), results in zip(letters, sides, middle, strict=False):
        print(f"{letter}: {name}, medians of {ROUNDS.value} processes\n{table(results)}\n")
    for letter, results in zip(letters[1:], middle[1:], strict=False):
        print(ratio_table(results, middle[0], f"{letter}/A"))
    named = {name: results for (name, _, _), results in zip(sides, middle, strict=True)}
    return {"settings": named, "ratios": [ratios(results, middle[0]) for results in middle[1:]], "runs": runs}


def budget(limit: float, names: Sequence[str], overrides: Overrides) -> dict[str, Any]:
    """Measure settings from heaviest to lightest until one fits.

    Args:
        limit: GB.

    Raises:
        RunFailure: none fits.
    """
    tried: list[dict[str, Any]] = []
    seen: list[dict[str, Any]] = []
    for setting in SETTINGS:
        options = [*overrides, *setting.items()]
        config = planned(options)[0].to_dict()
        if config in seen:
            continue
        seen.append(config)
        try:
            results = in_own_process(names, options)
        except RunFailure as error:
            if "out of memory" not in str(error).lower():
                raise
            print(f"out of memory{'':<17}  {title(setting)}", flush=True)
            continue
        peak = max(p["peak_gb"] for p in results["phases"].values())
        tried.append({"setting": setting, "peak_gb": peak, "results": results})
        print(f"{peak:7.2f} GB {1 / results['derived']['images_per_s']:10.4g} s/image  {title(setting)}", flush=True)
        if peak <= limit:
            print(f"the first that fits in {limit:g} GB; in a config file:")
            print("\n".join(f"config.{key} = {value}" for key, value in setting.items()) or "(nothing to change)")
            return {"limit_gb": limit, "fits": setting, "tried": tried}
    least = f"{min(one['peak_gb'] for one in tried):.2f} GB" if tried else "more than the device has"
    raise RunFailure(f"nothing fits in {limit:g} GB: the lightest setting's peak is {least}")


# --- counted bytes


def estimate(overrides: Overrides) -> dict[str, Any]:
    """Print the peak of each phase for every setting, from tensors without data."""
    names = ["weights", "text", "step", "decode", "train", "optimizer"]
    config = planned(overrides)[0]
    sample, train = config.sample, config.train
    model = RANDOM_WEIGHTS.value or Path(config.pretrained.model).name
    print(
        f"ESTIMATE of a GPU's peak memory in GB: {model}, {config.mixed_precision}, batch "
        f"{sample.batch_size} sampled and {train.batch_size} trained.\nCounted tensors of the training code on shapes "
        "alone, attention as memory-efficient kernels do it. Not\ncounted: the allocator's fragmentation, the CUDA "
        "context (about 0.5 GB), the libraries' workspaces."
    )
    print("".join(f"{name:>10}" for name in [*names, "most"]))
    settings = []
    for setting in SETTINGS:
        peaks = counted_peaks(*planned([*overrides, *setting.items()]))
        settings.append({"setting": setting, "peak_gb": peaks})
        cells = [*(peaks[name] for name in names), max(peaks.values())]
        print("".join(f"{c:>10.2f}" for c in cells), f" {title(setting)}", flush=True)
    return {"estimate": True, "model": model, "settings": settings}


def counted_peaks(config: ConfigDict, plan: RunPlan) -> dict[str, float]:
    """GB by phase, of the functions that training calls, on the meta device."""
    import torch

    from ddpo_pytorch import launch, policy
    from ddpo_pytorch.benchmarking import GB, LiveBytes, PretendedGpu, backward
    from ddpo_pytorch.diffusers_patch.pipeline_with_logprob import decode_latents, denoise_with_logprob
    from ddpo_pytorch.losses import ppo_clipped_loss
    from ddpo_pytorch.trajectories import MicroBatch

    sample, train, device = config.sample, config.train, torch.device("meta")
    dtype = policy.WEIGHT_DTYPES[config.mixed_precision]
    accelerator: Any = SimpleNamespace(device=device, prepare_model=lambda unet, **_: unet, prepare=lambda o: o)
    config.compile = False
    peaks = {}
    with LiveBytes(granularity=512) as counted, PretendedGpu() as gpu:

        def peak(name: str) -> None:
            peaks[name] = counted.peak / GB
            gpu.autocast = None
            counted.reset()

        pipeline, scheduler = load_model(config, device)
        model, optimizer = launch.make_policy(accelerator, config, pipeline, scheduler)
        counted.reset()
        peak("weights")
        embed = policy.encode_prompts(pipeline, ["a prompt"])  # not through the policy, which keeps a copy on the CPU
        embeds = embed.repeat(sample.batch_size, 1, 1)
        peak("text")
        unet = pipeline.unet.config
        shape = (sample.batch_size, unet.in_channels, unet.sample_size, unet.sample_size)
        gpu.autocast = None if config.mixed_precision == "no" else dtype
        start = torch.empty(shape, device=device)
        guidance = (model.negative_prompt_embeds, sample.guidance_scale, sample.eta)
        step = denoise_with_logprob(
            model.unet, some_steps(scheduler, 1), start, embeds, *guidance, cfg_passes=train.cfg_passes
        )
        peak("step")
        with torch.no_grad():
            decode_latents(pipeline.vae, step[0][-1])
        peak("decode")
        del step, start, embeds
        if config.offload:
            pipeline.vae = pipeline.text_encoder = None
        counted.reset()
        gpu.autocast = None if config.mixed_precision == "no" else dtype
        count = train.batch_size * train.timesteps_per_forward
        latents, next_latents = (torch.empty(count, *shape[1:], device=device) for _ in range(2))
        timesteps, prev_timesteps = (torch.zeros(count, dtype=torch.int64, device=device) for _ in range(2))
        old_log_probs, advantages = (torch.empty(count, device=device) for _ in range(2))
        prompt_embeds = embed.repeat(count, 1, 1)
        batch = MicroBatch(latents, next_latents, timesteps, prev_timesteps, old_log_probs, prompt_embeds, advantages)
        loss, _ = ppo_clipped_loss(
            model.log_prob(batch), old_log_probs, advantages, train.clip_range, train.adv_clip_max, latents[0].numel()
        )
        backward(loss)
        peak("train")
        del loss
        for group in optimizer.param_groups:
            group["fused"] = False  # which knows no meta device
        optimizer.step()
        peak("optimizer")
    return peaks


# --- the command line


def normalised(argv: Sequence[str]) -> list[str]:
    """Dashes in flags' names as underscores, and a flag's value that begins like an override joined to its flag."""
    result: list[str] = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        if result and result[-1] == "--compare_with":
            result[-1] += f"={argument}"
        elif name.startswith("--") and not name.startswith("--config."):
            result.append("--" + name[2:].replace("-", "_") + equals + value)
        else:
            result.append(argument)
    return result


def checked_flags(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        raise ConfigError(f"{error}; options of the config are written --config.KEY=VALUE") from error


def run(argv: Sequence[str], overrides: Overrides) -> None:
    if len(argv) > 1:
        raise ConfigError(f"unexpected arguments {argv[1:]}; options are written --config.KEY=VALUE")
    names = phases_to_run()
    config, plan = planned(overrides)
    others = []
    for part in (COMPARE_WITH.value or "").split(";") if COMPARE_WITH.value is not None else []:
        rest, theirs = split_overrides(shlex.split(part))
        if rest or not theirs:
            raise ConfigError(f'--compare_with takes "--config.KEY=VALUE ...", got {COMPARE_WITH.value!r}')
        planned([*overrides, *theirs])
        others.append(theirs)
    compares = COMPARE_WITH.value is not None or AGAINST_PLAIN.value
    if BUDGET.value is not None and not BUDGET.value > 0:
        raise ConfigError(f"--budget must be a number of GB, greater than 0; got {BUDGET.value:g}")
    if sum([compares, BUDGET.value is not None, ESTIMATE.value, COMPARE.value is not None]) > 1:
        raise ConfigError("--compare, --compare_with, --budget and --estimate exclude each other")
    earlier = read_results(COMPARE.value) if COMPARE.value else None
    if JSON.value and not Path(JSON.value).resolve().parent.is_dir():
        raise ConfigError(f"--json {JSON.value}: there is no such folder")

    if ESTIMATE.value:
        results = estimate(overrides)
    elif BUDGET.value is not None:
        results = budget(BUDGET.value, ["sample", "decode", "train"], overrides)
    elif compares:
        results = compare_with(names, overrides, others)
    else:
        results = measure(config, plan, names, overrides)
        print(table(results))
        if earlier is not None:
            print(ratio_table(results, earlier, f"this/{COMPARE.value}"))
    if JSON.value:
        Path(JSON.value).write_text(json.dumps(results, indent=2, default=str))


def main(argv: list[str]) -> None:
    arguments, overrides = split_overrides(normalised(argv))
    sys.argv = without_secret_arguments(arguments, overrides)  # results show them
    try:
        run(checked_flags(arguments), overrides)
    except SystemExit:  # of --help
        raise
    except BaseException as error:
        explain_and_leave(error)
    leave(0)


if __name__ == "__main__":
    app.define_help_flags()
    main(sys.argv)
