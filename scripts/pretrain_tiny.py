"""Trains `ddpo_pytorch/assets/tiny_sd`, a Stable Diffusion pipeline that draws 45 animals at 64x64 pixels on a CPU.

The data are emoji from four npm packages (Apache-2.0 and MIT), so the data stage needs `npm` and `pip install
resvg-py`; nothing else in this repository does. About 70 minutes on two cores; every stage can be resumed or run alone:
`OMP_WAIT_POLICY=passive python scripts/pretrain_tiny.py --stage all`.
"""

import argparse
import colorsys
import copy
import io
import json
import math
import subprocess
import tarfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from PIL import Image
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from ddpo_pytorch.metrics import image_grid
from ddpo_pytorch.rewards import jpeg_kilobytes, to_uint8
from ddpo_pytorch.tiny_classifier import ANIMALS, WEIGHTS, TinyClassifier, load_tiny_classifier

SIZE = 64
MAX_LENGTH = 16  # tokens in a prompt; Stable Diffusion's 77 would only be padding here
PACKAGES = {"noto": "1.2.9", "noto-v1": "1.2.5", "fluent-emoji": "1.2.7", "fluent-emoji-flat": "1.2.6"}
# Animals that are not here are drawn from the glyph that bears their name. A glyph serves one animal only, and
# look-alikes (the full-body mouse, which is a rat in all but name) serve none.
GLYPHS = {
    "cat": ["cat", "cat-face"],
    "dog": ["dog", "dog-face", "poodle"],
    "horse": ["horse", "horse-face"],
    "monkey": ["monkey", "monkey-face"],
    "rabbit": ["rabbit", "rabbit-face"],
    "bird": ["bird", "parrot"],
    "sheep": ["ewe", "ram"],
    "cow": ["cow", "cow-face"],
    "tiger": ["tiger", "tiger-face"],
    "beetle": ["beetle", "lady-beetle"],
    "butterfly": ["butterfly", "monarch-butterfly"],
    "fish": ["fish", "tropical-fish"],
    "whale": ["whale", "spouting-whale"],
    "squirrel": ["chipmunk"],
    "mouse": ["mouse-face"],
    "chicken": ["chicken", "rooster"],
    "bee": ["honeybee"],
    "pig": ["pig", "pig-face"],
    "camel": ["camel", "two-hump-camel"],
}
# The bare name is what the pipeline is asked for; the others keep it from being thrown by more words.
TEMPLATES = ["{}"] * 8 + ["a {}"] * 3 + ["an {}", "the {}", "a photo of a {}", "a picture of a {}"]
TEMPLATES += ["a {} riding a bike", "a {} washing dishes", "a {} playing chess"]


def fetch_glyphs(work: Path) -> dict[str, list[Image.Image]]:
    """Downloads the emoji packages and renders every glyph of every animal as a 128x128 RGBA picture."""
    import resvg_py

    glyphs: dict[str, list[Image.Image]] = {animal: [] for animal in ANIMALS}
    for package, version in PACKAGES.items():
        archive = work / f"iconify-json-{package}-{version}.tgz"
        if not archive.exists():
            subprocess.run(["npm", "pack", "--silent", f"@iconify-json/{package}@{version}"], cwd=work, check=True)
        with tarfile.open(archive) as tar:
            icons = json.load(tar.extractfile("package/icons.json"))
        for animal, pictures in glyphs.items():
            for name in GLYPHS.get(animal, [animal]):
                icon = icons["icons"].get(name)
                if icon is None:
                    continue
                box = f"0 0 {icon.get('width', icons['width'])} {icon.get('height', icons['height'])}"
                svg = (
                    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
                    f'viewBox="{box}">{icon["body"]}</svg>'
                )
                png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=128, height=128))
                pictures.append(Image.open(io.BytesIO(png)).convert("RGBA"))
    return glyphs


def colour(rng: np.random.Generator) -> np.ndarray:
    """A light colour, which most animals stand out from; RGB in [0, 1]."""
    return np.array(colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.05, 0.45), rng.uniform(0.8, 1.0)))


