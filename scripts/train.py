"""Train a diffusion model on a reward with DDPO.

    accelerate launch scripts/train.py --config config/dgx.py:compressibility [--config.KEY=VALUE ...]

PLAN and LOAD, then, epoch after epoch, SAMPLE, REWARD, TRAIN and SAVE. The options are in config/base.py.
"""

import functools
import os
import sys
import time
from pathlib import Path

from absl import app, flags
from ml_collections import ConfigDict

from ddpo_pytorch.exits import RunFailure, leave
from ddpo_pytorch.named_functions import ConfigError, remember_secrets, without_secrets
from ddpo_pytorch.rescue import Rescue, end_on_signals
from ddpo_pytorch.run_plan import (
    RunPlan,
    apply_overrides,
    describe_options,
    load_config,
    make_plan,
    split_overrides,
    without_secret_arguments,
)

HELP = ("--help", "-help", "-h", "--helpfull", "--helpshort")
CONFIG = flags.DEFINE_string(
    "config", "config/base.py", "Config file, as PATH or PATH:NAME; --config.KEY=VALUE sets one of its options."
)


BASE_CONFIG = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "config", "base.py")
# Where launchers say how many processes there are, as Accelerate reads them
WORLD_SIZE_VARIABLES = ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"]


DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Tell plan, memory, time and where things would be written, from one step; start nothing."
)


def usage(argv: list[str], overrides: list[tuple[str, str]]) -> str:
    """What --help prints: the flags, and every option with its value in the config that is asked for."""
    flags.FLAGS([argument for argument in argv if argument not in HELP])
    config = load_config(CONFIG.value)
    apply_overrides(config, overrides)
    with open(BASE_CONFIG, encoding="utf-8") as file:
        options = describe_options(file.read(), config)
    own = "\n".join(f"  --{flag.name}: {flag.help}" for flag in (flags.FLAGS["config"], flags.FLAGS["dry_run"]))
    return f"{__doc__}\n{own}\n\nOptions, as {CONFIG.value} sets them:\n\n{options}"


def planned(argv: list[str], overrides: list[tuple[str, str]]) -> tuple[ConfigDict, RunPlan]:
    # PLAN   batch arithmetic and every user error, before anything is loaded
    if len(argv) > 1:
        raise ConfigError(f"unexpected arguments {argv[1:]}; options are written --config.KEY=VALUE")
    config = load_config(CONFIG.value)
    apply_overrides(config, overrides)
    remember_secrets(config.to_dict())
    world_sizes = (int(os.environ.get(name, 0)) for name in WORLD_SIZE_VARIABLES)
    return config, make_plan(config, num_processes=next((size for size in world_sizes if size > 0), 1))


def dry_run(plan: RunPlan, overrides: list[tuple[str, str]]) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    from ddpo_pytorch.dry_run import describe

    for warning in plan.warnings:
        print(warning, flush=True)
    benchmark = Path(__file__).with_name("benchmark.py")
    arguments = [f"--config={CONFIG.value}", *(f"--config.{key}={value}" for key, value in overrides)]
    print(describe(plan, benchmark, arguments), flush=True)


