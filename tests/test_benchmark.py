"""Measuring measures: counted bytes and FLOPs against sums by hand, and real runs of scripts/benchmark.py."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from test_memory_options import checkpointed, unet_with_lora

from ddpo_pytorch.benchmarking import ARCHITECTURES, LiveBytes, PeakMemory, PretendedGpu, backward, count_flops, phase
from ddpo_pytorch.diffusers_patch.guidance import predict_noise

CPU = torch.device("cpu")
SHORT = [
    "--config=config/tiny.py",
    "--config.sample.num_steps=2",
    "--config.sample.batch_size=4",
    "--config.train.batch_size=2",
    "--config.cpu_threads=1",
    "--reps=1",
]


def benchmark(*arguments):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "scripts/benchmark.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """What --compare_with said and wrote: one process of each setting, all phases."""
    file = tmp_path_factory.mktemp("benchmark") / "compared.json"
    second = "--config.train.timesteps_per_forward=2 --config.seed=7"
    run = benchmark(*SHORT, "--rounds", "1", "--compare-with", second, "--json", str(file))
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads(file.read_text())


# --- bytes and FLOPs, by hand


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_peak_of_two_layers_is_the_sum_by_hand(device):
    with LiveBytes() as counted:
        first, second = (torch.nn.Linear(100, 100, bias=False, device=device) for _ in range(2))
        x = torch.empty(10, 100, device=device)
        weights, activation = 4 * 100 * 100, 4 * 10 * 100
        assert counted.live == 2 * weights + activation
        counted.reset()
        with torch.no_grad():
            y = second(first(x))  # x, the product between, and y
        assert counted.peak == 2 * weights + 3 * activation
        assert counted.live == 2 * weights + 2 * activation
        del y
        counted.reset()
        loss = second(first(x).relu()).sum()
        # x and what relu gave are kept, what went into it is not; the result lives as long as its sum is made
        assert counted.live == 2 * weights + 2 * activation + 4
        assert counted.peak == 2 * weights + 3 * activation + 4
        counted.reset()
        loss.backward()
        assert counted.live == 4 * weights + activation + 4  # both gradients, and x; nothing kept
        del loss, x, first, second
    assert counted.live == 0


def test_views_count_once_and_sizes_are_rounded_up():
    with LiveBytes(granularity=512) as counted:
        x = torch.empty(3, 5)
        views = x.T, x[1:], x.view(15)
        assert counted.live == 512
        del views, x
    assert counted.live == 0


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("options", [{}, {"cfg_passes": 2}], ids=str)
def test_shapes_alone_count_as_real_tensors_do(pipeline, options, checkpoints):
    peaks = []
    for device, pretended in (("cpu", contextlib.nullcontext()), ("meta", PretendedGpu())):
        pipeline.unet.to(device)
        unet = unet_with_lora(pipeline)
        if checkpoints:
            checkpointed(unet)
        with torch.device(device), LiveBytes() as counted, pretended:
            latents, embeds, negative = torch.randn(3, 4, 8, 8), torch.randn(3, 16, 16), torch.randn(1, 16, 16)
            prediction = predict_noise(unet, latents, torch.tensor([900, 400, 20]), embeds, negative, 5.0, **options)
            backward(prediction.square().mean())
        peaks.append(counted.peak)
    assert peaks[0] == peaks[1] > 5e5


def test_attention_is_counted_without_its_matrix_and_in_the_types_of_autocast():
    with LiveBytes() as counted, PretendedGpu() as gpu:
        q = torch.empty(1, 2, 4096, 40, device="meta", requires_grad=True)
        counted.reset()
        gpu.autocast = torch.float16
        result = F.scaled_dot_product_attention(q, q, q)
        assert result.dtype == torch.float16
        assert counted.peak < 4 * q.nbytes < 2 * 2 * 4096 * 4096
        assert F.layer_norm(result, (40,)).dtype == torch.float32
        backward(result)
        assert q.grad is not None and counted.peak < 2 * 2 * 4096 * 4096


def test_flops_of_a_linear_layer_are_those_of_the_formula():
    layer, x = torch.nn.Linear(30, 50), torch.randn(20, 30)
    forward = 2 * 20 * 30 * 50
    with torch.no_grad():
        assert count_flops(lambda: layer(x)) == forward
    assert count_flops(lambda: layer(x).sum().backward()) == 2 * forward  # x wants no gradient
    q = torch.randn(2, 3, 16, 8)
    assert count_flops(lambda: F.scaled_dot_product_attention(q, q, q)) == 2 * 2 * (2 * 3) * 16 * 16 * 8
    total = torch.zeros(20, 50)
    assert count_flops(lambda: total.addmm_(x, layer.weight.detach().T)) == forward


def test_flops_of_sd15_are_those_that_are_published():
    """Its UNet at 64x64 takes 0.68 TFLOP with a batch of one (339 GMACs, as fvcore counts it)."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(**ARCHITECTURES["sd15"]["unet"])
        x, t, context = torch.empty(1, 4, 64, 64), torch.zeros(1), torch.empty(1, 77, 768)
    assert sum(p.numel() for p in unet.parameters()) == 859_520_964
    with torch.no_grad(), PretendedGpu():
        assert count_flops(lambda: unet(x, t, context)) == pytest.approx(0.68e12, rel=0.2)