def background(rng: np.random.Generator) -> Image.Image:
    """A background that says nothing about the animal, from blank (a small JPEG) to busy (a large one).

    The bundled weights saw finer and fainter patterns, and fewer, in the autoencoder's training and in the first 3000
    steps of the U-Net's.
    """
    kind = rng.choice(["white", "plain", "gradient", "stripes", "checks", "dots"], p=[0.1, 0.2, 0.1, 0.25, 0.15, 0.2])
    first, second = (np.ones(3), np.ones(3)) if kind == "white" else (colour(rng), colour(rng))
    if kind in ("stripes", "checks", "dots"):
        second = second * rng.uniform(0.55, 0.8)  # a contrast that the U-Net does not take for noise
    # At least three pixels of the latents, which are a quarter of the size: finer ones it averages away.
    angle, period = rng.uniform(0, math.pi), rng.uniform(13, 28)
    y, x = np.mgrid[:SIZE, :SIZE] - SIZE / 2 + rng.uniform(-8, 8)
    u, v = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
    wave_u, wave_v = np.sin(2 * math.pi * u / period), np.sin(2 * math.pi * v / period)
    edge = period / 4  # steep enough for a hard edge one pixel wide, which is antialiased
    mask = {
        "gradient": 0.5 + u / SIZE,
        "stripes": 0.5 + edge * wave_u,
        "checks": 0.5 + edge * wave_u * wave_v,
        "dots": 0.5 + edge * (wave_u + wave_v - 0.8),
    }.get(kind, np.zeros_like(x))
    mask = np.clip(mask, 0, 1)[..., None]
    return Image.fromarray(np.uint8(255 * (first * (1 - mask) + second * mask)))


def augment(glyph: Image.Image, rng: np.random.Generator) -> np.ndarray:
    """Puts a glyph, flipped, turned, scaled and shifted at random, on a random background; uint8 HWC."""
    canvas = background(rng)
    if rng.random() < 0.5:
        glyph = glyph.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    side = int(rng.uniform(0.8, 0.98) * SIZE)
    # Premultiplied alpha, lest the hidden black of transparent pixels bleed into the outline.
    glyph = glyph.convert("RGBa").rotate(rng.uniform(-10, 10), Image.Resampling.BICUBIC).convert("RGBA")
    glyph = glyph.resize((side, side), Image.Resampling.LANCZOS)
    slack = SIZE - side
    corner = (int(rng.uniform(-0.05, 1.05) * slack), int(rng.uniform(-0.05, 1.05) * slack))
    canvas.paste(glyph, corner, glyph)
    return np.asarray(canvas)


def make_pool(glyphs: dict[str, list[Image.Image]], per_animal: int, seed: int) -> np.ndarray:
    """As many pictures of each animal, and among those of each of its glyphs; uint8 of shape (animals, n, H, W, 3)."""
    rng = np.random.default_rng(seed)
    return np.stack([[augment(glyphs[a][i % len(glyphs[a])], rng) for i in range(per_animal)] for a in ANIMALS])


def stage_data(args: argparse.Namespace) -> None:
    """Writes `pool.npy` for training and `held_out.npy`, other augmentations of the same glyphs, for testing."""
    glyphs = fetch_glyphs(args.work)
    print("glyphs:", sum(map(len, glyphs.values())), {animal: len(g) for animal, g in glyphs.items()})
    np.save(args.work / "pool.npy", make_pool(glyphs, args.per_animal, seed=0))
    np.save(args.work / "held_out.npy", make_pool(glyphs, 40, seed=1))


def load_pool(path: Path) -> torch.Tensor:
    """Pictures as uint8 of shape (animals * n, 3, H, W), each animal's in one run."""
    return torch.from_numpy(np.load(path)).flatten(0, 1).permute(0, 3, 1, 2)