def run(config: ConfigDict, plan: RunPlan, rescue: Rescue) -> None:
    # Not before the plan stands: these take seconds to import, and a typing error should not.
    from ddpo_pytorch import checkpoints, launch, metrics, policy, rollout, update
    from ddpo_pytorch.checkpoints import ModelIdentity, TrainingState
    from ddpo_pytorch.distributed import Phases, check_others, count_together, fail_together, seed_epoch
    from ddpo_pytorch.evaluation import Evaluations, Progress
    from ddpo_pytorch.launch import ProgressBar
    from ddpo_pytorch.scoring import RewardWorkers
    from ddpo_pytorch.stat_tracking import PerPromptStatTracker, spread_within_and_between
    from ddpo_pytorch.trajectories import shuffled_updates, take
    from ddpo_pytorch.weighted_sum import WeightedSum

    pretrained, lora, sample, train = config.pretrained, config.lora, config.sample, config.train
    launch.lock_what_is_resumed(config)
    checkpoint, resumed, skipped = checkpoints.find_resumed(
        config.resume_from, config.resume, config.logdir, config.run_name, config.num_epochs
    )
    identity = ModelIdentity(
        pretrained_model=pretrained.model,
        base_unet=None,
        use_8bit_adam=train.use_8bit_adam,
        use_lora=config.use_lora,
        lora_rank=lora.rank if config.use_lora else None,
        lora_target_modules=list(lora.target_modules) if config.use_lora else None,
    )
    if resumed is not None:
        checkpoints.check_identity(resumed.model, identity, checkpoint)
    accelerator = launch.make_accelerator(config)
    assert accelerator.num_processes == plan.num_processes, "Accelerate counts other processes than the plan"
    launch.check_same_start(accelerator, checkpoint)
    if checkpoint is not None and resumed is not None and resumed.epoch >= config.num_epochs:
        return accelerator.print(checkpoints.nothing_left(checkpoint, resumed, config.num_epochs))
    if checkpoint is not None and resumed is not None and resumed.evaluation.get("stopped") and config.early_stop:
        return accelerator.print(checkpoints.stopped_early(checkpoint, resumed))
    policy.check_device(accelerator.device, config.mixed_precision, train.use_8bit_adam)
    phases = Phases(accelerator, timeout=60 * config.timeout_minutes, rescue=rescue)
    for warning in [*plan.warnings, *(f"warning: {problem}" for problem in skipped)]:
        accelerator.print(warning, flush=True)

    # LOAD   what scores the images; frozen VAE and text encoder, trainable UNet
    phases.enter("loading the reward")
    reward_fn = launch.make_reward(accelerator, plan)
    workers = RewardWorkers(
        reward_fn,
        name=config.reward_fn,
        device=accelerator.device,
        num_workers=config.num_reward_workers,
        timeout=config.reward_timeout,
        samples_per_epoch=plan.samples_per_epoch_total,
        max_failed_fraction=config.max_failed_fraction,
        count_together=functools.partial(count_together, accelerator) if plan.num_processes > 1 else None,
    )
    eval_workers = {}
    if plan.eval_sets:
        eval_rewards = launch.make_eval_rewards(accelerator, plan, reward_fn)
        eval_workers = launch.eval_workers(eval_rewards, accelerator.device, config)
    phases.enter("loading the model")
    scheduler = policy.load_scheduler(
        pretrained.model, pretrained.revision, sample.num_steps, sample.eta, accelerator.device
    )
    pipeline = policy.load_pipeline(pretrained.model, pretrained.revision, scheduler)
    identity.base_unet = policy.unet_fingerprint(pipeline.unet)
    if resumed is not None:
        checkpoints.check_identity(resumed.model, identity, checkpoint)
    model, optimizer = launch.make_policy(accelerator, config, pipeline, scheduler, checkpoint)
    phases.enter("starting")

    # What a resumed run takes up besides its weights
    tracking = config.per_prompt_stat_tracking
    tracker = PerPromptStatTracker(tracking.buffer_size, tracking.min_count) if tracking is not None else None
    progress = Progress()  # of the evaluations
    first_epoch, global_step, log_step, run_ids = 0, 0, 0, {}
    if resumed is not None:
        first_epoch, global_step, log_step = resumed.epoch, resumed.global_step, resumed.log_step
        run_ids = resumed.tracker_run_ids
        progress.load_state_dict(resumed.evaluation)
        checkpoints.restore_optimizer(checkpoint, optimizer)
        if accelerator.scaler is not None and resumed.scaler is not None:
            accelerator.scaler.load_state_dict(resumed.scaler)
        if tracker is not None and resumed.stat_tracker is not None:
            tracker.load_state_dict(resumed.stat_tracker)
        if isinstance(reward_fn, WeightedSum) and resumed.reward is not None:
            reward_fn.load_state_dict(resumed.reward)

    # Where results go
    run_name, run_folder = launch.open_run_folder(accelerator, config, checkpoint, resumed)
    with fail_together(accelerator):
        log = metrics.RunLog(accelerator, run_folder, first_epoch, launch.goes_another_way(plan, resumed))
        if log.needs_new_run:
            accelerator.print("warning: options have changed since steps that dashboards have: a new run there")
            run_ids = {}
        run_ids |= metrics.start_trackers(accelerator, run_folder, run_name, without_secrets(config.to_dict()), run_ids)
    accelerator.print(launch.describe(plan, accelerator, model, run_folder, resumed), flush=True)

    # EVALUATE   the same prompts and the same noise every time; nothing of it reaches training
    evaluations = Evaluations(run_folder / "eval")
    evaluate = functools.partial(
        launch.evaluate_together, accelerator, plan, model, eval_workers, log, evaluations, progress
    )
    write_report = functools.partial(launch.write_report, run_folder, BASE_CONFIG)
    if accelerator.is_main_process:
        evaluations.forget_later(first_epoch)
    if first_epoch == 0 and plan.evaluates(0):
        phases.enter("evaluating before training")
        evaluate(epochs=0, step=log_step)

    skipped_steps = update.SkippedSteps(train.max_skipped_steps)
    loop_started = time.perf_counter()
    max_logp_gap = train.max_logp_gap or train.clip_range / 10
    for epoch in range(first_epoch, config.num_epochs):
        # SAMPLE   draw prompts, denoise them, remember every step and how likely it was
        if config.offload:
            model.move_rest(accelerator.device)
        phases.enter(f"epoch {epoch}: sampling")
        started = time.perf_counter()
        random_streams = seed_epoch(config.seed, epoch, accelerator.process_index, accelerator.device)
        with fail_together(accelerator):
            prompts, prompt_metadata = rollout.draw_prompts(
                plan.prompt_fn,
                config.prompt_fn_kwargs.to_dict(),
                count=plan.samples_per_epoch_per_process,
                name=config.prompt_fn,
            )
            with ProgressBar(f"epoch {epoch}: sampling", plan.denoising_steps_per_epoch, accelerator) as bar:

                def on_step(bar: ProgressBar = bar) -> None:
                    bar.update()
                    check_others(accelerator)

                samples = rollout.sample_epoch(
                    model,
                    prompts,
                    prompt_metadata,
                    batch_size=sample.batch_size,
                    generator=random_streams.noise,
                    workers=workers,
                    on_step=on_step,
                )
            sampled = time.perf_counter()

            # REWARD   most are scored already; compare them with what their prompt usually earns
            with ProgressBar(f"epoch {epoch}: waiting for rewards", len(workers), accelerator) as bar:
                scores = workers.collect(on_batch=bar.update, on_wait=lambda: check_others(accelerator))
        all_prompts, all_scores, picked, best_and_worst = rollout.gather_samples(
            accelerator, samples, scores, config.reward_fn, config.max_failed_fraction, config.num_log_images
        )
        all_rewards = rollout.combined_rewards(reward_fn, all_scores)
        all_advantages = rollout.compute_advantages(tracker, all_prompts, all_rewards)
        advantages = rollout.own_share(accelerator, all_advantages)
        rewarded = time.perf_counter()

        log.reward_queries += plan.samples_per_epoch_total
        within, between = spread_within_and_between(all_prompts, all_rewards)
        reward_metrics = {
            **metrics.reward_metrics(epoch, all_rewards, all_scores.details),
            "reward/std_within_prompts": within,
            "reward/std_between_prompts": between,
            "reward/own_statistics_share": tracker.own_share if tracker is not None else 0.0,
            "reward_queries": log.reward_queries,
        }
        with fail_together(accelerator):
            log.log(reward_metrics, step=log_step)
            captions = rollout.captions(picked, all_prompts, all_rewards, all_scores)
            origins = [f"epoch {epoch}, seed {config.seed}, sample {i}" for i in picked]
            log.log_images(list(picked.values()), captions, epoch=epoch, step=log_step, origins=origins)
            if best_and_worst:
                ranked = sorted(best_and_worst, key=lambda i: all_rewards[i])
                worst, best = (
                    (best_and_worst[i], all_prompts[i], float(all_rewards[i])) for i in (ranked[0], ranked[-1])
                )
                log.log_extremes(best, worst, epoch=epoch)
            log.draw_curve()
        if reward_metrics["reward_std"] == 0:
            accelerator.print("warning: all rewards of this epoch are equal, so there is nothing to learn", flush=True)
        reported = time.perf_counter()

        # TRAIN   replay the steps in random order; make good ones likelier, within clip_range
        if config.offload:
            model.move_rest("cpu")
        phases.enter(f"epoch {epoch}: training")
        if train.recompute_log_probs:
            update.recompute_log_probs(model, samples.trajectories, train.batch_size, train.timesteps_per_forward)
        results: list[update.UpdateResult] = []
        bar = ProgressBar(f"epoch {epoch}: training", plan.micro_batches_per_epoch, accelerator)
        for inner_epoch in range(train.num_inner_epochs):
            for indices in shuffled_updates(
                num_samples=len(prompts),
                num_steps=sample.num_steps,
                num_train_steps=plan.num_train_timesteps,
                batch_size=train.batch_size,
                groups_per_update=train.gradient_accumulation_steps,
                generator=random_streams.shuffle,
                timesteps_per_forward=train.timesteps_per_forward,
            ):
                if train.target_kl and results and results[-1].statistics["policy/kl_nats"] > train.target_kl:
                    break
                learning_rate = update.learning_rate_at(global_step, train.learning_rate, train.lr_warmup_steps)
                result = update.optimizer_step(
                    accelerator,
                    model,
                    optimizer,
                    (take(samples.trajectories, advantages, *i, accelerator.device) for i in bar.over(indices)),
                    num_micro_batches=len(indices),
                    learning_rate=learning_rate,
                    clip_range=train.clip_range,
                    adv_clip_max=train.adv_clip_max,
                    max_grad_norm=train.max_grad_norm,
                    before_sync=lambda place=f"epoch {epoch}: update {log_step}": phases.enter(place),
                )
                position = {"epoch": epoch, "inner_epoch": inner_epoch, "learning_rate": learning_rate}
                log.log({**result.statistics, **position}, step=log_step)
                if result.skipped:
                    accelerator.print(f"warning: update {log_step} was skipped: {result.cause}", flush=True)
                log_step += 1
                global_step += not result.skipped  # a skipped update is none
                results.append(result)
                skipped_steps.count(result)
        bar.close()
        # The policy that sampled, replayed by the first update: the gap is rounding alone.
        if (warning := update.gap_warning(results[0], max_logp_gap)) is not None:
            accelerator.print(warning, flush=True)
        trained = time.perf_counter()

        # EVALUATE
        is_best = False
        if plan.evaluates(epoch + 1):
            phases.enter(f"epoch {epoch}: evaluating")
            _, is_best = evaluate(epochs=epoch + 1, step=log_step - 1)

        epoch_metrics = {
            "epoch": epoch,
            "reward_queries": log.reward_queries,
            "policy/logp_gap": results[0].logp_gap,
            "policy/logp_gap_timestep": results[0].logp_gap_timestep,
            "policy/updates": len(results),
            "policy/skipped_steps": sum(result.skipped for result in results),
            "time/sample_s": sampled - started,
            "time/reward_s": rewarded - sampled,
            "time/reward_hidden_share": workers.hidden_share,
            "time/train_s": trained - reported,
            "time/epoch_s": time.perf_counter() - started,
        }
        with fail_together(accelerator):
            log.log(epoch_metrics, step=log_step - 1, is_last=True)
        shown = {**reward_metrics, **results[-1].statistics, **epoch_metrics}
        per_epoch = (time.perf_counter() - loop_started) / (epoch + 1 - first_epoch)
        left = per_epoch * (config.num_epochs - epoch - 1)
        accelerator.print(metrics.summary(shown, log.start_mean(epoch), left, config.num_epochs), flush=True)

        # SAVE   everything needed to continue as if nothing had happened
        phases.enter(f"epoch {epoch}: saving")
        is_last = epoch + 1 == config.num_epochs or progress.stopped
        is_due = is_last or (config.save_freq > 0 and (epoch + 1) % config.save_freq == 0)
        launch.save_together(
            accelerator,
            run_folder,
            pipeline.unet,
            optimizer,
            TrainingState(
                epoch=epoch + 1,
                global_step=global_step,
                log_step=log_step,
                run_name=run_name,
                model=identity,
                stat_tracker=tracker.state_dict() if tracker is not None else None,
                reward=reward_fn.state_dict() if isinstance(reward_fn, WeightedSum) else None,
                tracker_run_ids=run_ids,
                scaler=accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
                evaluation=progress.state_dict() if plan.eval_sets else {},
                num_processes=plan.num_processes,
                config=without_secrets(config.to_dict()),
            ),
            is_due=is_due,
            num_checkpoint_limit=config.num_checkpoint_limit,
            rescue=rescue,
            is_best=is_best,
        )
        if is_due or plan.evaluates(epoch + 1):
            log.in_background(write_report)
        if progress.stopped:
            accelerator.print(launch.why_stopped(config, progress), flush=True)
            break

    log.wait()
    workers.close()
    if global_step == (resumed.global_step if resumed is not None else 0):
        raise RunFailure("every update was skipped, so nothing was learned; the warnings above say why")
    phases.close()
    accelerator.end_training()
    accelerator.print(f"finished: {run_folder}, see {run_folder / 'report.html'}", flush=True)


def main(argv: list[str], overrides: list[tuple[str, str]]) -> None:
    rescue = Rescue()
    try:
        end_on_signals(rescue)
        config, plan = planned(argv, overrides)
        if DRY_RUN.value:
            dry_run(plan, overrides)
        else:
            run(config, plan, rescue)
    except BaseException as error:
        rescue.end(error)
    # Taking down the interpreter under threads of torch and gloo aborted one in many runs that were complete.
    leave(0)


if __name__ == "__main__":
    arguments, config_overrides = split_overrides(sys.argv)
    if set(arguments) & set(HELP):
        try:
            print(usage(arguments, config_overrides))
        except (ConfigError, flags.Error) as wrong:
            sys.exit(f"error: {wrong}")
        sys.exit(0)
    for argument in arguments[1:]:
        name = argument.lstrip("-").partition("=")[0]
        if argument.startswith("-") and not {name, name.removeprefix("no")} & set(flags.FLAGS):
            sys.exit(f"error: unknown flag --{name}; options are written --config.KEY=VALUE")
    sys.argv = without_secret_arguments(arguments, config_overrides)  # dashboards show them
    app.run(functools.partial(main, overrides=config_overrides), argv=arguments)
