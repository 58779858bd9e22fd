import json
import shutil

import pytest
import torch
from accelerate import Accelerator
from conftest import save_random_sd
from torch.testing import assert_close

from ddpo_pytorch import policy
from ddpo_pytorch.named_functions import ConfigError
from ddpo_pytorch.trajectories import take

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
CPU = torch.device("cpu")


def load(folder, num_steps=3):
    scheduler = policy.load_scheduler(str(folder), "main", num_steps, 1.0, CPU)
    return policy.load_pipeline(str(folder), "main", scheduler)


def test_lora_starts_as_no_change_with_gaussian_factors(random_sd):
    unet = load(random_sd).unet
    latents, t, context = torch.randn(1, 4, 8, 8), torch.tensor([500]), torch.randn(1, 5, 16)
    with torch.no_grad():
        before = unet(latents, t, context).sample
        policy.make_trainable(unet, True, 16, ATTENTION, torch.float32)
        assert torch.equal(unet(latents, t, context).sample, before)
    trainable = {n: p for n, p in unet.named_parameters() if p.requires_grad}
    layers = sum(1 for name, _ in unet.named_modules() if name.endswith((".attn1", ".attn2"))) * 4
    assert len(trainable) == 2 * layers > 0
    down = torch.cat([p.flatten() for n, p in trainable.items() if "lora_A" in n])
    assert all((p == 0).all() for n, p in trainable.items() if "lora_B" in n)
    assert_close(down.std().item(), 1 / 16, rtol=0.1, atol=0)  # thousands of draws of N(0, 1/rank)
    assert all(layer.scaling == {"default": 1.0} for layer in unet.modules() if hasattr(layer, "scaling"))


@pytest.mark.parametrize("rank, targets, share", [(2, ["to_q"], 1 / 8), (4, [*ATTENTION, "ff.net.2"], 1.25)])
def test_rank_and_target_modules_are_free(random_sd, rank, targets, share):
    def layers(unet):
        return sum("lora_A" in n for n, _ in unet.named_parameters())

    reference, unet = load(random_sd).unet, load(random_sd).unet
    policy.make_trainable(reference, True, 4, ATTENTION, torch.float32)
    policy.make_trainable(unet, True, rank, targets, torch.float32)
    assert all(p.shape[0] == rank for n, p in unet.named_parameters() if "lora_A" in n)
    attention_modules = layers(reference) / 4
    expected = attention_modules if targets == ["to_q"] else layers(reference) + attention_modules / 2
    assert layers(unet) == expected


def test_unknown_target_modules_are_refused(random_sd):
    with pytest.raises(ConfigError, match="lora.target_modules.*to_z"):
        policy.make_trainable(load(random_sd).unet, True, 4, ["to_z"], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lora_factors_stay_float32_over_half_precision_weights(random_sd, dtype):
    unet = load(random_sd).unet
    policy.make_trainable(unet, True, 4, ATTENTION, dtype)
    assert {p.dtype for p in unet.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in unet.parameters() if not p.requires_grad} == {dtype}


def test_the_whole_unet_is_trained_in_float32(random_sd):
    unet = load(random_sd).unet
    policy.make_trainable(unet, False, 4, ATTENTION, torch.bfloat16)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in unet.parameters())


@pytest.mark.parametrize("use_lora", [True, False])
def test_bf16_log_probs_in_training_are_exactly_those_of_sampling(random_sd, use_lora):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    pipeline = load(random_sd)
    policy.make_trainable(pipeline.unet, use_lora, 4, ATTENTION, torch.bfloat16)
    pipeline.vae.to(torch.bfloat16)
    pipeline.text_encoder.to(torch.bfloat16)
    model = policy.make_policy(pipeline, accelerator.prepare(pipeline.unet), pipeline.scheduler, 5.0, 1.0)
    images, trajectories = model.sample(["cat", "dog"], torch.Generator().manual_seed(0))
    assert images.dtype == trajectories.latents.dtype == trajectories.log_probs.dtype == torch.float32
    for j in range(3):
        batch = take(trajectories, torch.ones(2), torch.arange(2), torch.full((2,), j))
        log_prob = model.log_prob(batch)
        assert log_prob.requires_grad and torch.equal(log_prob.detach(), batch.old_log_probs)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("guidance_scale", [0.5, 1.0, 5.0])
