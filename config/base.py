"""Every option of scripts/train.py, with its default. Copy this file, or override: --config.train.learning_rate=1e-4

Batch sizes are per process. Whatever depends on the number of samples is checked before a model is loaded.
"""

import ml_collections


def get_config():
    """Stable Diffusion v1.5 with LoRA on one GPU, batch 1: for trying things out, far too small to learn from."""
    config = ml_collections.ConfigDict()

    ###### General ######
    # Run name: the run's folder is LOGDIR/RUN_NAME_DATE, and its name on the dashboards. Empty: the date alone.
    config.run_name = ""
    # Random seed. Prompts, noise and shuffles are a function of it, the epoch and the process.
    config.seed = 42
    # Folder for everything a run writes.
    config.logdir = "logs"
    # Epochs of sampling and training. Reward curves usually want 50 to 200.
    config.num_epochs = 100
    # Save a checkpoint every so many epochs; 0: only the last. The last epoch is saved in any case, and so is the last
    # complete one when the run is stopped or fails. A LoRA checkpoint is a few MB.
    config.save_freq = 20
    # Checkpoints kept, the newest ones.
    config.num_checkpoint_limit = 5
    # "fp16" (CUDA only), "bf16" or "no". With LoRA the frozen weights are held in this precision too; the LoRA
    # factors, trajectories and log-probabilities are always float32.
    config.mixed_precision = "fp16"
    # Matrix products in TensorFloat-32 on Ampere GPUs and newer: faster, a little less exact.
    config.allow_tf32 = True
    # Continue a run: one of its checkpoints, the folder of its checkpoints, or its folder (the newest whole one).
    config.resume_from = ""
    # "auto": go on with the newest run of this run_name, or start it if there is none; so one line can be repeated.
    config.resume = ""
    # Train a LoRA (few MB, little memory) or, if False, the whole UNet: then lower train.learning_rate to about 1e-5.
    # The main process keeps the last complete epoch's state in RAM, in case the run is stopped: for the whole UNet of
    # Stable Diffusion 1.5 about 10 GB, twice that while the next one is copied.
    config.use_lora = True
    # Where dashboards live: "wandb", "tensorboard" or another Accelerate tracker, several as "wandb,tensorboard", ""
    # for none. LOGDIR/RUN/metrics.jsonl, reward.png and images/ are written in any case.
    config.log_with = "wandb"
    # Images per epoch that are logged and drawn into LOGDIR/RUN/images, from all processes and batches.
    config.num_log_images = 16
    # Threads that compute rewards while the next batch is sampled. One is enough for rewards that use a GPU.
    config.num_reward_workers = 2
    # Share of an epoch's samples whose reward may fail (be NaN) before the run stops, 0 to 1.
    config.max_failed_fraction = 0.1
    # Seconds that a reward function may take for one batch of images before the run stops.
    config.reward_timeout = 600.0
    # CPU threads that this machine's processes share when there is no GPU. 0: as the launcher set them.
    config.cpu_threads = 0
    # Text encoder and VAE leave the GPU while the UNet is trained: 0.4 GB less for Stable Diffusion 1.5 in half
    # precision, for a second or so per epoch. Without a GPU it does nothing.
    config.offload = False
    # torch.compile the UNet: minutes at the start. Sampling and training are compiled apart: look at policy/logp_gap.
    config.compile = False
    # Minutes that processes wait for each other, for instance for the slowest one's rewards, before the run stops.
    config.timeout_minutes = 60.0

    ###### Evaluation ######
    # The same prompts with the same noise, drawn and scored as the run goes; nothing of it reaches training.
    config.eval = evaluation = ml_collections.ConfigDict()
    # Epochs between two evaluations, of which there is one before the first epoch and one after the last; 0: none. One
    # samples num_prompts x num_seeds pictures of each set, shared over the processes.
    evaluation.every = 0
    # Sets of prompts: "train" (those of prompt_fn), or "[NAME=]FILE[LOW:HIGH]" for (some lines of) a file of yours or a
    # shipped list, one prompt a line. Watch one that training never sees.
    evaluation.prompts = ("train", "unseen_animals.txt", "everyday_objects.txt")
    # Prompts of each set, its first ones.
    evaluation.num_prompts = 8
    # Pictures of each prompt, by seeds 0, 1, ... Two at least tell diversity.
    evaluation.num_seeds = 2
    # Rewards to look at beside the trained one: names as reward_fn takes them, or {"reward_fn": NAME, "kwargs": {...},
    # "label": NAME}. One that training does not see tells whether the trained one is being fooled.
    evaluation.rewards = ()
    # Metric whose best state is kept in LOGDIR/RUN/best, such as "eval/unseen_animals/reward_mean", or with "-" before
    # it where less is better; empty: none.
    config.save_best = ""
    # Metric at whose drop the run ends: clearly below its best, by two standard errors of the paired difference, in
    # early_stop_patience evaluations in a row. Named as for save_best; empty: none.
    config.early_stop = ""
    config.early_stop_patience = 2

    ###### LoRA ######
    config.lora = lora = ml_collections.ConfigDict()
    # Rank of the factors. Memory and checkpoint size grow with it.
    lora.rank = 4
    # Layers of the UNet that get factors, by the end of their names. Here: every attention's projections.
    lora.target_modules = ("to_q", "to_k", "to_v", "to_out.0")

    ###### Pretrained Model ######
    config.pretrained = pretrained = ml_collections.ConfigDict()
    # Stable Diffusion 1.x or 2.x to start from: a hub id, or a folder in diffusers' layout.
    pretrained.model = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    # Revision on the hub: a branch, tag or commit.
    pretrained.revision = "main"

    ###### Sampling ######
    config.sample = sample = ml_collections.ConfigDict()
    # DDIM steps per image. Sampling and training time are linear in it.
    sample.num_steps = 50
    # Noise in each step, 0 < eta <= 1; 1 is DDPM's. Without noise a step has no probability to train.
    sample.eta = 1.0
    # Classifier-free guidance scale. At 1 or below there is none, and both phases take half the time.
    sample.guidance_scale = 5.0
    # Images per forward pass. The memory that sampling needs grows with it.
    sample.batch_size = 1
    # Batches per epoch and process. Samples per epoch = this x batch_size x processes.
    sample.num_batches_per_epoch = 2

    ###### Training ######
    config.train = train = ml_collections.ConfigDict()
    # Samples per forward and backward pass; divides sample.batch_size. Memory grows with it.
    train.batch_size = 1
    # AdamW with 8-bit states, from bitsandbytes. Saves memory when the whole UNet is trained, hardly any with LoRA.
    train.use_8bit_adam = False
    # AdamW's learning rate: about 3e-4 for LoRA, 1e-5 for the whole UNet.
    train.learning_rate = 3e-4
    # Updates over which the learning rate rises from 0. Adam's first steps are its largest.
    train.lr_warmup_steps = 0
    # AdamW's decay rates of its two moments, its weight decay and epsilon.
    train.adam_beta1 = 0.9
    train.adam_beta2 = 0.999
    train.adam_weight_decay = 1e-4
    train.adam_epsilon = 1e-8
    # Micro-batches of samples per update. An update is over batch_size x this x processes samples, all their timesteps.
    train.gradient_accumulation_steps = 1
    # Gradients are scaled down to this norm.
    train.max_grad_norm = 1.0
    # Passes over each epoch's samples. More than one reuses samples of an older policy.
    train.num_inner_epochs = 1
    # Guidance in training as in sampling. Must be True where sample.guidance_scale is above 1.
    train.cfg = True
    # Passes of the UNet per step with guidance. 1: both halves in one batch. 2: one after the other, with the same
    # gradients; in training, activations of one half are held at a time, and the other's are computed twice.
    train.cfg_passes = 1
    # Gradient through the unconditional half of guidance. False is cheaper, and another gradient than the original's.
    train.uncond_grad = True
    # Keep few activations and compute the others again: less memory in a training step, a fifth more time.
    train.gradient_checkpointing = False
    # Timesteps of each sample in one forward pass; divides the number of trained timesteps. The gradient is the same.
    # A pass is then over this x batch_size: few samples of many steps fill a GPU as well as many samples do.
    train.timesteps_per_forward = 1
    # Advantages are clamped to +- this many standard deviations.
    train.adv_clip_max = 5
    # PPO's clip range for the ratio of mean-per-dimension probabilities. 1e-4 suits 4x64x64 latents, where it bounds a
    # step's log-ratio by 1.64 nats; for smaller latents raise it in proportion (4x16x16: 1.6e-3).
    train.clip_range = 1e-4
    # Share of each sample's timesteps trained on, drawn at random. Less is faster and noisier.
    train.timestep_fraction = 1.0
    # Updates in a row that may be skipped for gradients that are not finite before the run stops.
    train.max_skipped_steps = 20
    # Difference of log-probabilities (nats per dimension) between sampling and training above which a warning is given.
    # 0: a tenth of clip_range.
    train.max_logp_gap = 0.0
    # Replace the sampled log-probabilities by the training path's own, where batch shapes or kernels must differ.
    # Costs a forward pass for every sample and step.
    train.recompute_log_probs = False
    # Leave out the rest of an epoch's updates once the policy is this far from the one that sampled: KL per step, in
    # nats over all dimensions. 0: never.
    train.target_kl = 0.0

    ###### Prompt Function ######
    # A function of ddpo_pytorch/prompts.py, "package.module:function" or "path/to/file.py:function".
    config.prompt_fn = "imagenet_animals"
    # Its arguments.
    config.prompt_fn_kwargs = {}

    ###### Reward Function ######
    # A function of ddpo_pytorch/rewards.py, "package.module:function" or "path/to/file.py:function"; "weighted_sum" is
    # several of them. docs/rewards.md has what they measure, need and cost.
    config.reward_fn = "jpeg_compressibility"
    # Its arguments.
    config.reward_fn_kwargs = {}

    ###### Per-Prompt Stat Tracking ######
    # Normalise rewards by what their own prompt earned lately; None: by the batch's mean and standard deviation.
    config.per_prompt_stat_tracking = ml_collections.ConfigDict()
    # Latest rewards kept per prompt.
    config.per_prompt_stat_tracking.buffer_size = 16
    # Rewards a prompt needs before its own statistics are used. At most buffer_size.
    config.per_prompt_stat_tracking.min_count = 16

    return config
