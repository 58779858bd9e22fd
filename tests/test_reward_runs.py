"""Whole runs of the training script with learned, mixed and served rewards."""

import subprocess
import time

import pytest
from conftest import ROOT, command_for, launch, read_metrics, run_folder, train
from test_train import assert_same_checkpoint
from vlm_server import close, cut, free_port, garbage, slow, start_server, status, stop, wait_for

from ddpo_pytorch.checkpoints import read_state

MIXED = (
    "--config.reward_fn=weighted_sum",
    "--config.reward_fn_kwargs={'components': [{'reward_fn': 'jpeg_compressibility'}, "
    "{'reward_fn': 'colorfulness', 'weight': -0.5}]}",
)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_weighted_sum_resumes_bit_for_bit_with_its_scales(tmp_path, random_sd, num_processes):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    straight.mkdir()
    resumed.mkdir()
    whole = train(random_sd, straight, *MIXED, "--config.num_epochs=3", num_processes=num_processes)
    part = train(random_sd, resumed, *MIXED, "--config.num_epochs=1", num_processes=num_processes)
    more = ["--config.num_epochs=3", f"--config.resume_from={part}"]
    train(random_sd, resumed, *MIXED, *more, num_processes=num_processes)
    assert_same_checkpoint(whole / "checkpoints" / "checkpoint_3", part / "checkpoints" / "checkpoint_3")
    assert read_metrics(whole) == read_metrics(part)
    samples = 4 * num_processes
    scales = read_state(whole / "checkpoints" / "checkpoint_3").reward
    assert scales.keys() == {"jpeg_compressibility", "colorfulness"}
    assert all(count == 3 * samples for count, _, _ in scales.values())
    for line in (line for line in read_metrics(whole) if "reward" in line):
        sizes, colours = line["reward/jpeg_compressibility"], line["reward/colorfulness"]
        assert len(sizes) == len(colours) == len(line["reward"]) == samples
        assert line["reward/jpeg_compressibility_mean"] == pytest.approx(sum(sizes) / samples)
        assert line["reward/colorfulness_mean"] == pytest.approx(sum(colours) / samples)


# --- the embedded model

SHORT = [
    "--config.log_with=",
    "--config.eval.every=0",
    "--config.sample.num_steps=2",
    "--config.sample.batch_size=6",
    "--config.train.batch_size=6",
    "--config.run_name=test",
    "--config.save_freq=1",
]


def tiny(name, *extra):
    return ["--config", f"{ROOT / 'config' / 'tiny.py'}:{name}", *SHORT, *extra]


def assert_ran(result, folder, epochs):
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in read_metrics(folder) if "reward" in line]
    assert [line["epoch"] for line in lines] == list(range(epochs))
    assert all(line["reward/failed_fraction"] == 0 and line["reward_std"] > 0 for line in lines)
    assert (folder / "checkpoints" / f"checkpoint_{epochs}").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("name", ["classifier", "mixed"])
def test_the_embedded_model_trains_on_it_and_resumes(tmp_path, name, num_processes):
    for epochs, more in ((1, []), (2, [f"--config.resume_from={tmp_path / 'logs'}"])):
        if more:
            more = [f"--config.resume_from={run_folder(tmp_path)}"]
        result = launch(tiny(name, f"--config.num_epochs={epochs}", *more), tmp_path, num_processes)
        assert_ran(result, run_folder(tmp_path), epochs)


def vlm_options(base_url, minilm, **more):
    options = {"base_url": base_url, "bert_model": minilm, "num_layers": 6, "max_tokens": 8, **more}
    return [f"--config.reward_fn_kwargs.{key}={value}" for key, value in options.items()]


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_embedded_model_trains_on_a_served_model_and_resumes(tmp_path, llava_url, minilm, num_processes):
    for epochs in (1, 2):
        more = [f"--config.resume_from={run_folder(tmp_path)}"] if epochs > 1 else []
        arguments = tiny("vlm", f"--config.num_epochs={epochs}", *vlm_options(llava_url, minilm), *more)
        assert_ran(launch(arguments, tmp_path, num_processes), run_folder(tmp_path), epochs)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("comes_back", [True, False], ids=["comes-back", "stays-away"])
def test_a_server_killed_in_the_middle_of_an_epoch(tmp_path, llava, minilm, comes_back, num_processes):
    port = free_port()
    server = start_server(llava, port)
    wait_for(port)
    arguments = tiny(
        "vlm",
        "--config.num_epochs=2",
        "--config.sample.num_batches_per_epoch=8",
        *vlm_options(f"http://127.0.0.1:{port}/v1", minilm, max_tries=8 if comes_back else 3, backoff=1.0),
    )
    command, options = command_for(arguments, tmp_path, num_processes)
    process = subprocess.Popen(command, **options)
    try:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("logs/*/checkpoints/checkpoint_1")):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        stop(server)
        if comes_back:
            time.sleep(2)
            server = start_server(llava, port)
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        stop(server)
    folder = run_folder(tmp_path)
    if comes_back:
        assert_ran(subprocess.CompletedProcess(command, process.returncode, output, errors), folder, 2)
        return
    assert process.returncode not in (0, None)
    says = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(says) == num_processes and len(set(says)) == 1
    assert "reward function llava_bertscore failed for" in says[0] and "config.max_failed_fraction 0.1" in says[0]
    assert f"no connection ([Errno 111] Connection refused) at http://127.0.0.1:{port}/v1 (3 tries)" in says[0]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint_1"]
    read_state(folder / "checkpoints" / "checkpoint_1")


@pytest.mark.slow
def test_a_server_with_bad_days_costs_a_sample_and_not_the_run(tmp_path, proxy, minilm):
    """Everything that may pass is tried again; one reply of twelve is garbage, which is less than a tenth."""
    proxy.faults = [None, status(503), status(429, Retry_After="1"), close, cut, slow(3), status(500), garbage(b"{}")]
    options = vlm_options(proxy.base_url, minilm, read_timeout=2, backoff=0.1)
    result = launch(tiny("vlm", "--config.num_epochs=1", *options), tmp_path)
    assert result.returncode == 0, result.stderr
    [line] = [line for line in read_metrics(run_folder(tmp_path)) if "reward" in line]
    assert line["reward/failed_fraction"] == pytest.approx(1 / 12) and line["reward"].count(None) == 1


@pytest.mark.slow
def test_a_wrong_key_ends_both_processes_with_one_line_before_the_model_is_loaded(tmp_path, proxy, minilm):
    proxy.always = status(401)
    result = launch(tiny("vlm", *vlm_options(proxy.base_url, minilm)), tmp_path, num_processes=2)
    says = {line for line in result.stderr.splitlines() if line.startswith("error: ")}
    assert (
        result.returncode != 0 and len(says) == 1 and "Traceback (most recent call last):\n  File" not in result.stdout
    )
    assert f"{proxy.base_url} refuses a request without a key (set api_key_env): HTTP 401" in says.pop()
    assert not (tmp_path / "logs").exists()
