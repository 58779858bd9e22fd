"""A LoRA layer's forward and backward pass with fewer passes over memory than peft's, and the same gradients.

peft computes W x, A x, B A x, a product with the scale, and a sum, and keeps what their backward passes need. Here a
float32 layer multiplies by W + s B A, made anew in each pass; above half-precision weights, which could not hold that
sum, B A x is added in place. Knows nothing of diffusion.
"""

import types
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Conv2d, Linear
from torch.autograd.function import once_differentiable


class _LoraLinear(torch.autograd.Function):
    """x W^T + b + s (x A^T) B^T, with W and b frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight, down, up)
        ctx.scale, ctx.shape = scale, x.shape
        if weight.dtype == torch.float32:
            result = F.linear(rows, torch.addmm(weight, up, down, alpha=scale), bias)
        else:
            result = F.linear(rows, weight, bias)
            result.addmm_(rows @ down.T, up.T, alpha=scale)
        return result.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, down, up = ctx.saved_tensors
        gradient = gradient.reshape(-1, weight.shape[0])
        of_rank = (gradient @ up).mul_(ctx.scale)  # (rows, rank)
        of_down = of_rank.T @ rows
        of_up = (gradient.T @ (rows @ down.T)).mul_(ctx.scale)
        of_x = None
        if ctx.needs_input_grad[0]:
            if weight.dtype == torch.float32:
                of_x = gradient @ torch.addmm(weight, up, down, alpha=ctx.scale)
            else:
                of_x = (gradient @ weight).addmm_(of_rank, down)
            of_x = of_x.view(ctx.shape)
        return of_x, None, None, of_down, of_up, None


class _LoraConv2d(torch.autograd.Function):
    """W * x + b + s B (A * x), with W and b frozen; B is of 1x1 pixels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scale: float,
        geometry: tuple,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, down, up)
        ctx.scale, ctx.geometry = scale, geometry
        if weight.dtype == torch.float32:
            return F.conv2d(x, _merged(weight, down, up, scale), bias, *geometry)
        return F.conv2d(x, weight, bias, *geometry).add_(F.conv2d(F.conv2d(x, down, None, *geometry), up), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, down, up = ctx.saved_tensors
        hidden = F.conv2d(x, down, None, *ctx.geometry)  # (B, rank, h, w)
        of_hidden, of_up = _conv_backward(gradient, hidden, up, (1, 0, 1), (True, True))
        of_hidden, of_up = of_hidden.mul_(ctx.scale), of_up.mul_(ctx.scale)
        is_float32, needs_x = weight.dtype == torch.float32, ctx.needs_input_grad[0]
        of_x, of_down = _conv_backward(of_hidden, x, down, ctx.geometry, (needs_x and not is_float32, True))
        if needs_x:
            base = _merged(weight, down, up, ctx.scale) if is_float32 else weight
            through_base, _ = _conv_backward(gradient, x, base, ctx.geometry, (True, False))
            of_x = through_base if of_x is None else of_x.add_(through_base)
        return of_x, None, None, of_down, of_up, None, None


def _merged(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.addmm(weight.flatten(1), up.flatten(1), down.flatten(1), alpha=scale).view_as(weight)


def _conv_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, geometry: tuple, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by x and by the weight, those that are wanted."""
    pairs = [list(value) if isinstance(value, (tuple, list)) else [value] * 2 for value in geometry]
    return torch.ops.aten.convolution_backward(gradient, x, weight, None, *pairs, False, [0, 0], 1, [*wanted, False])[
        :2
    ]


def _fast_forward(self: Linear | Conv2d, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward method of a layer that is sped up."""
    base = self.base_layer
    [adapter] = self.active_adapters if len(self.active_adapters) == 1 else [None]
    if args or kwargs or self.disable_adapters or self.merged or adapter not in self.lora_A:
        return type(self).forward(self, x, *args, **kwargs)
    device = x.device.type
    # As autocast would have it; the base layer's type without it.
    is_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_autocast else base.weight.dtype
    down, up = (factors[adapter].weight.to(dtype) for factors in (self.lora_A, self.lora_B))
    bias = None if base.bias is None else base.bias.to(dtype)
    arguments = (x.to(dtype), base.weight.to(dtype), bias, down, up, float(self.scaling[adapter]))
    if isinstance(base, torch.nn.Conv2d):
        return _LoraConv2d.apply(*arguments, (base.stride, base.padding, base.dilation))
    return _LoraLinear.apply(*arguments)


def speed_up(module: torch.nn.Module) -> int:
    """Give the plain LoRA layers in a module the passes above, in place; others keep peft's.

    Plain are linear layers and convolutions of one group with zero padding; no dropout, DoRA or bias of the LoRA.

    Returns:
        How many were changed.
    """
    count = 0
    for layer in module.modules():
        if not isinstance(layer, (Linear, Conv2d)):
            continue
        base = layer.base_layer
        is_plain = type(base) is torch.nn.Linear or (
            type(base) is torch.nn.Conv2d
            and base.groups == 1
            and base.padding_mode == "zeros"
            and not isinstance(base.padding, str)
        )
        has_more = any(layer.use_dora.values()) or any(layer.lora_bias.values()) or bool(layer.lora_variant)
        has_dropout = any(not isinstance(dropout, torch.nn.Identity) for dropout in layer.lora_dropout.values())
        if is_plain and not has_more and not has_dropout and not base.weight.requires_grad:
            layer.forward = types.MethodType(_fast_forward, layer)  # bound, so that a copy calls its own
            count += 1
    return count
