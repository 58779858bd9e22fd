"""Options that save memory or time leave results and gradients what they are on the plain path."""

import copy
import dataclasses
import functools

import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT
from test_update import sampled
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from ddpo_pytorch import launch, policy
from ddpo_pytorch.diffusers_patch.equal_halves import checkpoint, share_halves
from ddpo_pytorch.diffusers_patch.guidance import predict_noise
from ddpo_pytorch.rollout import sample_epoch
from ddpo_pytorch.run_plan import apply_overrides, load_config
from ddpo_pytorch.scoring import RewardWorkers
from ddpo_pytorch.trajectories import shuffled_updates, take
from ddpo_pytorch.update import optimizer_step


def unet_with_lora(pipeline, targets=("to_q", "to_k", "to_v", "to_out.0", "conv1", "proj_in")):
    unet = copy.deepcopy(pipeline.unet).requires_grad_(False).eval()
    torch.manual_seed(0)
    policy.make_trainable(unet, True, 4, targets, torch.float32)
    with torch.no_grad():
        for p in policy.trainable_parameters(unet):
            p.add_(torch.randn_like(p) * 0.1)
    return unet


def prediction_and_gradients(unet, **options):
    torch.manual_seed(1)
    latents, embeds, negative = torch.randn(3, 4, 8, 8), torch.randn(3, 16, 16), torch.randn(1, 16, 16)
    unet.zero_grad()
    prediction = predict_noise(unet, latents, torch.tensor([900, 400, 20]), embeds, negative, 5.0, **options)
    prediction.square().mean().backward()
    return prediction.detach(), [p.grad.clone() for p in policy.trainable_parameters(unet)]


def shared(unet):
    share_halves(unet)


def checkpointed(unet):
    unet.enable_gradient_checkpointing(checkpoint)


WAYS = {
    "halves shared": ([shared], {}),
    "two passes": ([], {"cfg_passes": 2}),
    "checkpointing": ([checkpointed], {}),
    "all of them": ([shared, checkpointed], {"cfg_passes": 2}),
    "shared and checkpointed": ([shared, checkpointed], {}),
    "compiled": ([shared, lambda unet: unet.compile(backend="aot_eager")], {}),
    "compiled, checkpointing": ([shared, checkpointed, lambda unet: unet.compile(backend="aot_eager")], {}),
}


