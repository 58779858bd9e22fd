"""The diffusion model as a policy: a frozen text encoder and VAE around a UNet whose LoRA, or all, is trained.

Knows nothing of rewards or of the training loop.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.utils import logging as diffusers_logging
from peft import LoraConfig
from transformers.utils import logging as transformers_logging

from ddpo_pytorch.diffusers_patch.ddim_with_logprob import ddim_std, ddim_step_with_logprob, previous_timesteps
from ddpo_pytorch.diffusers_patch.guidance import predict_noise, uses_guidance
from ddpo_pytorch.diffusers_patch.pipeline_with_logprob import decode_latents, denoise_with_logprob
from ddpo_pytorch.lora_forward import speed_up
from ddpo_pytorch.named_functions import ConfigError
from ddpo_pytorch.trajectories import MicroBatch, Trajectories

WEIGHT_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def check_device(device: torch.device, mixed_precision: str, use_8bit_adam: bool) -> None:
    """Refuse what this device cannot do.

    Raises:
        ConfigError: half precision that the device lacks, or 8-bit Adam where bitsandbytes does not run.
    """
    if mixed_precision == "fp16" and device.type != "cuda":
        raise ConfigError(
            f'config.mixed_precision "fp16" needs a CUDA GPU, and this process runs on {device}; use "bf16" or "no"'
        )
    if (
        mixed_precision == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ConfigError(
            f'config.mixed_precision "bf16" does not run on {torch.cuda.get_device_name(device)}; use "fp16" or "no"'
        )
    if use_8bit_adam:
        _adamw_8bit()


def _adamw_8bit() -> Callable[..., torch.optim.Optimizer]:
    try:
        import bitsandbytes

        # Some builds import and then fail at their first step: take one.
        probe = torch.nn.Parameter(torch.ones(4096, device="cuda" if torch.cuda.is_available() else "cpu"))
        probe.grad = torch.ones_like(probe)
        bitsandbytes.optim.AdamW8bit([probe]).step()
    except Exception as error:
        raise ConfigError(
            "config.train.use_8bit_adam needs a working bitsandbytes (pip install bitsandbytes), which failed with "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}; or set it False"
        ) from error
    return bitsandbytes.optim.AdamW8bit


def _cannot_load(model: str, error: Exception) -> ConfigError:
    is_folder = Path(model).expanduser().exists()
    if not is_folder and model.startswith((".", "/", "~")):
        return ConfigError(f'config.pretrained.model "{model}": there is no such folder')
    if is_folder:
        place = (
            f'config.pretrained.model "{model}": no Stable Diffusion pipeline in diffusers\' layout can be read there'
        )
    else:
        place = (
            f'config.pretrained.model "{model}" is no folder here, and cannot be had from the hub; give a folder with '
            "--config.pretrained.model=FOLDER, or try --config config/tiny.py, whose model ships with this package"
        )
    # The hub's library wraps "no connection" into "no such file".
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    reason = next((e for e in causes if "connect" in type(e).__name__.lower()), error)
    return ConfigError(f"{place} ({type(reason).__name__}: {' '.join(str(reason).split())[:300]})")


def load_scheduler(model: str, revision: str, num_steps: int, eta: float, device: torch.device) -> DDIMScheduler:
    """The model's noise schedule as DDIM, timesteps set; it comes before the weights, since it can be refused.

    Raises:
        ConfigError: the model cannot be reached, or a step of the schedule has no noise and so no log-probability.
    """
    try:
        scheduler = DDIMScheduler.from_pretrained(model, subfolder="scheduler", revision=revision)
    except Exception as error:
        raise _cannot_load(model, error) from error
    if num_steps > scheduler.config.num_train_timesteps:
        raise ConfigError(
            f"sample.num_steps ({num_steps}) must be at most the model's "
            f"{scheduler.config.num_train_timesteps} timesteps"
        )
    scheduler.set_timesteps(num_steps)
    std = ddim_std(scheduler, scheduler.timesteps, eta)
    if not (std > 0).all():
        where = [int(t) for t in scheduler.timesteps[~(std > 0)]]
        raise ConfigError(
            f'the scheduler of "{model}" adds no noise at timesteps {where} of {num_steps} steps (steps_offset '
            f"{scheduler.config.steps_offset}, set_alpha_to_one {scheduler.config.set_alpha_to_one}), so they have "
            "no log-probability; in its scheduler_config.json set steps_offset 1 and set_alpha_to_one false, as in "
            "Stable Diffusion 1.x"
        )
    # On the device once, so that no step waits for a copy.
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.to(device)
    scheduler.final_alpha_cumprod = scheduler.final_alpha_cumprod.to(device)
    scheduler.set_timesteps(num_steps, device=device)
    return scheduler


def _check_index(model: str) -> None:
    """Raises ConfigError if a local folder wants code of its own run, which some versions of diffusers would."""
    try:
        index = json.loads((Path(model).expanduser() / "model_index.json").read_text())
        parts = {name: part for name, part in index.items() if not name.startswith("_") and isinstance(part, list)}
        foreign = [name for name, (library, _) in parts.items() if library not in (None, "diffusers", "transformers")]
        foreign += [] if isinstance(index["_class_name"], str) else ["the pipeline itself"]
    except (OSError, ValueError, KeyError, AttributeError):  # no folder, or what the loading code will say of it
        return
    if foreign:
        raise ConfigError(
            f'config.pretrained.model "{model}" has parts that are neither of diffusers nor of transformers: '
            f"{', '.join(foreign)}; code in a model's folder is not run"
        )


def load_pipeline(model: str, revision: str, scheduler: DDIMScheduler) -> StableDiffusionPipeline:
    """The pipeline in float32 on the CPU, everything frozen, without safety checker.

    Raises:
        ConfigError: the model cannot be reached.
    """
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    _check_index(model)
    try:
        pipeline = StableDiffusionPipeline.from_pretrained(
            model, revision=revision, scheduler=scheduler, safety_checker=None, requires_safety_checker=False
        )
    except Exception as error:
        raise _cannot_load(model, error) from error
    pipeline.set_progress_bar_config(disable=True)
    for module in (pipeline.vae, pipeline.text_encoder, pipeline.unet):
        # eval() throughout, in training too: dropout would make a second forward pass another policy.
        module.requires_grad_(False).eval()
    return pipeline


def move(module: torch.nn.Module, **where: Any) -> None:
    """`module.to(device=..., dtype=...)` as torch has it; diffusers' own warns of a loss that is meant here."""
    torch.nn.Module.to(module, **where)


