"""The same results and gradients as peft's own layers."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.testing import assert_close

from ddpo_pytorch.lora_forward import speed_up


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(24, 40)
        self.no_bias = torch.nn.Linear(40, 8, bias=False)
        self.conv = torch.nn.Conv2d(6, 12, 3, stride=2, padding=1, dilation=1)
        self.pixel = torch.nn.Conv2d(12, 5, 1)

    def forward(self, rows, images):
        return self.no_bias(self.linear(rows).tanh()), self.pixel(self.conv(images).tanh())


def with_lora(dtype=torch.float32, **options):
    torch.manual_seed(0)
    layers = Layers().requires_grad_(False).to(dtype)
    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, **options}
    inject_adapter_in_model(LoraConfig(target_modules=["linear", "no_bias", "conv", "pixel"], **options), layers)
    for p in layers.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    return layers


def results(layers, autocast=False, needs_input_grad=True):
    torch.manual_seed(1)
    inputs = torch.randn(3, 5, 24), torch.randn(2, 6, 9, 9)
    for x in inputs:
        x.requires_grad_(needs_input_grad)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = layers(*inputs)
    sum(output.float().square().sum() for output in outputs).backward()
    gradients = [p.grad for p in layers.parameters() if p.requires_grad]
    return [*outputs, *(x.grad for x in inputs if needs_input_grad), *gradients]


@pytest.mark.parametrize("needs_input_grad", [True, False])
def test_float32_results_and_gradients_are_pefts(needs_input_grad):
    plain = with_lora()
    fast = copy.deepcopy(plain)
    assert speed_up(fast) == 4
    for ours, theirs in zip(
        results(fast, False, needs_input_grad), results(plain, False, needs_input_grad), strict=True
    ):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_bf16_results_and_gradients_are_as_close_to_float32_as_pefts():
    plain = with_lora(torch.bfloat16)
    fast = copy.deepcopy(plain)
    assert speed_up(fast) == 4
    exact = results(copy.deepcopy(plain).float())
    for ours, theirs, true in zip(results(fast, autocast=True), results(plain, autocast=True), exact, strict=True):
        assert ours.dtype == theirs.dtype
        error, error_of_peft = ((x.float() - true).abs().max() / true.abs().max() for x in (ours, theirs))
        assert error < max(1.5 * error_of_peft, 0.02)


@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_what_is_not_plain_stays_pefts(options):
    assert speed_up(with_lora(**options)) == 0


def test_a_copy_has_weights_of_its_own():
    layers = with_lora()
    speed_up(layers)
    copied = copy.deepcopy(layers)
    images, rows = torch.randn(2, 6, 9, 9), torch.randn(3, 5, 24)
    with torch.no_grad():
        before = copied(rows, images)
        for p in layers.parameters():
            p.zero_()
        for after, own in zip(copied(rows, images), before, strict=True):
            assert torch.equal(after, own)


def test_an_adapter_that_is_switched_off_or_merged_is_so():
    layers = with_lora()
    speed_up(layers)
    images, rows = torch.randn(2, 6, 9, 9), torch.randn(3, 5, 24)
    with torch.no_grad():
        tuned = layers(rows, images)
        for layer in (layers.linear, layers.no_bias, layers.conv, layers.pixel):
            layer.enable_adapters(False)
        assert torch.equal(layers(rows, images)[0], layers.no_bias.base_layer(layers.linear.base_layer(rows).tanh()))
        for layer in (layers.linear, layers.no_bias, layers.conv, layers.pixel):
            layer.enable_adapters(True)
            layer.merge()
        for merged, apart in zip(layers(rows, images), tuned, strict=True):
            assert_close(merged, apart, rtol=1e-4, atol=1e-4)
