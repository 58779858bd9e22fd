"""Do once what a UNet does alike for both halves of a guided batch: everything before the first look at the prompt.

With classifier-free guidance the same latents go in twice, and the halves part only in the first cross-attention. What
stands before it, a 64x64 self-attention in Stable Diffusion 1.x, computes one half and repeats it.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from diffusers import UNet2DConditionModel

_active = False


@contextlib.contextmanager
def equal_halves(active: bool = True) -> Iterator[None]:
    """Promise that the batches a shared UNet gets here are the same latents and timesteps twice."""
    global _active
    before, _active = _active, active
    try:
        yield
    finally:
        _active = before


def _of_first_half(self: torch.nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward method of a module that is shared."""
    if not _active:
        return self._forward_of_all(x, *args, **kwargs)
    half = len(x) // 2
    # A resnet's time embedding is per sample too; the attentions here get None besides x.
    args = tuple(a[:half] if isinstance(a, torch.Tensor) and len(a) == len(x) else a for a in args)
    result = self._forward_of_all(x[:half], *args, **kwargs)
    return torch.cat([result, result])


def _before_the_prompt(unet: UNet2DConditionModel) -> Iterator[torch.nn.Module]:
    """The modules that see latents and timestep alone, in the order in which they are called."""
    yield unet.conv_in
    for block in unet.down_blocks:
        attentions = getattr(block, "attentions", None)
        if attentions is None:
            yield from [*block.resnets, *(block.downsamplers or [])]
            continue
        yield block.resnets[0]
        first = attentions[0]
        if not hasattr(first, "transformer_blocks"):
            return
        yield from [first.norm, first.proj_in]
        transformer = first.transformer_blocks[0]
        if transformer.norm_type == "layer_norm" and not transformer.only_cross_attention:
            yield from [transformer.norm1, transformer.attn1]
        return


def share_halves(unet: UNet2DConditionModel) -> None:
    """Let a UNet make use of `equal_halves`, in place; outside of it nothing changes.

    Not one whose time embedding knows the prompt, as that of Stable Diffusion XL does.
    """
    if unet.config.addition_embed_type is not None or unet.config.class_embed_type is not None:
        return
    for module in _before_the_prompt(unet):
        # Bound to the module, so that a copy of it calls its own.
        module._forward_of_all = module.forward
        module.forward = types.MethodType(_of_first_half, module)


def checkpoint(module: Callable, *args: Any) -> Any:
    """Activation checkpointing for `enable_gradient_checkpointing`; what is computed again is so under one promise."""
    if torch.compiler.is_compiling():  # what is traced once is not called again
        return torch.utils.checkpoint.checkpoint(module, *args, use_reentrant=False)
    active = _active

    def run(*inputs: Any) -> Any:
        with equal_halves(active):
            return module(*inputs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)