@pytest.mark.parametrize("use_lora", [True, False], ids=["lora", "full"])
def test_the_ratio_is_exactly_one_before_the_first_update(random_sd, dtype, guidance_scale, use_lora):
    check_ratio(random_sd, dtype, guidance_scale, use_lora, is_compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("use_lora", [True, False], ids=["lora", "full"])
def test_the_ratio_is_exactly_one_for_a_compiled_unet(random_sd, dtype, use_lora):
    check_ratio(random_sd, dtype, 5.0, use_lora, is_compiled=True)


def check_ratio(random_sd, dtype, guidance_scale, use_lora, is_compiled):
    pipeline = load(random_sd)
    unet = pipeline.unet
    policy.make_trainable(unet, use_lora, 4, ATTENTION, dtype or torch.float32)
    with torch.no_grad():  # a LoRA that does something
        for p in policy.trainable_parameters(unet):
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    if dtype is not None:
        unet.forward = torch.autocast("cpu", dtype=dtype)(unet.forward)
    torch._dynamo.reset()
    called = torch.compile(unet, backend="aot_eager") if is_compiled else unet  # traced alone: the same kernels
    model = policy.make_policy(pipeline, called, pipeline.scheduler, guidance_scale, 1.0)
    _, trajectories = model.sample(["cat", "dog"], torch.Generator().manual_seed(0))
    for j in range(trajectories.num_steps):
        batch = take(trajectories, torch.ones(2), torch.arange(2), torch.full((2,), j))
        log_prob = model.log_prob(batch)
        assert log_prob.requires_grad and log_prob.isfinite().all()
        assert torch.equal(log_prob.detach(), batch.old_log_probs)


def test_samples_are_images_and_the_steps_that_made_them(random_sd):
    pipeline = load(random_sd, num_steps=4)
    model = policy.make_policy(pipeline, pipeline.unet, pipeline.scheduler, 5.0, 1.0)
    steps = []
    images, trajectories = model.sample(["cat"] * 3, torch.Generator().manual_seed(0), lambda i, t, x: steps.append(i))
    assert images.shape == (3, 3, 16, 16) and images.min() >= 0 and images.max() <= 1
    assert trajectories.latents.shape == (3, 5, 4, 8, 8) and steps == [0, 1, 2, 3]
    assert trajectories.timesteps.tolist() == [[751, 501, 251, 1]] * 3
    assert trajectories.prev_timesteps.tolist() == [[501, 251, 1, -249]] * 3
    # The noise is a function of the generator.
    again, _ = model.sample(["cat"] * 3, torch.Generator().manual_seed(0))
    other, _ = model.sample(["cat"] * 3, torch.Generator().manual_seed(1))
    assert torch.equal(images, again) and not torch.equal(images, other)


def test_encode_equals_stock_diffusers(random_sd, pipeline):
    prompts = ["cat", "a very long prompt " * 30, ""]
    stock, _ = pipeline.encode_prompt(prompts, "cpu", 1, False)
    assert torch.equal(policy.encode_prompts(pipeline, prompts), stock)


@pytest.mark.parametrize("change", [{"steps_offset": 0}, {"set_alpha_to_one": True}])
def test_a_schedule_whose_last_step_has_no_noise_is_refused_before_weights_are_read(random_sd, tmp_path, change):
    shutil.copytree(random_sd / "scheduler", tmp_path / "scheduler")
    file = tmp_path / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=r"no noise at timesteps \[\d\].*steps_offset 1 and set_alpha_to_one false"):
        policy.load_scheduler(str(tmp_path), "main", 10, 1.0, CPU)


def test_more_steps_than_the_model_has_are_refused(random_sd):
    with pytest.raises(ConfigError, match=r"num_steps \(1001\).*1000"):
        policy.load_scheduler(str(random_sd), "main", 1001, 1.0, CPU)


def test_a_model_that_cannot_be_had_is_named_with_ways_out(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r'"nobody/nothing".*--config.pretrained.model=FOLDER.*config/tiny.py'):
        policy.load_scheduler("nobody/nothing", "main", 10, 1.0, CPU)
    with pytest.raises(ConfigError, match='"./nowhere": there is no such folder'):
        policy.load_scheduler("./nowhere", "main", 10, 1.0, CPU)
    with pytest.raises(ConfigError, match=r"no Stable Diffusion pipeline"):
        policy.load_scheduler(str(tmp_path), "main", 10, 1.0, CPU)


def test_the_fingerprint_tells_models_apart_but_not_their_folders(random_sd, tmp_path):
    copy = shutil.copytree(random_sd, tmp_path / "copy")
    other = save_random_sd(tmp_path / "other", seed=1)
    prints = [policy.unet_fingerprint(load(folder).unet) for folder in (random_sd, copy, other)]
    assert prints[0] == prints[1] != prints[2]


def test_precision_that_the_device_lacks_is_refused():
    with pytest.raises(ConfigError, match='"fp16" needs a CUDA GPU.*"bf16" or "no"'):
        policy.check_device(CPU, "fp16", False)
    policy.check_device(CPU, "bf16", False)


def test_8bit_adam_runs_or_says_how_to_get_it(monkeypatch):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    parameter = torch.nn.Parameter(torch.ones(8192))
    optimizer = policy.make_optimizer([parameter], 0.1, (0.9, 0.999), 0.0, 1e-8, use_8bit_adam=True)
    assert isinstance(optimizer, bitsandbytes.optim.AdamW8bit)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[parameter]["state1"].dtype == torch.uint8
    assert_close(parameter.detach(), torch.full((8192,), 0.9), rtol=0, atol=0.01)

    monkeypatch.setattr(bitsandbytes.optim, "AdamW8bit", None)
    with pytest.raises(ConfigError, match="use_8bit_adam needs a working bitsandbytes"):
        policy.check_device(CPU, "no", True)


def test_a_folder_that_wants_its_own_code_run_is_refused(random_sd, tmp_path):
    folder = shutil.copytree(random_sd, tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "unet": ["evil", "UNet2DConditionModel"]}))
    with pytest.raises(ConfigError, match="neither of diffusers nor of transformers: unet; code in a model's folder"):
        policy.load_pipeline(str(folder), "main", None)
