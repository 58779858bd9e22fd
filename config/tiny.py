"""The model that ships with this package, on a laptop CPU (or its GPU), in minutes: --config config/tiny.py[:NAME]"""

import os
import runpy

import ddpo_pytorch

base = runpy.run_path(os.path.join(os.path.dirname(__file__), "base.py"))


def compressibility():
    """Goal: see a reward rise in minutes. 45 animals at 64x64 pixels become smaller JPEGs: backgrounds turn plain.

    accelerate launch scripts/train.py --config config/tiny.py        2 CPU cores

    Samples per epoch: 24 x 2 batches = 48. Per update: 12 x 1 = 12, so 4 updates per epoch.
    """
    config = base["get_config"]()

    config.pretrained.model = os.path.join(os.path.dirname(ddpo_pytorch.__file__), "assets", "tiny_sd")
    config.mixed_precision = "no"
    config.cpu_threads = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    config.num_epochs = 14
    config.save_freq = 2

    config.sample.num_steps = 10
    config.sample.guidance_scale = 4.0
    config.sample.batch_size = 24
    config.sample.num_batches_per_epoch = 2

    config.train.batch_size = 12
    config.train.gradient_accumulation_steps = 1
    config.train.learning_rate = 5e-3
    config.train.lr_warmup_steps = 4
    # Latents have 4x16x16 dimensions here: 1.6e-3 on their mean is what 1e-4 is at 4x64x64.
    config.train.clip_range = 1.6e-3
    config.lora.rank = 8

    config.prompt_fn = "simple_animals"
    config.reward_fn = "jpeg_compressibility"
    # A prompt comes up about once an epoch, so its own statistics must count early.
    config.per_prompt_stat_tracking = {"buffer_size": 16, "min_count": 4}
    return config


def incompressibility():
    """Goal: the opposite, busy pictures. Samples and updates as in `compressibility`.

    accelerate launch scripts/train.py --config config/tiny.py:incompressibility        2 CPU cores
    """
    config = compressibility()
    config.reward_fn = "jpeg_incompressibility"
    return config


EXPERIMENTS = {f.__name__: f for f in (compressibility, incompressibility)}


def get_config(name="compressibility"):
    if name not in EXPERIMENTS:
        raise ValueError(
            f'there is no experiment "{name}": --config config/tiny.py:NAME, with NAME one of {", ".join(EXPERIMENTS)}'
        )
    return EXPERIMENTS[name]()