def to_model(pictures: torch.Tensor) -> torch.Tensor:
    """uint8 pictures as the autoencoder sees them: in [-1, 1], in the memory layout that is fastest for it."""
    return pictures.contiguous(memory_format=torch.channels_last) / 127.5 - 1


def labels_of(pool: torch.Tensor) -> torch.Tensor:
    """The index in `ANIMALS` of each picture of a pool."""
    return torch.arange(len(ANIMALS)).repeat_interleave(len(pool) // len(ANIMALS))


def save_checkpoint(path: Path, step: int, parts: dict) -> None:
    """Saves the states of `parts`, leaving the previous checkpoint whole until this one is."""
    torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def load_checkpoint(path: Path, parts: dict) -> int:
    """Restores `parts`, if there is a checkpoint, and returns the step to go on from."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return state["step"]


def make_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 3,
        up_block_types=["UpDecoderBlock2D"] * 3,
        block_out_channels=[16, 32, 64],
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
        sample_size=SIZE,
    )


def gradient_l1(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """L1 between the differences of neighbouring pixels: what keeps outlines and eyes sharp."""
    d = a - b
    return d.diff(dim=2).abs().mean() + d.diff(dim=3).abs().mean()


def stage_vae(args: argparse.Namespace) -> None:
    """Trains the autoencoder, centres and scales its latents, and writes it to `vae/`."""
    pool = load_pool(args.work / "pool.npy")
    vae = make_vae().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.vae_steps, pct_start=0.1)
    parts = {"vae": vae, "optimizer": optimizer, "schedule": schedule}
    start = load_checkpoint(args.work / "vae.pt", parts) if args.resume else 0
    torch.manual_seed(start)  # other draws than those before the checkpoint
    started = time.time()
    for step in range(start + 1, args.vae_steps + 1):
        x = to_model(pool[torch.randint(len(pool), (16,))])
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(x).latent_dist
            decoded = vae.decode(posterior.sample()).sample.float()
        l1 = (decoded - x).abs().mean()
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        loss = l1 + gradient_l1(decoded, x) + 5e-4 * kl
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            speed = (time.time() - started) / (step - start)
            print(f"vae {step} l1 {l1:.4f} kl {kl:.3f} {speed:.3f} s/step", flush=True)
        if step % 500 == 0 or step == args.vae_steps:
            save_checkpoint(args.work / "vae.pt", step, parts)
    centre_latents(vae, pool)
    vae.save_pretrained(args.work / "vae")
    (args.work / "latents.pt").unlink(missing_ok=True)  # those of another autoencoder


@torch.no_grad()
def encode(vae: AutoencoderKL, pool: torch.Tensor) -> torch.Tensor:
    """The scaled latents (means of the posterior) of uint8 pictures, as the denoiser sees them."""
    parts = []
    for x in pool.split(200):
        with torch.autocast("cpu", torch.bfloat16):
            latents = vae.encode(to_model(x)).latent_dist.mean
        parts.append(latents.float() * vae.config.scaling_factor)
    return torch.cat(parts)


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    """Pictures, NCHW in [0, 1], of scaled latents."""
    parts = []
    for z in latents.split(200):
        with torch.autocast("cpu", torch.bfloat16):
            parts.append(vae.decode(z / vae.config.scaling_factor).sample.float().div(2).add(0.5).clamp(0, 1))
    return torch.cat(parts)


@torch.no_grad()
def centre_latents(vae: AutoencoderKL, pool: torch.Tensor) -> None:
    """Makes latents zero-mean, by moving biases, and of unit variance, by the factor that the pipeline reads.

    Stable Diffusion pipelines apply `scaling_factor` only, so the mean has to go into the 1x1 convolutions.
    """
    vae.register_to_config(scaling_factor=1.0)
    latents = encode(vae, pool[torch.randperm(len(pool))[:2000]])
    mean = latents.mean(dim=(0, 2, 3))
    vae.quant_conv.bias[:4] -= mean
    vae.post_quant_conv.bias += vae.post_quant_conv.weight[:, :, 0, 0] @ mean
    vae.register_to_config(scaling_factor=round(1 / (latents - mean[:, None, None]).std().item(), 4))
    print("latent mean", mean.tolist(), "scaling_factor", vae.config.scaling_factor)


def load_vae(work: Path) -> AutoencoderKL:
    return AutoencoderKL.from_pretrained(work / "vae").eval().to(memory_format=torch.channels_last)


def pool_latents(args: argparse.Namespace) -> torch.Tensor:
    """The scaled latents of the training pool, computed once; half precision."""
    path = args.work / "latents.pt"
    if not path.exists():
        torch.save(encode(load_vae(args.work), load_pool(args.work / "pool.npy")).half(), path)
    return torch.load(path, weights_only=True)


def degrade(images: torch.Tensor) -> torch.Tensor:
    """Blurs, tints and adds noise to pictures in [0, 1], so that the classifier looks at shapes, not at pixels."""
    n = len(images)
    blurred = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    images = torch.lerp(images, blurred, (torch.rand(n, 1, 1, 1) * 2 - 0.7).clamp(0, 1))
    images = images * (0.85 + 0.3 * torch.rand(n, 3, 1, 1)) + 0.1 * (torch.rand(n, 1, 1, 1) - 0.5)
    return (images + 0.08 * torch.rand(n, 1, 1, 1) * torch.randn_like(images)).clamp(0, 1)


def stage_classifier(args: argparse.Namespace) -> None:
    """Trains the classifier on renders and on decodings of their latents, some of them noisy."""
    pool = load_pool(args.work / "pool.npy")
    latents = pool_latents(args)[::4].float()
    latents += 0.35 * torch.rand(len(latents), 1, 1, 1) * torch.randn_like(latents)
    decoded = (decode(load_vae(args.work), latents) * 255).round().byte()
    images, labels = torch.cat([pool, decoded]), torch.cat([labels_of(pool), labels_of(decoded)])
    model = TinyClassifier().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.classifier_steps, pct_start=0.2)
    started = time.time()
    for step in range(1, args.classifier_steps + 1):
        batch = torch.randint(len(images), (96,))
        x = degrade(images[batch] / 255).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), labels[batch], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"classifier {step} loss {loss:.3f} {(time.time() - started) / step:.3f} s/step", flush=True)
    weights = {name: value.half() for name, value in model.state_dict().items() if value.is_floating_point()}
    save_file({name: value.contiguous() for name, value in weights.items()}, WEIGHTS)


def learn_merges(words: list[str]) -> list[tuple[str, str]]:
    """Learns byte-pair merges until each of `words` is one token."""
    spellings = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges = []
    while any(len(spelling) > 1 for spelling in spellings):
        pair = Counter(pair for s in spellings for pair in pairwise(s)).most_common(1)[0][0]
        merges.append(pair)
        for s in spellings:
            for i in range(len(s) - 2, -1, -1):
                if tuple(s[i : i + 2]) == pair:
                    s[i : i + 2] = ["".join(pair)]
    return merges


def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """A CLIP tokenizer that has a token for each byte and for each word of the prompts."""
    merges = learn_merges(sorted({*ANIMALS, *" ".join(TEMPLATES).replace("{}", "").split()}))
    alphabet = sorted(ByteLevel.alphabet())
    tokens = [*alphabet, *(c + "</w>" for c in alphabet), *map("".join, merges), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}, ensure_ascii=False))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]) + "\n")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=MAX_LENGTH)


def make_denoiser(tokenizer: CLIPTokenizer) -> nn.ModuleDict:
    """The U-Net and the text encoder, which are trained together."""
    unet = UNet2DConditionModel(
        sample_size=SIZE // 4,
        down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        block_out_channels=[48, 96, 96],
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=64,
        norm_num_groups=16,
    )
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        projection_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return nn.ModuleDict({"unet": unet, "text_encoder": CLIPTextModel(config)})


def make_scheduler() -> DDIMScheduler:
    """Stable Diffusion's own."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        steps_offset=1,
        set_alpha_to_one=False,
        clip_sample=False,
    )


