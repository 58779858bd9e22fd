"""What a run costs as it goes on, and as it grows: memory and communication, counted in real runs."""

import json
import shutil

import pytest
from conftest import ROOT, launch, read_metrics, run_folder

pytestmark = pytest.mark.slow

TINY_SD = f"--config.pretrained.model={ROOT / 'ddpo_pytorch' / 'assets' / 'tiny_sd'}"
ALWAYS = [
    *(TINY_SD, "--config.mixed_precision=no", "--config.log_with=", "--config.sample.num_steps=2"),
    *("--config.prompt_fn=counting.py:prompt_fn", "--config.prompt_fn_kwargs={}"),
]


def run(folder, config, *arguments, processes=1):
    shutil.copy(ROOT / "tests" / "counting.py", folder)
    result = launch([f"--config={ROOT / 'config' / config}", *ALWAYS, *arguments], folder, processes)
    assert result.returncode == 0, result.stderr
    return read_metrics(run_folder(folder))


@pytest.mark.parametrize(
    "config, processes, arguments, samples, updates",
    [
        ("tiny.py", 2, ["--config.eval.every=0", "--config.sample.batch_size=4", "--config.train.batch_size=2"], 16, 4),
        # The published experiment's plan, whole, but for the model and the number of steps
        ("dgx.py:compressibility", 8, ["--config.eval.every=0", "--config.prompt_fn_kwargs.samples=32"], 256, 4),
    ],
    ids=["two", "dgx-on-eight"],
)
def test_processes_meet_once_an_update_and_once_an_epoch(tmp_path, config, processes, arguments, samples, updates):
    epochs = 2 if processes == 2 else 1
    lines = run(tmp_path, config, f"--config.num_epochs={epochs}", *arguments, processes=processes)
    assert [len(line["reward"]) for line in lines if "reward" in line] == [samples] * epochs
    assert sum("loss" in line for line in lines) == epochs * updates
    for rank in range(processes):
        counts = json.loads((tmp_path / f"counts_{rank}.json").read_text())
        # Gathering objects is two collectives: their sizes, then they themselves.
        expected = {"all_reduce": epochs * updates, "all_gather_object": epochs, "all_gather": 2 * epochs}
        # Accelerate's own, when a run ends
        assert {k: v for k, v in counts.items() if k != "barrier"} == expected and counts.get("barrier", 0) <= 1


def test_memory_is_flat_over_fifty_epochs(tmp_path):
    small = ["--config.sample.batch_size=4", "--config.sample.num_batches_per_epoch=1", "--config.train.batch_size=4"]
    run(tmp_path, "tiny.py", *small, "--config.eval.every=0", "--config.num_epochs=50", "--config.save_freq=10")
    memory = json.loads((tmp_path / "memory_0.json").read_text())
    assert len(memory) == 50
    middle, end = (sorted(part)[len(part) // 2] for part in (memory[10:20], memory[40:]))
    page = (run_folder(tmp_path) / "report.html").stat().st_size  # whose pictures are kept for the next one, up to 9 MB
    print(f"in use in epochs 10 to 20: {middle / 1e6:.2f} MB, 40 to 50: {end / 1e6:.2f} MB; page {page / 1e6:.2f} MB")
    # The last page before these had pictures of 10 and of 40 epochs. One epoch's trajectories and pictures are 0.1 MB.
    assert end < middle + page * 30 / 50 + 0.5e6