def test_peak_memory_is_of_its_own_phase():
    first = PeakMemory(CPU)
    torch.ones(50_000_000)
    of_first = first.read()
    second = PeakMemory(CPU).read()
    assert 0.19 < of_first["peak_gb"] - of_first["before_gb"] < 0.3
    assert second["peak_gb"] < of_first["peak_gb"] - 0.1


def test_the_first_call_is_apart_from_the_median():
    result = phase([9.0, 1.0, 3.0, 2.0], {"peak_gb": 1.0}, samples=4, flops=8, peak_flops=16.0)
    assert result["first_s"] == 9.0 and result["median_s"] == 2.0 and result["samples_per_s"] == 2.0
    assert result["peak_share"] == 8 / 2.0 / 16.0


# --- runs


@pytest.mark.slow
def test_every_phase_is_measured(compared):
    said, results = compared
    [run] = results["runs"][0]
    assert list(run["phases"]) == ["text", "step", "decode", "reward", "train", "optimizer", "epoch"]
    for name, p in run["phases"].items():
        assert p["median_s"] > 0 and len(p["all_s"]) == 2 and p["samples_per_s"] > 0, name
        assert 0.1 < p["before_gb"] <= p["peak_gb"] < 5, name
    for name in ("step", "train"):
        assert 0 < run["phases"][name]["peak_share"] < 1.1
    # 2 of 4 samples with their backward pass, of frozen weights, cost about what 4 forward passes do
    assert 0.9 < run["phases"]["train"]["flops"] / run["phases"]["step"]["flops"] < 1.7
    assert run["logp_gap"] < 1e-5
    assert run["config"]["sample"]["num_steps"] == 2 and "--config.cpu_threads=1" in run["overrides"]
    assert run["threads"] == 1 and run["versions"]["torch"] in torch.__version__ and run["hardware"]
    rates = run["derived"]
    assert rates["images_per_s"] == pytest.approx(
        1 / (1 / rates["sampling_images_per_s"] + 1 / rates["training_images_per_s"])
    )
    assert max(len(line) for line in said.splitlines()) <= 100


@pytest.mark.slow
def test_two_settings_are_compared_in_one_run(compared):
    said, results = compared
    a, b = (setting["phases"] for setting in results["settings"].values())
    assert results["runs"][1][0]["config"]["seed"] == 7
    # two timesteps at a time, for each of which W + B A is made once
    assert b["train"]["flops"] == pytest.approx(2 * a["train"]["flops"], rel=0.03)
    [of_b] = results["ratios"]
    for name, ratio in of_b.items():
        assert ratio["median_s"] == pytest.approx(b[name]["median_s"] / a[name]["median_s"])
    assert "B/A" in said and "train.timesteps_per_forward=2" in said


@pytest.mark.slow
def test_the_plain_path_and_several_settings_are_compared(tmp_path):
    file = tmp_path / "plain.json"
    others = "--config.train.cfg_passes=2; --config.train.gradient_checkpointing=True"
    run = benchmark(
        *SHORT, "--phases=train", "--rounds=1", "--against_plain", f"--compare_with={others}", f"--json={file}"
    )
    assert run.returncode == 0, run.stderr
    settings = json.loads(file.read_text())["settings"]
    assert list(settings) == [
        *("the plain path", "as it is", "train.cfg_passes=2", "train.gradient_checkpointing=True"),
    ]
    assert [line for line in run.stdout.splitlines() if line.endswith("/A")] == ["B/A", "C/A", "D/A"]
    flops = {name: setting["phases"]["train"]["flops"] for name, setting in settings.items()}
    # Sharing saves, what is computed twice costs.
    assert flops["as it is"] < flops["the plain path"] < flops["train.cfg_passes=2"]