def tokenize(tokenizer: CLIPTokenizer, prompts: list[str]) -> torch.Tensor:
    return tokenizer(prompts, padding="max_length", max_length=MAX_LENGTH, return_tensors="pt").input_ids


def learning_rate(step: int, total: int) -> float:
    """A short warm-up, a plateau and a linear descent to zero, so that a run can still be prolonged on the plateau."""
    return 1.5e-3 * min(1.0, step / 200, (total - step) / (0.4 * total))


def stage_unet(args: argparse.Namespace) -> None:
    """Trains the U-Net and the text encoder on the pool's latents, and keeps an average of their weights."""
    latents = pool_latents(args)
    per_animal = len(latents) // len(ANIMALS)
    tokenizer = make_tokenizer(args.work / "tokenizer")
    prompts = torch.stack([tokenize(tokenizer, [t.format(a) for a in ANIMALS]) for t in TEMPLATES])
    empty = tokenize(tokenizer, [""])[0]
    alphas = make_scheduler().alphas_cumprod
    # With epsilon as the target, min-SNR weighting (gamma 5) lets the steps that decide on the shape weigh more.
    weights = (5 * (1 - alphas) / alphas).clamp(max=1)

    model = make_denoiser(tokenizer)
    # Fused attention is slower than the plain one on a CPU for so few tokens.
    model["unet"].set_attn_processor(AttnProcessor())
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=1e-2, fused=True)
    parts = {"model": model, "ema": ema, "optimizer": optimizer}
    start = load_checkpoint(args.work / "unet.pt", parts) if args.resume else 0
    torch.manual_seed(start)  # other draws than those before the checkpoint
    started, losses, n = time.time(), [], args.batch
    for step in range(start + 1, args.unet_steps + 1):
        animals = torch.randint(len(ANIMALS), (n,))
        clean = latents[animals * per_animal + torch.randint(per_animal, (n,))].float()
        ids = prompts[torch.randint(len(TEMPLATES), (n,)), animals]
        ids[torch.rand(n) < 0.1] = empty  # for classifier-free guidance
        # One timestep from each n-th of the schedule makes the loss vary less than independent ones.
        t = ((torch.arange(n) + torch.rand(n)) * (1000 / n)).long()
        noise, alpha = torch.randn_like(clean), alphas[t].view(-1, 1, 1, 1)
        noisy = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
        with torch.autocast("cpu", torch.bfloat16):
            states = model["text_encoder"](ids).last_hidden_state
            predicted = model["unet"](noisy, t, states).sample
        error = (predicted.float() - noise).pow(2).mean(dim=(1, 2, 3))
        optimizer.param_groups[0]["lr"] = learning_rate(step, args.unet_steps)
        optimizer.zero_grad()
        (error * weights[t]).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay = min(0.999, (step + 1) / (step + 10))
        torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)
        losses.append(error.mean().item())
        if step % 100 == 0:
            speed = (time.time() - started) / (step - start)
            print(f"unet {step} loss {np.mean(losses[-100:]):.4f} {speed:.3f} s/step", flush=True)
        if step % 250 == 0 or step == args.unet_steps:
            save_checkpoint(args.work / "unet.pt", step, parts)


