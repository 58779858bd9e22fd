"""The four published experiments on a machine with eight 80 GB GPUs: --config config/dgx.py:NAME"""

import os
import runpy

base = runpy.run_path(os.path.join(os.path.dirname(__file__), "base.py"))


def compressibility():
    """Goal: images that JPEG makes small. Prompts: ImageNet's 398 animals.

    accelerate launch scripts/train.py --config config/dgx.py:compressibility        on 8 GPUs

    Samples per epoch: 8 GPUs x 8 x 4 batches = 256. Per update: 8 GPUs x 4 x 2 accumulated = 64: 4 updates per epoch.
    """
    config = base["get_config"]()

    config.pretrained.model = "CompVis/stable-diffusion-v1-4"

    config.num_epochs = 100
    config.save_freq = 1
    config.num_checkpoint_limit = 100000000

    # 48 pictures every ten epochs, of prompts seen and unseen: about half a per cent of the run. Training is the same.
    config.eval.every = 10

    config.sample.batch_size = 8
    config.sample.num_batches_per_epoch = 4

    config.train.batch_size = 4
    config.train.gradient_accumulation_steps = 2

    config.prompt_fn = "imagenet_animals"
    config.prompt_fn_kwargs = {}

    config.reward_fn = "jpeg_compressibility"

    config.per_prompt_stat_tracking = {"buffer_size": 16, "min_count": 16}

    return config


def incompressibility():
    """Goal: images full of detail. The rest as in `compressibility`: 256 samples and 4 updates per epoch on 8 GPUs.

    accelerate launch scripts/train.py --config config/dgx.py:incompressibility      on 8 GPUs
    """
    config = compressibility()
    config.reward_fn = "jpeg_incompressibility"
    return config


def aesthetic():
    """Goal: images that LAION's aesthetic predictor likes. Prompts: 45 common animals.

    accelerate launch scripts/train.py --config config/dgx.py:aesthetic              on 8 GPUs

    Samples per epoch: 8 GPUs x 8 x 4 batches = 256. Per update: 8 GPUs x 4 x 4 accumulated = 128: 2 updates per epoch.
    """
    config = compressibility()
    config.num_epochs = 200
    config.reward_fn = "aesthetic_score"

    # This reward is harder to optimise, so half as many updates, over twice as many samples.
    config.train.gradient_accumulation_steps = 4

    config.prompt_fn = "simple_animals"
    config.per_prompt_stat_tracking = {"buffer_size": 32, "min_count": 16}
    return config


def prompt_image_alignment():
    """Goal: images of animals doing what the prompt says, judged by a vision-language model on the other two GPUs.

    CUDA_VISIBLE_DEVICES=6,7 vllm serve llava-hf/llava-1.5-13b-hf --port 8000 --data-parallel-size 2
    accelerate launch --num_processes 6 scripts/train.py --config config/dgx.py:prompt_image_alignment

    Samples per epoch: 6 GPUs x 8 x 6 batches = 288. Per update: 6 GPUs x 4 x 6 accumulated = 144: 2 updates per epoch.
    """
    config = compressibility()
    config.num_epochs = 200
    config.reward_fn = "llava_bertscore"
    # Where the model is served, by whatever engine. Each training process has up to 8 questions under way.
    config.reward_fn_kwargs = {"base_url": "http://127.0.0.1:8000/v1", "concurrency": 8}

    config.sample.num_batches_per_epoch = 6
    config.train.gradient_accumulation_steps = 6

    config.prompt_fn = "nouns_activities"
    config.prompt_fn_kwargs = {"nouns_file": "simple_animals.txt", "activities_file": "activities.txt"}
    config.per_prompt_stat_tracking = {"buffer_size": 32, "min_count": 16}
    return config


EXPERIMENTS = {f.__name__: f for f in (compressibility, incompressibility, aesthetic, prompt_image_alignment)}


def get_config(name=""):
    if name not in EXPERIMENTS:
        given = f'there is no experiment "{name}"' if name else "name an experiment"
        raise ValueError(f"{given}: --config config/dgx.py:NAME, with NAME one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]()