@pytest.mark.slow
def test_an_earlier_file_is_compared_with(compared, tmp_path):
    earlier = compared[1]["runs"][0][0]
    for p in earlier["phases"].values():
        p["peak_gb"] = 1000.0
    (tmp_path / "a.json").write_text(json.dumps(earlier))
    run = benchmark(*SHORT, "--phases=sample,train", f"--compare={tmp_path / 'a.json'}")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.split(f"this/{tmp_path / 'a.json'}\n")[1].splitlines()
    assert [line.split()[0] for line in lines] == ["phase", "text", "step", "train", "optimizer"]
    assert all(float(line.split()[2]) < 0.01 for line in lines[1:])


@pytest.mark.slow
def test_a_budget_is_met_by_the_first_setting_that_fits():
    run = benchmark(*SHORT, "--budget", "5")
    assert run.returncode == 0, run.stderr
    assert "the first that fits in 5 GB" in run.stdout and "(nothing to change)" in run.stdout


@pytest.mark.slow
def test_an_impossible_budget_is_refused_with_the_least_there_is():
    lightest = ["--config.train.cfg_passes=2", "--config.train.gradient_checkpointing=True", "--config.offload=True"]
    run = benchmark(*SHORT, *lightest, "--budget=0.05")
    assert run.returncode == 1
    assert len(run.stdout.splitlines()) == 1  # every other setting is this one
    assert "error: nothing fits in 0.05 GB: the lightest setting's peak is" in run.stderr


@pytest.mark.slow
def test_the_estimate_says_what_it_is_and_falls_from_setting_to_setting(tmp_path):
    file = tmp_path / "estimate.json"
    run = benchmark("--estimate", "--random_weights=sd15", f"--json={file}")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("ESTIMATE")
    plain, two_passes, checkpointed, both, _ = (one["peak_gb"] for one in json.loads(file.read_text())["settings"])
    assert plain["weights"] == pytest.approx(2 * (859.5e6 + 123.1e6 + 83.7e6) / 1e9, rel=0.01)
    assert plain["train"] > two_passes["train"] > checkpointed["train"] > both["train"]
    assert plain["train"] < 5 and checkpointed["train"] < 4


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--phases=foo"], "there is no phase"),
        (["--random_weights=sd99"], "sd15|sd21|sdxl"),
        (["--bogus=1"], "bogus"),
        (["--config.train.x=3"], "unknown option config.train.x"),
        (["--compare=nowhere.json"], "nowhere.json"),
        (["--budget=-1"], "greater than 0"),
        (["--compare_with=nonsense"], "--compare_with takes"),
        (["--random-weights=sdxl", "--phases=epoch"], "does not train SDXL"),
        (["--budget=3", "--estimate"], "exclude each other"),
        (["--json=no/such/folder.json"], "no such folder"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_told_in_one_line_before_anything_is_loaded(arguments, said):
    run = benchmark(*arguments)
    assert run.returncode == 1 and run.stdout == ""
    [line] = run.stderr.splitlines()
    assert line.startswith("error: ") and said in line


@pytest.mark.slow
def test_the_gpu_check_writes_what_it_has_even_if_a_part_fails(tmp_path):
    out = tmp_path / "check.json"
    run = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", "--dry", out], capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == ["float32_batch1", "bf16_batch1", "bf16_batch1_compiled"]
    for name in ("float32_batch1", "bf16_batch1"):
        assert parts[name]["derived"]["images_per_s"] > 0 and parts[name]["logp_gap"] < 0.1
    assert parts["bf16_batch1_compiled"]["failed"] == "it ran out of time"
    assert "failed: it ran out of time" in run.stdout


def test_the_gpu_check_skips_what_there_is_no_time_for(tmp_path):
    out = tmp_path / "check.json"
    env = {**os.environ, "GPU_CHECK_SECONDS": "0"}
    command = [ROOT / "scripts" / "gpu_check.sh", "--dry", out]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60)
    assert run.returncode == 1
    parts = json.loads(out.read_text())["parts"]
    assert len(parts) == 3 and all(part["failed"] == "it ran out of time" for part in parts.values())