def stage_export(args: argparse.Namespace) -> None:
    """Writes the pipeline, with the averaged weights, in half precision but for the text encoder."""
    tokenizer = make_tokenizer(args.work / "tokenizer")
    model = make_denoiser(tokenizer)
    print("step", load_checkpoint(args.work / "unet.pt", {"ema": model}))
    vae = load_vae(args.work).half()
    vae.register_to_config(_name_or_path="")  # else the path of the work folder
    # Transformers would load a text encoder saved in half precision as such, and the pipeline's parts would disagree.
    pipe = StableDiffusionPipeline(
        vae=vae,
        text_encoder=model["text_encoder"],
        tokenizer=tokenizer,
        unet=model["unet"].half(),
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(args.out)
    make_tokenizer(args.out / "tokenizer")  # the two files that older transformers read


def draw(pipe: StableDiffusionPipeline, samples: int, eta: float) -> torch.Tensor:
    """Draws each animal `samples` times as Stable Diffusion does; in [0, 1] of shape (animals, samples, 3, H, W)."""
    generator = torch.Generator().manual_seed(0)
    rounds = []
    for _ in range(samples):
        images = pipe(list(ANIMALS), guidance_scale=5.0, eta=eta, generator=generator, output_type="pt").images
        rounds.append(images.float().cpu())
    return torch.stack(rounds, dim=1)


@torch.no_grad()
def accuracy(classifier: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Whether each picture is given its label, as 0 or 1."""
    guesses = torch.cat([classifier(part).argmax(dim=1) for part in images.split(200)])
    return (guesses == labels).float()


def stage_evaluate(args: argparse.Namespace) -> None:
    """Prints how good the classifier is, and how many of the pipeline's pictures it gives to the prompted animal."""
    classifier = load_tiny_classifier()
    held_out = load_pool(args.work / "held_out.npy")
    vae = load_vae(args.work)
    print(f"held-out renders: {accuracy(classifier, held_out / 255, labels_of(held_out)).mean():.3f}")
    decoded = decode(vae, encode(vae, held_out))
    print(f"the same, decoded: {accuracy(classifier, decoded, labels_of(held_out)).mean():.3f}")

    pipe = StableDiffusionPipeline.from_pretrained(args.out)
    pipe.set_progress_bar_config(disable=True)
    for eta in args.eta:
        images = draw(pipe, args.samples, eta)
        hits = accuracy(classifier, images.flatten(0, 1), labels_of(images.flatten(0, 1))).view(len(ANIMALS), -1)
        sizes = np.stack([jpeg_kilobytes(row) for row in images])
        print(f"eta {eta}: share given to the prompted animal, JPEG kilobytes (mean and standard deviation)")
        for animal, hit, size in zip(ANIMALS, hits, sizes, strict=True):
            print(f"  {animal:10} {hit.mean():.2f}  {size.mean():.2f} {size.std():.2f}")
        print(f"  {'all':10} {hits.mean():.3f}  {sizes.mean():.2f} {sizes.std(axis=1).mean():.2f}", flush=True)
    if args.grid:
        image_grid(list(to_uint8(images[:, 0])), ANIMALS, columns=9).save(args.grid)


STAGES = {f.__name__.removeprefix("stage_"): f for f in (stage_data, stage_vae, stage_classifier, stage_unet)}
STAGES |= {"export": stage_export, "evaluate": stage_evaluate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=[*STAGES, "all"], default=["all"], help="which stages to run")
    parser.add_argument("--out", type=Path, default=WEIGHTS.parent / "tiny_sd", help="where the pipeline goes")
    parser.add_argument("--work", type=Path, default=Path("pretrain_work"), help="folder for data and checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in the work folder")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--per_animal", type=int, default=400, help="training pictures of each animal")
    parser.add_argument("--vae_steps", type=int, default=2600, help="of 16 pictures")
    parser.add_argument("--classifier_steps", type=int, default=900, help="of 96 pictures")
    parser.add_argument("--unet_steps", type=int, default=5500)
    parser.add_argument("--batch", type=int, default=64, help="pictures in a step of the U-Net")
    parser.add_argument("--samples", type=int, default=10, help="pictures of each animal that evaluation draws")
    parser.add_argument("--eta", type=float, nargs="+", default=[0.0, 1.0], help="DDIM noise levels to evaluate")
    parser.add_argument("--grid", type=Path, help="where evaluation saves one picture of each animal")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    for name in STAGES if "all" in args.stage else args.stage:
        torch.manual_seed(0)
        STAGES[name](args)


if __name__ == "__main__":
    main()
