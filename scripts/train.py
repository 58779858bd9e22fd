"""Train a diffusion model on a reward with DDPO.

    accelerate launch scripts/train.py --config config/dgx.py:compressibility [--config.KEY=VALUE ...]

PLAN and LOAD, then, epoch after epoch, SAMPLE, REWARD, TRAIN and SAVE. The options are in config/base.py.
"""

import datetime
import functools
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from absl import app, flags
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration, broadcast_object_list
from ml_collections import ConfigDict
from tqdm import tqdm

from ddpo_pytorch import checkpoints, metrics, policy, rollout
from ddpo_pytorch.checkpoints import ModelIdentity, TrainingState
from ddpo_pytorch.distributed import raise_together, seed_epoch
from ddpo_pytorch.run_plan import ConfigError, RunPlan, apply_overrides, load_config, make_plan, split_overrides
from ddpo_pytorch.stat_tracking import PerPromptStatTracker
from ddpo_pytorch.trajectories import shuffled_updates, take
from ddpo_pytorch.update import learning_rate_at, optimizer_step

CONFIG = flags.DEFINE_string(
    "config", "config/base.py", "Config file, as PATH or PATH:NAME; --config.KEY=VALUE sets one of its options."
)


def train(config: ConfigDict) -> None:
    # PLAN   batch arithmetic and every user error, before anything is loaded
    plan = make_plan(config, num_processes=int(os.environ.get("WORLD_SIZE", 1)))
    checkpoint = checkpoints.find_checkpoint(config.resume_from) if config.resume_from else None
    resumed = checkpoints.read_state(checkpoint) if checkpoint else None
    if resumed is not None and resumed.epoch >= config.num_epochs:
        raise ConfigError(
            f"{checkpoint} has {resumed.epoch} epochs already, and config.num_epochs is {config.num_epochs}; raise it"
        )
    accelerator = make_accelerator(config)
    policy.check_device(accelerator.device, config.mixed_precision, config.train.use_8bit_adam)
    show_bars = None if accelerator.is_main_process else False  # None: only on a terminal

    # LOAD   frozen VAE and text encoder, trainable UNet; where a resumed run stood
    scheduler = policy.load_scheduler(
        config.pretrained.model,
        config.pretrained.revision,
        config.sample.num_steps,
        config.sample.eta,
        accelerator.device,
    )
    pipeline = policy.load_pipeline(config.pretrained.model, config.pretrained.revision, scheduler)
    identity = ModelIdentity(
        pretrained_model=config.pretrained.model,
        base_unet=policy.unet_fingerprint(pipeline.unet),
        use_lora=config.use_lora,
        lora_rank=config.lora.rank if config.use_lora else None,
        lora_target_modules=list(config.lora.target_modules) if config.use_lora else None,
    )
    if resumed is not None:
        checkpoints.check_identity(resumed.model, identity, checkpoint)

    weight_dtype = policy.WEIGHT_DTYPES[config.mixed_precision]
    torch.manual_seed(config.seed)  # of the LoRA's first factors
    policy.make_trainable(pipeline.unet, config.use_lora, config.lora.rank, config.lora.target_modules, weight_dtype)
    if checkpoint is not None:
        checkpoints.restore_weights(checkpoint, pipeline.unet, config.use_lora)
    pipeline.vae.to(accelerator.device, weight_dtype)
    pipeline.text_encoder.to(accelerator.device, weight_dtype)
    pipeline.unet.to(accelerator.device)

    optimizer = policy.make_optimizer(
        policy.trainable_parameters(pipeline.unet),
        learning_rate=config.train.learning_rate,
        betas=(config.train.adam_beta1, config.train.adam_beta2),
        weight_decay=config.train.adam_weight_decay,
        epsilon=config.train.adam_epsilon,
        use_8bit_adam=config.train.use_8bit_adam,
    )
    unet, optimizer = accelerator.prepare(pipeline.unet, optimizer)
    model = policy.make_policy(pipeline, unet, scheduler, config.sample.guidance_scale, config.sample.eta)

    tracking = config.per_prompt_stat_tracking
    tracker = PerPromptStatTracker(tracking.buffer_size, tracking.min_count) if tracking is not None else None
    first_epoch, global_step = 0, 0
    if resumed is not None:
        first_epoch, global_step = resumed.epoch, resumed.global_step
        checkpoints.restore_optimizer(checkpoint, optimizer)
        if accelerator.scaler is not None and resumed.scaler is not None:
            accelerator.scaler.load_state_dict(resumed.scaler)
        if tracker is not None and resumed.stat_tracker is not None:
            tracker.load_state_dict(resumed.stat_tracker)

    run_name, run_folder = open_run_folder(accelerator, config, checkpoint, resumed)
    log = metrics.RunLog(accelerator, run_folder, first_epoch=first_epoch)
    run_ids = metrics.start_trackers(
        accelerator, run_folder, run_name, config.to_dict(), resumed.tracker_run_ids if resumed else {}
    )
    reward_fn = plan.reward_factory(**config.reward_fn_kwargs.to_dict())
    executor = ThreadPoolExecutor(max_workers=config.num_reward_workers)
    if accelerator.is_main_process:
        print(describe(plan, accelerator, model, run_folder, checkpoint), flush=True)

    skipped_in_a_row = 0
    for epoch in range(first_epoch, config.num_epochs):
        # SAMPLE   draw prompts, denoise them, remember every step and how likely it was
        started = time.perf_counter()
        random_streams = seed_epoch(config.seed, epoch, accelerator.process_index, accelerator.device)
        prompts, metadata = rollout.draw_prompts(
            plan.prompt_fn, config.prompt_fn_kwargs.to_dict(), plan.samples_per_epoch_per_process
        )
        num_denoising_steps = config.sample.num_batches_per_epoch * config.sample.num_steps
        with progress_bar(f"epoch {epoch}: sampling", num_denoising_steps, show_bars) as bar:
            samples = rollout.sample_epoch(
                model,
                prompts,
                metadata,
                batch_size=config.sample.batch_size,
                generator=random_streams.noise,
                reward_fn=reward_fn,
                reward_name=config.reward_fn,
                executor=executor,
                on_step=bar.update,
            )
        sampled = time.perf_counter()

        # REWARD   most are scored already; compare them with what their prompt usually earns
        with progress_bar(f"epoch {epoch}: waiting for rewards", len(samples.pending), show_bars) as bar:
            rewards = rollout.collect_rewards(
                accelerator, samples.pending, config.reward_fn, config.max_failed_fraction, on_batch=bar.update
            )
        all_prompts, all_rewards = rollout.gather_samples(accelerator, samples.prompts, rewards)
        all_advantages = rollout.compute_advantages(tracker, all_prompts, all_rewards)
        own = slice(accelerator.process_index * len(prompts), (accelerator.process_index + 1) * len(prompts))
        advantages = torch.as_tensor(all_advantages[own], dtype=torch.float32, device=accelerator.device)
        rewarded = time.perf_counter()

        reward_metrics = {
            "reward": all_rewards,
            "epoch": epoch,
            "reward_mean": np.nanmean(all_rewards),
            "reward_std": np.nanstd(all_rewards),
            "reward/failed_fraction": np.isnan(all_rewards).mean(),
        }
        log.log(reward_metrics, step=global_step)
        log.log_images(
            *rollout.gather_images(accelerator, samples, rewards, config.num_log_images), epoch=epoch, step=global_step
        )
        log.draw_curve()

        # TRAIN   replay the steps in random order; make good ones likelier, within clip_range
        training = time.perf_counter()
        logp_gap, skipped = 0.0, 0
        num_updates = plan.updates_per_epoch
        with progress_bar(f"epoch {epoch}: training", num_updates * plan.micro_batches_per_update, show_bars) as bar:
            for inner_epoch in range(config.train.num_inner_epochs):
                updates = shuffled_updates(
                    num_samples=len(prompts),
                    num_steps=config.sample.num_steps,
                    num_train_steps=plan.num_train_timesteps,
                    batch_size=config.train.batch_size,
                    groups_per_update=config.train.gradient_accumulation_steps,
                    generator=random_streams.shuffle,
                )
                for update, indices in enumerate(updates):
                    learning_rate = learning_rate_at(
                        global_step, config.train.learning_rate, config.train.lr_warmup_steps
                    )
                    result = optimizer_step(
                        accelerator,
                        model,
                        optimizer,
                        (take(samples.trajectories, advantages, *index) for index in bar.over(indices)),
                        num_micro_batches=len(indices),
                        learning_rate=learning_rate,
                        clip_range=config.train.clip_range,
                        adv_clip_max=config.train.adv_clip_max,
                        max_grad_norm=config.train.max_grad_norm,
                    )
                    if inner_epoch == 0 and update == 0:  # the policy that sampled: the gap is rounding alone
                        logp_gap = result.logp_gap
                    position = {"epoch": epoch, "inner_epoch": inner_epoch, "learning_rate": learning_rate}
                    log.log({**result.statistics, **position}, step=global_step)
                    global_step += 1
                    skipped += result.skipped
                    skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
                    if skipped_in_a_row >= config.train.max_skipped_steps:
                        raise RuntimeError(
                            f"the gradients of {skipped_in_a_row} updates in a row were not finite, the last in epoch "
                            f"{epoch}; the weights are those before them, and the last checkpoint is good. Try a lower "
                            "train.learning_rate, or mixed_precision bf16 or no"
                        )
        trained = time.perf_counter()

        # SAVE   everything needed to continue as if nothing had happened
        if (epoch + 1) % config.save_freq == 0 or epoch + 1 == config.num_epochs:
            state = TrainingState(
                epoch=epoch + 1,
                global_step=global_step,
                run_name=run_name,
                seed=config.seed,
                model=identity,
                stat_tracker=tracker.state_dict() if tracker is not None else None,
                tracker_run_ids=run_ids,
                scaler=accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
                config=config.to_dict(),
            )
            save(accelerator, run_folder, pipeline.unet, optimizer, state, config.num_checkpoint_limit)

        seconds = {
            "time/sample_s": sampled - started,
            "time/reward_s": rewarded - sampled,
            "time/train_s": trained - training,
            "time/epoch_s": time.perf_counter() - started,
        }
        epoch_metrics = {"epoch": epoch, "policy/logp_gap": logp_gap, "policy/skipped_steps": skipped, **seconds}
        log.log(epoch_metrics, step=global_step - 1)
        if accelerator.is_main_process:
            print(
                f"epoch {epoch}: reward {reward_metrics['reward_mean']:.4g} +- {reward_metrics['reward_std']:.3g}, "
                f"logp_gap {logp_gap:.1e}, {seconds['time/epoch_s']:.1f} s",
                flush=True,
            )

    executor.shutdown()
    accelerator.end_training()
    if accelerator.is_main_process:
        print(f"finished; see {run_folder}", flush=True)


