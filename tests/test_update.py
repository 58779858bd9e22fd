import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from golden_ppo import GoldenUpdate
from torch.testing import assert_close

from ddpo_pytorch.exits import ModelFailure
from ddpo_pytorch.losses import ppo_clipped_loss
from ddpo_pytorch.policy import make_policy, make_trainable, trainable_parameters
from ddpo_pytorch.trajectories import take
from ddpo_pytorch.update import (
    SkippedSteps,
    UpdateResult,
    gap_warning,
    learning_rate_at,
    optimizer_step,
    recompute_log_probs,
)


@pytest.fixture
def golden():
    return GoldenUpdate(Accelerator(cpu=True))


def test_every_micro_batch_equals_the_original(golden):
    for batch, figures in zip(golden.micro_batches(), golden.figures["steps"], strict=True):
        with torch.no_grad():
            log_prob = golden.policy.log_prob(batch)
            f = golden.figures
            loss, statistics = ppo_clipped_loss(
                log_prob, batch.old_log_probs, batch.advantages, f["clip_range"], f["adv_clip_max"], 256
            )
        # Float32 rounding of the log-probs: 1e-6 of values around 1, hence of ratio and loss.
        assert_close(log_prob, torch.tensor(figures["log_prob"]), rtol=0, atol=5e-6)
        assert_close((log_prob - batch.old_log_probs).exp(), torch.tensor(figures["ratio"]), rtol=0, atol=5e-6)
        assert_close(loss.item(), figures["loss"], rtol=0, atol=1e-5)
        # 0.5 d^2 with d about 2e-4 known to 5e-6
        assert_close(statistics["approx_kl"].item(), figures["approx_kl"], rtol=0.06, atol=1e-10)
        assert_close(statistics["clipfrac"].item(), figures["clipfrac"])


def test_the_ratio_against_the_original_sampling_is_one(golden):
    golden.trajectories.log_probs = golden.tensors["sampled_log_probs"]
    for batch in golden.micro_batches():
        with torch.no_grad():
            assert_close(golden.policy.log_prob(batch), batch.old_log_probs, rtol=0, atol=5e-6)


def test_one_whole_update_equals_the_original(golden):
    result = golden.step(golden.micro_batches())
    assert_close(result.statistics["grad_norm"], golden.figures["grad_norm_before_clip"], rtol=1e-4, atol=0)
    losses = [step["loss"] for step in golden.figures["steps"]]
    assert_close(result.statistics["loss"], sum(losses) / len(losses), rtol=0, atol=1e-5)
    for name, gradient in golden.golden("lora_grad").items():
        assert_close(golden.gradients[name], gradient, rtol=1e-4, atol=2e-6)  # the largest entry is 9e-3
    # Adam's first step is lr * sign(gradient) where the gradient is far above eps 1e-8, and anything below where it is
    # rounding: compare where it is not.
    for name, after in golden.golden("lora_after").items():
        sure = golden.golden("lora_grad")[name].abs() > 1e-5
        assert sure.any()
        assert_close(golden.factors()[name].detach()[sure], after[sure], rtol=0, atol=1e-6)


