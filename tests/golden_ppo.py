"""The PPO update measured on the original (tests/goldens/ppo_update.*), set up on this package's own parts."""

import json
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import DDIMScheduler, UNet2DConditionModel
from safetensors.torch import load_file

from ddpo_pytorch.diffusers_patch.ddim_with_logprob import previous_timesteps
from ddpo_pytorch.policy import Policy, make_optimizer, make_trainable, trainable_parameters
from ddpo_pytorch.trajectories import MicroBatch, Trajectories, take
from ddpo_pytorch.update import UpdateResult, optimizer_step

GOLDENS = Path(__file__).parent / "goldens"


class GoldenUpdate:
    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.figures = json.loads((GOLDENS / "ppo_update.json").read_text())
        self.tensors = load_file(GOLDENS / "ppo_update.safetensors")
        t, f = self.tensors, self.figures

        unet = UNet2DConditionModel(**f["unet_config"])
        unet.load_state_dict({k.removeprefix("unet."): v for k, v in t.items() if k.startswith("unet.")})
        unet.requires_grad_(False).eval()
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        make_trainable(unet, True, f["lora"]["rank"], targets, torch.float32)
        self.unet = unet
        with torch.no_grad():
            for name, tensor in self.golden("lora_before").items():
                self.factors()[name].copy_(tensor)

        adamw = f["adamw"]
        self.optimizer = make_optimizer(
            trainable_parameters(unet), adamw["lr"], adamw["betas"], adamw["weight_decay"], adamw["eps"], False
        )
        self.gradients: dict[str, torch.Tensor] = {}
        self.optimizer.register_step_pre_hook(self._keep_gradients)
        prepared_unet, self.prepared_optimizer = accelerator.prepare(unet, self.optimizer)

        scheduler = DDIMScheduler(**f["scheduler"])
        scheduler.set_timesteps(f["num_inference_steps"])
        self.policy = Policy(None, prepared_unet, scheduler, f["guidance_scale"], f["eta"], t["negative_prompt_embeds"])
        self.trajectories = Trajectories(
            latents=t["latents"],
            timesteps=t["timesteps"],
            prev_timesteps=previous_timesteps(scheduler, t["timesteps"]),
            log_probs=t["log_probs"],
            prompt_embeds=t["prompt_embeds"],
        )

    def factors(self) -> dict[str, torch.Tensor]:
        """The live LoRA factors under the goldens' names."""
        names = {"lora_A.default.weight": "down", "lora_B.default.weight": "up"}
        result = {}
        for name, parameter in self.unet.named_parameters():
            for ours, theirs in names.items():
                if name.endswith(ours):
                    module = name.removesuffix("." + ours).replace("to_out.0", "to_out")
                    result[f"{module}.{theirs}"] = parameter
        return result

    def golden(self, group: str) -> dict[str, torch.Tensor]:
        return {k.removeprefix(group + "."): v for k, v in self.tensors.items() if k.startswith(group + ".")}

    def _keep_gradients(self, *_: object) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.factors().items()}

    def micro_batches(self) -> list[MicroBatch]:
        """In the order in which the original took them: samples (0, 1) then (2, 3), all timesteps of each in turn."""
        batches = []
        for step in self.figures["steps"]:
            samples = torch.arange(*step["samples"])
            batches.append(
                take(self.trajectories, self.tensors["advantages"], samples, torch.full_like(samples, step["step"]))
            )
        return batches

    def step(self, micro_batches: list[MicroBatch]) -> UpdateResult:
        f = self.figures
        return optimizer_step(
            self.accelerator,
            self.policy,
            self.prepared_optimizer,
            micro_batches,
            num_micro_batches=len(micro_batches),
            learning_rate=f["adamw"]["lr"],
            clip_range=f["clip_range"],
            adv_clip_max=f["adv_clip_max"],
            max_grad_norm=f["max_grad_norm"],
        )