class Bar(tqdm):
    def over(self, items):
        """Yield items, and advance as each has been used."""
        for item in items:
            yield item
            self.update()


def progress_bar(title: str, total: int, show: bool | None) -> Bar:
    return Bar(desc=title, total=total, disable=None if show is None else not show, leave=False, dynamic_ncols=True)


def make_accelerator(config: ConfigDict) -> Accelerator:
    """Process group, device and precision of this process, with the dashboards that the config asks for."""
    names = [name.strip() for name in config.log_with.split(",") if name.strip()]
    for name in names:
        if name not in {str(known) for known in LOGGER_TYPE_TO_CLASS}:
            known = ", ".join(sorted(str(k) for k in LOGGER_TYPE_TO_CLASS))
            raise ConfigError(
                f'config.log_with "{name}" is no tracker of Accelerate; there are: {known}; or "" for none'
            )
        if not filter_trackers([name], config.logdir):
            raise ConfigError(f'config.log_with "{name}" needs that package: pip install {name}')
    # Rounding of float32 products: TensorFloat-32, or none.
    torch.set_float32_matmul_precision("high" if config.allow_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.allow_tf32
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        log_with=names,
        project_config=ProjectConfiguration(project_dir=config.logdir, logging_dir=config.logdir),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    if config.cpu_threads and accelerator.device.type == "cpu":
        torch.set_num_threads(max(1, config.cpu_threads // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    return accelerator


def open_run_folder(
    accelerator: Accelerator, config: ConfigDict, checkpoint: Path | None, resumed: TrainingState | None
) -> tuple[str, Path]:
    """The run's name and folder, the same on every process: a new one, or the one that is resumed."""
    if checkpoint is not None and resumed is not None:
        run_name = resumed.run_name
        in_run_folder = checkpoint.resolve().parent.name == "checkpoints"
        run_folder = checkpoint.resolve().parents[1] if in_run_folder else Path(config.logdir) / run_name
    else:
        date = datetime.datetime.now().strftime("%Y.%m.%d_%H.%M.%S")
        [run_name] = broadcast_object_list([f"{config.run_name}_{date}" if config.run_name else date])
        run_folder = Path(config.logdir) / run_name
    error = None
    if accelerator.is_main_process:
        try:
            run_folder.mkdir(parents=True, exist_ok=resumed is not None)
            if checkpoint is not None:
                checkpoints.set_aside_newer(run_folder / "checkpoints", checkpoint)
            document = {
                "config": config.to_dict(),
                "num_processes": accelerator.num_processes,
                "versions": metrics.package_versions(),
            }
            (run_folder / "config.json").write_text(json.dumps(document, indent=2))
        except OSError as e:
            error = e
    raise_together(accelerator, error)
    accelerator.project_configuration.logging_dir = str(run_folder)
    return run_name, run_folder


def save(accelerator, run_folder, unet, optimizer, state, num_checkpoint_limit) -> None:
    """Write a checkpoint on the main process; an error there is an error everywhere."""
    error = None
    if accelerator.is_main_process:
        try:
            checkpoints.save_checkpoint(
                run_folder / "checkpoints", unet, optimizer.state_dict(), state, num_checkpoint_limit
            )
        except Exception as e:
            error = e
    raise_together(accelerator, error)


def describe(
    plan: RunPlan, accelerator: Accelerator, model: policy.Policy, run_folder: Path, checkpoint: Path | None
) -> str:
    """The plan, for people."""
    config = plan.config
    trainable = sum(p.numel() for p in policy.trainable_parameters(model.unet))
    kind = f"LoRA of rank {config.lora.rank}" if config.use_lora else "whole UNet"
    device = accelerator.device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    lines = [
        f"samples per epoch: {plan.samples_per_epoch_total} = {config.sample.batch_size} x "
        f"{config.sample.num_batches_per_epoch} batches x {plan.num_processes} processes, "
        f"{config.sample.num_steps} steps each",
        f"batch per update:  {plan.batch_per_update_total} = {config.train.batch_size} x "
        f"{config.train.gradient_accumulation_steps} accumulated x {plan.num_processes} processes, "
        f"{plan.num_train_timesteps} steps each",
        f"updates per epoch: {plan.updates_per_epoch}, over {config.num_epochs} epochs",
        f"model:             {config.pretrained.model}, {kind}, {trainable:,} trainable parameters",
        f"device:            {device} ({hardware}), mixed precision {config.mixed_precision}",
        f"prompts, reward:   {config.prompt_fn}, {config.reward_fn}",
        f"run folder:        {run_folder}" + (f", resumed from {checkpoint.name}" if checkpoint else ""),
    ]
    return "\n".join(lines)


def main(argv: list[str], overrides: list[tuple[str, str]]) -> None:
    try:
        if len(argv) > 1:
            raise ConfigError(f"unexpected arguments {argv[1:]}; options are written --config.KEY=VALUE")
        config = load_config(CONFIG.value)
        apply_overrides(config, overrides)
        train(config)
    except ConfigError as error:
        # Every process finds the same error; one says it.
        sys.exit(f"error: {error}" if os.environ.get("LOCAL_RANK", "0") == "0" else 1)


if __name__ == "__main__":
    arguments, config_overrides = split_overrides(sys.argv)
    app.run(functools.partial(main, overrides=config_overrides), argv=arguments)