def test_two_processes_on_two_halves_equal_one_on_the_whole(tmp_path, golden):
    whole = golden.step(golden.micro_batches())
    script = Path(__file__).with_name("run_golden_step.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, tmp_path]
    env = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PATH": ""}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for name, factor in golden.factors().items():
        assert torch.equal(first["factors"][name], second["factors"][name])
        assert_close(first["gradients"][name], golden.gradients[name], rtol=1e-4, atol=1e-7)
        sure = golden.gradients[name].abs() > 1e-5
        assert_close(first["factors"][name][sure], factor.detach()[sure], rtol=0, atol=1e-6)
    assert first["statistics"] == second["statistics"]
    for name, value in whole.statistics.items():
        assert first["statistics"][name] == pytest.approx(value, rel=1e-4, abs=1e-9), name


@pytest.mark.parametrize("use_lora", [True, False])
def test_accumulating_four_times_one_equals_one_batch_of_four(pipeline, use_lora):
    def updated(batch_size):
        accelerator = Accelerator(cpu=True)
        model, trajectories, advantages = sampled(pipeline, accelerator, use_lora)
        optimizer = torch.optim.SGD(trainable_parameters(model.unet), lr=1.0)
        groups = torch.arange(4).split(batch_size)
        indices = [(group, torch.full_like(group, j)) for group in groups for j in range(trajectories.num_steps)]
        batches = [take(trajectories, advantages, *index) for index in indices]
        before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        optimizer_step(accelerator, model, optimizer, batches, len(batches), 1.0, 1e-4, 5.0, max_grad_norm=1e9)
        return [(p - b).detach() for p, b in zip(optimizer.param_groups[0]["params"], before, strict=True)]

    fours, ones = updated(4), updated(1)
    assert max(change.abs().max() for change in fours) > 1e-3
    for four, one in zip(fours, ones, strict=True):
        assert_close(one, four, rtol=1e-3, atol=1e-5)


def sampled(pipeline, accelerator, use_lora, guidance_scale=5.0, batch=4):
    """A policy and four trajectories of three steps from it."""
    import copy

    pipeline = copy.copy(pipeline)
    unet = copy.deepcopy(pipeline.unet).requires_grad_(False).eval()
    pipeline.register_modules(unet=unet)
    torch.manual_seed(0)
    make_trainable(unet, use_lora, 4, ["to_q", "to_k", "to_v", "to_out.0"], torch.float32)
    pipeline.scheduler.set_timesteps(3)
    model = make_policy(pipeline, accelerator.prepare(unet), pipeline.scheduler, guidance_scale, eta=1.0)
    _, trajectories = model.sample(["cat", "dog", "bee", "ant"][:batch], torch.Generator().manual_seed(3))
    return model, trajectories, torch.tensor([1.0, -1.0, 0.5, 2.0])[:batch]


@pytest.mark.parametrize("use_lora", [True, False])
@pytest.mark.parametrize("guidance_scale", [0.5, 1.0, 5.0])
def test_ratio_is_exactly_one_before_the_first_update(pipeline, use_lora, guidance_scale):
    model, trajectories, advantages = sampled(pipeline, Accelerator(cpu=True), use_lora, guidance_scale)
    for j in range(trajectories.num_steps):
        batch = take(trajectories, advantages, torch.arange(4), torch.full((4,), j))
        # With gradient, as training calls it.
        assert torch.equal(model.log_prob(batch).detach(), batch.old_log_probs)


def test_ratio_is_one_to_rounding_at_other_batch_shapes(pipeline):
    model, trajectories, advantages = sampled(pipeline, Accelerator(cpu=True), True)
    for j in range(trajectories.num_steps):
        batch = take(trajectories, advantages, torch.tensor([2]), torch.tensor([j]))
        assert_close(model.log_prob(batch).detach(), batch.old_log_probs, rtol=0, atol=1e-6)


def test_an_update_makes_good_samples_likelier_and_bad_ones_less_likely(pipeline):
    accelerator = Accelerator(cpu=True)
    model, trajectories, advantages = sampled(pipeline, accelerator, True)
    optimizer = torch.optim.AdamW(trainable_parameters(model.unet), lr=1e-3)
    indices = [(torch.arange(4), torch.full((4,), j)) for j in range(trajectories.num_steps)]
    batches = [take(trajectories, advantages, *index) for index in indices]
    result = optimizer_step(accelerator, model, optimizer, batches, len(batches), 1e-3, 1e-2, 5.0, 1.0)
    assert result.logp_gap == 0 and not result.skipped
    with torch.no_grad():
        change = torch.stack([model.log_prob(b) - b.old_log_probs for b in batches]).mean(0)
    assert (change * advantages).sum() > 0


def test_a_gradient_that_is_not_finite_is_never_applied(pipeline):
    accelerator = Accelerator(cpu=True)
    model, trajectories, advantages = sampled(pipeline, accelerator, True)
    trajectories.latents[1, 0] = torch.nan
    before = [p.detach().clone() for p in trainable_parameters(model.unet)]
    optimizer = torch.optim.AdamW(trainable_parameters(model.unet), lr=1e-3)
    batch = take(trajectories, advantages, torch.arange(4), torch.zeros(4, dtype=torch.long))
    result = optimizer_step(accelerator, model, optimizer, [batch], 1, 1e-3, 1e-4, 5.0, 1.0)
    assert result.skipped and result.cause == "the loss of 1 of 1 micro-batches was nan"
    for p, b in zip(trainable_parameters(model.unet), before, strict=True):
        assert torch.equal(p.detach(), b)


def test_learning_rate_rises_then_stays():
    rates = [learning_rate_at(update, 1.0, 3) for update in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate_at(0, 3e-4, 0) == 3e-4


def test_a_gradient_that_overflows_is_named(pipeline):
    accelerator = Accelerator(cpu=True)
    model, trajectories, advantages = sampled(pipeline, accelerator, True)
    parameter = trainable_parameters(model.unet)[2]
    parameter.register_hook(lambda gradient: gradient * torch.inf)
    optimizer = torch.optim.AdamW(trainable_parameters(model.unet), lr=1e-3)
    batch = take(trajectories, advantages, torch.arange(4), torch.zeros(4, dtype=torch.long))
    result = optimizer_step(accelerator, model, optimizer, [batch], 1, 1e-3, 1e-4, 5.0, 1.0)
    [name] = [name for name, p in model.unet.named_parameters() if p is parameter]
    assert result.skipped and result.cause == f"the gradient of {name} was not finite"


def outcome(skipped, cause=None, gap=0.0):
    return UpdateResult({}, gap, 981, skipped, cause)


def test_skipped_steps_in_a_row_end_the_run_with_the_first_cause():
    steps = SkippedSteps(3)
    for result in (outcome(True, "x"), outcome(True, "x"), outcome(False), outcome(True, "loss"), outcome(True, "y")):
        steps.count(result)
    with pytest.raises(ModelFailure, match="3 updates in a row were skipped .*first because loss; nothing of them"):
        steps.count(outcome(True, "z"))


def test_a_gap_above_the_limit_is_explained():
    assert gap_warning(outcome(False, gap=1e-5), 1e-5) is None
    warning = gap_warning(outcome(False, gap=2e-5), 1e-5)
    assert "differ by 2.0e-05" in warning and "timestep 981" in warning and "recompute_log_probs" in warning


def test_the_worst_timestep_is_found(pipeline):
    accelerator = Accelerator(cpu=True)
    model, trajectories, advantages = sampled(pipeline, accelerator, True)
    trajectories.log_probs[2, 1] += 0.25
    optimizer = torch.optim.SGD(trainable_parameters(model.unet), lr=0.0)
    batches = [take(trajectories, advantages, torch.arange(4), torch.full((4,), j)) for j in range(3)]
    result = optimizer_step(accelerator, model, optimizer, batches, 3, 0.0, 1e-2, 5.0, 1.0)
    assert result.logp_gap == pytest.approx(0.25, rel=1e-5)
    assert result.logp_gap_timestep == trajectories.timesteps[2, 1]


def test_recomputed_log_probs_are_the_training_paths_own_at_its_batch_shape(pipeline):
    model, trajectories, advantages = sampled(pipeline, Accelerator(cpu=True), True)
    trajectories.log_probs += 0.01
    trajectories.log_probs[3] = torch.nan
    recompute_log_probs(model, trajectories, batch_size=2)
    for j in range(trajectories.num_steps):
        batch = take(trajectories, advantages, torch.tensor([0, 1]), torch.full((2,), j))
        assert torch.equal(model.log_prob(batch).detach(), batch.old_log_probs)
    assert trajectories.log_probs[3].isnan().all() and trajectories.log_probs[2].isfinite().all()


@pytest.mark.parametrize("use_lora", [True, False])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_recomputed_log_probs_make_the_ratio_exactly_one_at_other_batch_shapes(pipeline, use_lora, precision):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model, trajectories, advantages = sampled(pipeline, accelerator, use_lora)
    recompute_log_probs(model, trajectories, batch_size=1)
    batches = [take(trajectories, advantages, torch.tensor([i]), torch.tensor([j])) for i in range(4) for j in range(3)]
    optimizer = torch.optim.SGD(trainable_parameters(model.unet), lr=0.0)
    assert optimizer_step(accelerator, model, optimizer, batches, 12, 0.0, 1e-4, 5.0, 1.0).logp_gap == 0.0


def test_recomputed_log_probs_are_at_the_shape_of_several_timesteps_in_a_pass(pipeline):
    accelerator = Accelerator(cpu=True)
    model, trajectories, advantages = sampled(pipeline, accelerator, True)
    sizes = []
    model.unet.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    recompute_log_probs(model, trajectories, batch_size=2, timesteps_per_forward=3)
    assert sizes == [2 * 2 * 3] * 2  # both halves of guidance
    batch = take(trajectories, advantages, torch.arange(2).repeat_interleave(3), torch.arange(3).repeat(2))
    assert torch.equal(model.log_prob(batch).detach(), batch.old_log_probs)


def test_a_step_at_which_the_unet_overflows_again_in_training_counts_for_nothing(pipeline):
    accelerator = Accelerator(cpu=True)
    model, _, _ = sampled(pipeline, accelerator, True)

    def overflowing(module, args, output):
        bad = (args[0][:, 0, 0, 0] > 2.9) & (args[1] < 900)
        return (output[0] * torch.where(bad[:, None, None, None], torch.nan, 1.0),)  # as is its gradient

    model.unet.register_forward_hook(overflowing)
    draw = torch.randn

    def drawn(shape, **options):
        noise = draw(shape, **options)
        noise[:, 0, 0, 0] = torch.tensor([30.0, 0.0])
        return noise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", drawn)
        _, trajectories = model.sample(["cat", "dog"], torch.Generator().manual_seed(0))
    assert trajectories.log_probs.isnan().all(1).tolist() == [True, False]
    optimizer = torch.optim.SGD(trainable_parameters(model.unet), lr=0.0)
    batches = [take(trajectories, torch.tensor([0.0, 1.0]), torch.arange(2), torch.full((2,), j)) for j in range(3)]
    result = optimizer_step(accelerator, model, optimizer, batches, 3, 0.0, 1e-4, 5.0, 1.0)
    assert not result.skipped and result.statistics["grad_norm"] > 0