def unet_fingerprint(unet: UNet2DConditionModel) -> str:
    """A short hash of a UNet's layers and of a sample of its weights, the same wherever its folder lies."""
    layers = {name: list(parameter.shape) for name, parameter in unet.named_parameters()}
    digest = hashlib.sha256(json.dumps(layers, sort_keys=True).encode())
    for name in ("conv_in.weight", "time_embedding.linear_1.weight", "conv_out.weight"):
        digest.update(unet.get_parameter(name).detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def make_trainable(
    unet: UNet2DConditionModel, use_lora: bool, rank: int, target_modules: Sequence[str], weight_dtype: torch.dtype
) -> None:
    """Add a LoRA, or unfreeze the whole UNet, in place.

    LoRA factors are float32 over frozen weights in `weight_dtype`, with scale 1 (lora_alpha = rank), the down factor
    drawn from N(0, 1/rank) and the up factor 0. A UNet that is trained whole stays float32.

    Raises:
        ConfigError: no layer is called as `target_modules` say.
    """
    if not use_lora:
        unet.requires_grad_(True)
        return
    move(unet, dtype=weight_dtype)
    config = LoraConfig(
        r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=list(target_modules), lora_dropout=0.0
    )
    try:
        unet.add_adapter(config)
    except ValueError as error:
        raise ConfigError(
            f"config.lora.target_modules {tuple(target_modules)} do not fit this UNet: {error}"
        ) from error
    for parameter in trainable_parameters(unet):
        parameter.data = parameter.data.float()
    speed_up(unet)


def trainable_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def make_optimizer(
    parameters: Sequence[torch.nn.Parameter],
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    epsilon: float,
    use_8bit_adam: bool,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """AdamW, or bitsandbytes' with 8-bit states.

    Args:
        fused: one kernel for all parameters. Not with a gradient scaler, whose skipped steps nobody could tell then.
    """
    options = {"lr": learning_rate, "betas": betas, "weight_decay": weight_decay, "eps": epsilon}
    if use_8bit_adam:
        return _adamw_8bit()(parameters, **options)
    return torch.optim.AdamW(parameters, **options, fused=fused)


@dataclass
class Policy:
    """What sampling and training share.

    Attributes:
        unet: as Accelerate prepared it: the one module that both phases call.
        scheduler: with its timesteps set.
        negative_prompt_embeds: of the empty prompt, (1, L, D); None without guidance.
        cfg_passes, uncond_grad: of `predict_noise`.
    """

    pipeline: StableDiffusionPipeline
    unet: torch.nn.Module
    scheduler: DDIMScheduler
    guidance_scale: float
    eta: float
    negative_prompt_embeds: torch.Tensor | None
    cfg_passes: int = 1
    uncond_grad: bool = True
    _embeds: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.pipeline.unet.device

    def embed(self, prompts: Sequence[str]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Each prompt's embedding, (L, D), on the device and on the CPU.

        Those that are new are encoded; the others are kept from before.
        """
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._embeds]
        if new:
            encoded = encode_prompts(self.pipeline, new)
            self._embeds |= zip(new, zip(encoded, encoded.cpu(), strict=True), strict=True)
        return [self._embeds[prompt][0] for prompt in prompts], [self._embeds[prompt][1] for prompt in prompts]

    def forget_prompts(self) -> None:
        """Let go of the embeddings kept so far, so that an epoch's are a function of its own prompts."""
        self._embeds.clear()

    def move_rest(self, device: torch.device | str) -> None:
        """Put text encoder and VAE, which only sampling needs, on a device."""
        for module in (self.pipeline.text_encoder, self.pipeline.vae):
            move(module, device=device)

    def sample(
        self,
        prompts: Sequence[str],
        generator: torch.Generator,
        on_step: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
    ) -> tuple[torch.Tensor, Trajectories]:
        """Denoise a batch of prompts with the scheduler's steps.

        Returns:
            Images, float32 (B, 3, H, W) in [0, 1]; and the trajectories. Both on the CPU.
        """
        embeds, embeds_on_cpu = self.embed(prompts)
        prompt_embeds = torch.stack(embeds)
        config = self.pipeline.unet.config
        shape = (len(prompts), config.in_channels, config.sample_size, config.sample_size)
        latents = torch.randn(shape, generator=generator, device=prompt_embeds.device)
        all_latents, all_log_probs = denoise_with_logprob(
            self.unet,
            self.scheduler,
            latents * self.scheduler.init_noise_sigma,
            prompt_embeds,
            self.negative_prompt_embeds,
            self.guidance_scale,
            self.eta,
            generator,
            on_step,
            cfg_passes=self.cfg_passes,
            uncond_grad=self.uncond_grad,
        )
        with torch.no_grad():
            images = (decode_latents(self.pipeline.vae, all_latents[-1]) / 2 + 0.5).clamp(0, 1).cpu()
        timesteps = self.scheduler.timesteps.cpu().expand(len(prompts), -1)
        trajectory, log_probs = torch.stack(all_latents, dim=1).cpu(), torch.stack(all_log_probs, dim=1).cpu()
        computed = trajectory.isfinite().flatten(1).all(1) & log_probs.isfinite().all(1)
        return images, Trajectories(
            # All of it: where the UNet overflowed it would do so again in training, and a single NaN in a batch is one
            # in the gradient, whatever its advantage.
            latents=torch.where(computed[:, None, None, None, None], trajectory, 0.0),
            timesteps=timesteps,
            prev_timesteps=previous_timesteps(self.scheduler, timesteps),
            log_probs=torch.where(computed[:, None], log_probs, torch.nan),
            prompt_embeds=embeds_on_cpu,
        )

    def log_prob(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probability of each step of a micro-batch under the present weights, (B,), with gradient.

        The same forward pass and formula as in `sample`, on what the trajectory recorded.
        """
        noise_pred = predict_noise(
            self.unet,
            batch.latents,
            batch.timesteps,
            batch.prompt_embeds,
            self.negative_prompt_embeds,
            self.guidance_scale,
            cfg_passes=self.cfg_passes,
            uncond_grad=self.uncond_grad,
        )
        return ddim_step_with_logprob(
            self.scheduler,
            noise_pred,
            batch.timesteps,
            batch.latents,
            eta=self.eta,
            prev_sample=batch.next_latents,
            prev_timestep=batch.prev_timesteps,
        )[1]


@torch.no_grad()
def encode_prompts(pipeline: StableDiffusionPipeline, prompts: Sequence[str]) -> torch.Tensor:
    """The text encoder's last hidden states, (B, L, D); prompts beyond the tokenizer's length are cut."""
    tokens = pipeline.tokenizer(
        list(prompts),
        padding="max_length",
        max_length=pipeline.tokenizer.model_max_length,
        truncation=True,
        return_tensors="pt",
    )
    device = pipeline.text_encoder.device
    return pipeline.text_encoder(tokens.input_ids.to(device))[0]


def make_policy(
    pipeline: StableDiffusionPipeline,
    unet: torch.nn.Module,
    scheduler: DDIMScheduler,
    guidance_scale: float,
    eta: float,
    cfg_passes: int = 1,
    uncond_grad: bool = True,
) -> Policy:
    """Tie the pipeline on its device to the prepared UNet."""
    negative_prompt_embeds = encode_prompts(pipeline, [""]) if uses_guidance(guidance_scale) else None
    return Policy(pipeline, unet, scheduler, guidance_scale, eta, negative_prompt_embeds, cfg_passes, uncond_grad)
