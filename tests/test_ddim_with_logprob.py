import json
import math

import pytest
import torch
from conftest import GOLDENS, SD_SCHEDULER
from diffusers import DDIMScheduler
from safetensors.torch import load_file
from torch.testing import assert_close

from ddpo_pytorch.diffusers_patch.ddim_with_logprob import ddim_step_with_logprob, gaussian_log_prob

FIGURES = json.loads((GOLDENS / "ddim_step.json").read_text())
TENSORS = load_file(GOLDENS / "ddim_step.safetensors")


def random_step(seed=0, batch=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 4, 8, 8, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("case", FIGURES["cases"], ids=lambda c: f"{c['case']}")
def test_steps_equal_the_original(case):
    k = case["case"]
    scheduler = DDIMScheduler(
        **{**FIGURES["scheduler"], "prediction_type": case["prediction_type"], "clip_sample": case["clip_sample"]}
    )
    scheduler.set_timesteps(case["num_inference_steps"])
    arguments = (TENSORS[f"{k}.model_output"], TENSORS[f"{k}.timestep"], TENSORS[f"{k}.sample"])
    generator = torch.Generator().manual_seed(case["generator_seed"])

    drawn = ddim_step_with_logprob(scheduler, *arguments, eta=case["eta"], generator=generator)
    assert_close(drawn, (TENSORS[f"{k}.prev_sample"], TENSORS[f"{k}.log_prob"]))

    given = TENSORS[f"{k}.given_prev_sample"]
    scored = ddim_step_with_logprob(scheduler, *arguments, eta=case["eta"], prev_sample=given)
    # The log-density of a far-off point is a large number of either sign; its rounding is relative.
    assert_close(scored, (given, TENSORS[f"{k}.given_log_prob"]), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("set_alpha_to_one", [True, False])
def test_steps_equal_stock_diffusers_and_torch_distributions(prediction_type, eta, set_alpha_to_one):
    arguments = {**SD_SCHEDULER, "prediction_type": prediction_type, "set_alpha_to_one": set_alpha_to_one}
    scheduler = DDIMScheduler(**arguments)
    scheduler.set_timesteps(10)
    model_output, sample = random_step()
    for t in scheduler.timesteps:
        generators = [torch.Generator().manual_seed(int(t)) for _ in range(2)]
        ours, log_prob = ddim_step_with_logprob(scheduler, model_output, t, sample, eta=eta, generator=generators[0])
        stock = scheduler.step(model_output, int(t), sample, eta=eta, generator=generators[1]).prev_sample
        assert_close(ours, stock)

        std = eta * scheduler._get_variance(int(t), int(t) - 100).clamp(min=0).sqrt()
        if std > 0:
            mean = stock - std * torch.randn(sample.shape, generator=torch.Generator().manual_seed(int(t)))
            expected = torch.distributions.Normal(mean.double(), std.double()).log_prob(ours.double()).mean((1, 2, 3))
            assert_close(log_prob.double(), expected, rtol=1e-5, atol=1e-4)  # (x - mean) / std in float32
        else:
            assert (log_prob == math.inf).all()


def test_a_batch_may_mix_timesteps():
    scheduler = DDIMScheduler(**SD_SCHEDULER)
    scheduler.set_timesteps(10)
    model_output, sample = random_step()
    _, next_sample = random_step(seed=1)
    timesteps = scheduler.timesteps[[0, 4, 9]]
    _, together = ddim_step_with_logprob(scheduler, model_output, timesteps, sample, eta=1.0, prev_sample=next_sample)
    for i, t in enumerate(timesteps):
        one = slice(i, i + 1)
        _, alone = ddim_step_with_logprob(
            scheduler, model_output[one], t, sample[one], eta=1.0, prev_sample=next_sample[one]
        )
        assert_close(alone, together[one])


def test_recorded_timesteps_do_not_depend_on_the_scheduler_afterwards():
    scheduler = DDIMScheduler(**SD_SCHEDULER)
    scheduler.set_timesteps(10)
    model_output, sample = random_step()
    t = torch.tensor([301, 201, 1])
    next_sample, before = ddim_step_with_logprob(scheduler, model_output, t, sample, eta=1.0)
    scheduler.set_timesteps(50)
    arguments = {"eta": 1.0, "prev_sample": next_sample, "prev_timestep": t - 100}
    assert_close(ddim_step_with_logprob(scheduler, model_output, t, sample, **arguments)[1], before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_not_rounded_again(dtype):
    scheduler = DDIMScheduler(**SD_SCHEDULER)
    scheduler.set_timesteps(10)
    model_output, sample = (x.to(dtype) for x in random_step())
    next_sample, log_prob = ddim_step_with_logprob(scheduler, model_output, 1, sample, eta=1.0)
    assert next_sample.dtype == log_prob.dtype == torch.float32
    _, again = ddim_step_with_logprob(scheduler, model_output, 1, sample, eta=1.0, prev_sample=next_sample)
    assert_close(again, log_prob, rtol=0, atol=0)


def test_a_deterministic_step_is_a_point_mass_and_never_nan():
    x = torch.zeros(2, 1, 2, 2)
    mean = torch.stack([torch.zeros(1, 2, 2), torch.full((1, 2, 2), 0.5)]).requires_grad_()
    log_prob = gaussian_log_prob(x, mean, torch.zeros(2, 1, 1, 1))
    assert log_prob.tolist() == [math.inf, -math.inf]


def test_wrong_calls_are_refused():
    scheduler = DDIMScheduler(**SD_SCHEDULER)
    model_output, sample = random_step()
    with pytest.raises(ValueError, match="set_timesteps"):
        ddim_step_with_logprob(scheduler, model_output, 1, sample, eta=1.0)
    scheduler.set_timesteps(10)
    with pytest.raises(ValueError, match="not both"):
        ddim_step_with_logprob(
            scheduler, model_output, 1, sample, eta=1.0, generator=torch.Generator(), prev_sample=sample
        )