@pytest.mark.parametrize("is_lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("preparations, options", WAYS.values(), ids=WAYS)
def test_the_gradient_is_the_plain_paths(pipeline, preparations, options, is_lora):
    unet = unet_with_lora(pipeline) if is_lora else copy.deepcopy(pipeline.unet).requires_grad_(True).eval()
    plain, expected = prediction_and_gradients(unet)
    for prepare in preparations:
        prepare(unet)
    prediction, gradients = prediction_and_gradients(unet, **options)
    assert_close(prediction, plain, rtol=1e-5, atol=1e-5)
    assert max(g.abs().max() for g in expected) > 1e-3
    for gradient, of_plain in zip(gradients, expected, strict=True):
        assert_close(gradient, of_plain, rtol=1e-4, atol=1e-6 + 1e-5 * of_plain.abs().max().item())


def test_without_the_unconditional_gradient_it_is_another_one_of_the_same_prediction(pipeline):
    unet = unet_with_lora(pipeline)
    plain, expected = prediction_and_gradients(unet)
    prediction, gradients = prediction_and_gradients(unet, uncond_grad=False)
    assert_close(prediction, plain, rtol=1e-5, atol=1e-5)
    assert max((a - b).abs().max() for a, b in zip(gradients, expected, strict=True)) > 1e-3
    with torch.no_grad():  # sampling takes the same two passes
        assert torch.equal(prediction_only(unet, uncond_grad=False), prediction)


def prediction_only(unet, **options):
    torch.manual_seed(1)
    latents, embeds, negative = torch.randn(3, 4, 8, 8), torch.randn(3, 16, 16), torch.randn(1, 16, 16)
    return predict_noise(unet, latents, torch.tensor([900, 400, 20]), embeds, negative, 5.0, **options)


def test_a_shared_unet_is_itself_where_nobody_promised_equal_halves(pipeline):
    unet = unet_with_lora(pipeline)
    batch = torch.randn(2, 4, 8, 8), torch.tensor([3, 700]), torch.randn(2, 16, 16)
    with torch.no_grad():
        before = unet(*batch).sample
        share_halves(unet)
        assert torch.equal(unet(*batch).sample, before)
        calls = []
        unet.conv_in.register_forward_hook(lambda module, inputs, output: calls.append(len(inputs[0])))
        prediction_only(unet)
    assert calls == [6]  # its own forward then takes the first three


def test_a_unet_whose_time_embedding_knows_the_prompt_is_left_as_it_is(pipeline):
    unet = unet_with_lora(pipeline)
    unet.register_to_config(addition_embed_type="text_time")
    share_halves(unet)
    assert not hasattr(unet.conv_in, "_forward_of_all")


class Waits(TorchDispatchMode):
    """Counts what would wait for a GPU: numbers read from tensors, also by indexing with one, and copies to the CPU."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = 0
        for name in ("cpu", "tolist", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, self.counted(getattr(torch.Tensor, name)))

    def counted(self, original):
        def call(*args, **kwargs):
            self.count += 1
            return original(*args, **kwargs)

        return call

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.count += function in (aten._local_scalar_dense.default, aten.nonzero.default, aten.is_nonzero.default)
        return function(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_inside_the_loops(pipeline, monkeypatch):
    """So twice the steps have no more waits than once."""
    accelerator = Accelerator(cpu=True)
    model, trajectories, advantages = sampled(pipeline, accelerator, True)
    optimizer = torch.optim.SGD(policy.trainable_parameters(model.unet), lr=0.0)

    def waits(run, *args):
        with Waits(monkeypatch) as waits:
            run(*args)
        monkeypatch.undo()
        return waits.count

    def sampling(num_steps):
        model.scheduler.set_timesteps(num_steps)
        model.sample(["cat", "dog"], torch.Generator(), lambda *_: None)

    def training(count):
        indices = [(torch.arange(4), torch.full((4,), j % 3)) for j in range(count)]
        batches = [take(trajectories, advantages, *index) for index in indices]
        return waits(optimizer_step, accelerator, model, optimizer, batches, count, 0.0, 1e-4, 5.0, 1.0)

    assert 0 < training(2) == training(6)
    assert 0 < waits(sampling, 2) == waits(sampling, 5)


@pytest.mark.parametrize("timesteps_per_forward", [1, 3])
def test_several_timesteps_in_a_forward_pass_make_the_same_update(pipeline, timesteps_per_forward):
    accelerator = Accelerator(cpu=True)
    model, trajectories, advantages = sampled(pipeline, accelerator, True)
    optimizer = torch.optim.SGD(policy.trainable_parameters(model.unet), lr=1.0)
    before = [p.detach().clone() for p in policy.trainable_parameters(model.unet)]
    [indices] = shuffled_updates(4, 3, 3, 2, 2, torch.Generator().manual_seed(0), timesteps_per_forward)
    assert sorted((int(s), int(t)) for group in indices for s, t in zip(*group, strict=True)) == [
        (s, t) for s in range(4) for t in range(3)
    ]
    assert len(indices) == 2 * 3 // timesteps_per_forward
    batches = [take(trajectories, advantages, *index) for index in indices]
    optimizer_step(accelerator, model, optimizer, batches, len(batches), 1.0, 1e-2, 5.0, max_grad_norm=1e9)
    change = [(p - b).detach() for p, b in zip(policy.trainable_parameters(model.unet), before, strict=True)]
    # Against the gradient of the mean over all twelve steps at once
    model, trajectories, advantages = sampled(pipeline, accelerator, True)
    optimizer = torch.optim.SGD(policy.trainable_parameters(model.unet), lr=1.0)
    samples, steps = torch.arange(4).repeat_interleave(3), torch.arange(3).repeat(4)
    whole = take(trajectories, advantages, samples, steps)
    optimizer_step(accelerator, model, optimizer, [whole], 1, 1.0, 1e-2, 5.0, max_grad_norm=1e9)
    for ours, p, b in zip(change, policy.trainable_parameters(model.unet), before, strict=True):
        assert_close(ours, (p - b).detach(), rtol=1e-3, atol=1e-5)


def test_trajectories_are_kept_once_on_the_cpu_and_prompts_are_encoded_once(pipeline, monkeypatch):
    model, _, _ = sampled(pipeline, Accelerator(cpu=True), True)
    encoded = []
    encode = policy.encode_prompts
    monkeypatch.setattr(policy, "encode_prompts", lambda p, prompts: encoded.append(prompts) or encode(p, prompts))
    model.forget_prompts()
    parts = [model.sample(prompts, torch.Generator().manual_seed(0))[1] for prompts in (["a", "b", "a"], ["b", "c"])]
    assert encoded == [["a", "b"], ["c"]]
    whole = type(parts[0]).cat(parts)
    assert whole.latents.shape == (5, 4, 4, 8, 8) and whole.latents.device.type == "cpu"
    assert len({embed.data_ptr() for embed in whole.prompt_embeds}) == 3
    assert whole.prompt_embeds[0] is whole.prompt_embeds[2]


def test_what_only_sampling_needs_leaves_the_device_and_comes_back(pipeline):
    model, _, _ = sampled(pipeline, Accelerator(cpu=True), True)
    model.move_rest("meta")
    assert pipeline.vae.device.type == pipeline.text_encoder.device.type == "meta"
    assert model.unet.device.type == "cpu"


def test_an_epochs_cost_is_linear_in_its_samples(pipeline):
    model, _, _ = sampled(pipeline, Accelerator(cpu=True), True)
    calls = []
    model.unet.register_forward_hook(lambda *_: calls.append(1))

    def cost(n):
        calls.clear()
        workers = RewardWorkers(lambda images, *_: [0.0] * len(images), "r", torch.device("cpu"), 1, 60.0, n, 0.1)
        rollout = sample_epoch(
            model, ["a"] * n, [{}] * n, 2, torch.Generator(), workers, on_step=lambda: seen.append(len(workers._open))
        )
        workers.collect(lambda: None)
        tensors = (getattr(rollout.trajectories, f.name) for f in dataclasses.fields(rollout.trajectories))
        size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
        indices = shuffled_updates(n, 3, 3, 2, 1, torch.Generator())
        return len(calls), size, sum(len(update) for update in indices)

    seen: list[int] = []
    once, twice = cost(4), cost(8)
    assert [2 * number for number in once] == list(twice)
    assert once[0] == 2 * 3 and once[1] == 4 * (4 * 4 * 8 * 8 * 4 + 3 * (8 + 8 + 4))


def test_fused_adamw_takes_the_same_steps(pipeline):
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(7, 5)) for _ in range(3)]
        optimizer = policy.make_optimizer(parameters, 1e-2, (0.9, 0.99), 1e-2, 1e-8, False, fused)
        assert optimizer.defaults["fused"] is fused
        for _ in range(5):
            for p in parameters:
                p.grad = torch.randn_like(p)
            optimizer.step()
        results.append(parameters)
    for a, b in zip(*results, strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_pictures_do_not_depend_on_the_slices_in_which_they_are_decoded(pipeline):
    from ddpo_pytorch.diffusers_patch.pipeline_with_logprob import decode_latents

    latents = torch.randn(70, 4, 8, 8)
    sizes = []
    pipeline.vae.post_quant_conv.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    with torch.no_grad():
        images = decode_latents(pipeline.vae, latents)
        assert sizes == [64, 6]  # as many latent pixels as one picture of Stable Diffusion has
        whole = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor).sample
    assert_close(images, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"train.cfg_passes": "2", "train.gradient_checkpointing": "True"},
        {"mixed_precision": "bf16", "train.cfg_passes": "2"},
        {"train.uncond_grad": "False"},
        {"compile": "True"},
    ],
    ids=["defaults", "two passes, checkpointing", "bf16, two passes", "no unconditional gradient", "compiled"],
)
def test_the_config_makes_a_policy_whose_ratio_is_exactly_one(random_sd, monkeypatch, options):
    # Traced alone: a compiler's own kernels need a C++ compiler, and differ with and without gradients.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    config = load_config(str(ROOT / "config" / "base.py"))
    overrides = {"mixed_precision": "no", "log_with": "", "pretrained.model": str(random_sd), **options}
    apply_overrides(config, list(overrides.items()))
    accelerator = Accelerator(cpu=True, mixed_precision=config.mixed_precision)
    scheduler = policy.load_scheduler(str(random_sd), "main", 3, 1.0, accelerator.device)
    pipeline = policy.load_pipeline(str(random_sd), "main", scheduler)
    model, optimizer = launch.make_policy(accelerator, config, pipeline, scheduler)
    assert pipeline.unet.is_gradient_checkpointing == config.train.gradient_checkpointing
    assert hasattr(model.unet, "_orig_mod") == config.compile  # one callable, which both phases get
    _, trajectories = model.sample(["a", "b"], torch.Generator().manual_seed(0))
    batches = [take(trajectories, torch.tensor([1.0, -1.0]), torch.arange(2), torch.full((2,), j)) for j in range(3)]
    result = optimizer_step(accelerator, model, optimizer, batches, 3, 1e-3, 1e-4, 5.0, 1.0)
    assert result.logp_gap == 0.0 and not result.skipped and result.statistics["grad_norm"] > 0
