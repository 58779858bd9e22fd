"""What can go wrong in a run, each put into a real run of the embedded model: how it ends, what it says, what is left."""

import json
import random
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import wandb_file
from conftest import ROOT, command_for, launch, read_metrics
from test_train import assert_same_checkpoint

from ddpo_pytorch.checkpoints import problem_of, read_state

pytestmark = pytest.mark.slow

TINY = str(ROOT / "config" / "tiny.py")
SHORT = [
    "--config.log_with=",
    "--config.eval.every=0",
    "--config.sample.num_steps=2",
    "--config.sample.batch_size=4",
    "--config.sample.num_batches_per_epoch=1",
    "--config.train.batch_size=4",
    "--config.num_epochs=3",
    "--config.save_freq=1",
    "--config.num_checkpoint_limit=2",
    "--config.run_name=test",
    "--config.prompt_fn_kwargs={}",
    "--config.prompt_fn=simple_animals",
]
REWARDS = """
import os, time
def prompt(token): return "cat", {}
RANK = os.environ.get("RANK", "0")
calls = 0
def reward(kind, rank="0", api_key=""):
    if kind == "hangs" and RANK == rank:
        time.sleep(3600)
    def f(images, prompts, metadata):
        global calls
        calls += 1
        plain = [float(i) for i in range(len(prompts))]
        if calls < 2 or RANK != rank:
            return plain
        if kind == "raises": raise RuntimeError("the scorer fell over")
        if kind == "leaves": raise SystemExit(0)
        if kind == "shape": return images.mean((2, 3))
        if kind == "text": return ["good"] * len(prompts)
        if kind == "nan": return [float("nan")] * len(prompts)
        if kind == "one-nan": return [float("nan"), *plain[1:]]
        if kind == "sleeps": time.sleep(3600)
        if kind == "huge": return [1e308] * len(prompts)
        if kind == "leaks": raise RuntimeError("401 for " + api_key)
        if kind == "equal": return [7] * len(prompts)
    return f
"""


def fault(name, *more, rank=0, epoch=1):
    kwargs = {"fault": name, "rank": rank, "epoch": epoch}
    options = [f"--config.prompt_fn_kwargs.{key}={value}" for key, value in kwargs.items()]
    return ["--config.prompt_fn=fault_injection.py:prompt_fn", *options, *more]


def reward(kind, *more, rank=0):
    names = ["--config.reward_fn=faulty_rewards.py:reward", f"--config.reward_fn_kwargs.kind={kind}"]
    return [*names, f"--config.reward_fn_kwargs.rank='{rank}'", *more]


@dataclass
class Row:
    """One fault.

    Attributes:
        says: regular expressions, each in what is printed.
        left: numbers of the checkpoints on disk afterwards, all of them whole; None: not even a folder for the run.
    """

    arguments: list[str]
    code: int
    says: list[str]
    left: set[int] | None = None
    processes: int = 1
    never: list[str] = field(default_factory=list)


NO_ERROR = ["error: ", "Traceback"]
IMPATIENT = ["--config.timeout_minutes=0.2", "--config.reward_timeout=5"]
STUCK = r"error: waited [\d.]+ minutes \(config.timeout_minutes\) for process {}, which is at {}"
NO_ROOM = (
    r"error: (process 0: )?cannot write the checkpoint .*checkpoint_2: .* MB free there\); older ones are as they were"
)
# fmt: off
TABLE = {
    # --- what a config can say, before anything is loaded
    "unknown option": Row(["--config.train.lr=1"], 1, ['error: unknown option config.train.lr']),
    "unknown option in the file": Row(["--config=unknown.py"], 1, ['unknown option config.train.batchsize.*"train.batch_size"']),
    "wrong type": Row(["--config.seed=1.5"], 1, ["config.seed must be a whole number.*got 1.5"]),
    "wrong type in the file": Row(["--config=wrong_type.py"], 1, ["config.use_lora must be True or False; got 'yes'"]),
    "no such config file": Row(["--config=nowhere.py"], 1, ['there is no file "nowhere.py"']),
    "batches do not fit": Row(["--config.train.batch_size=3"], 1, [r"sample.batch_size \(4\) must be a multiple of"]),
    "nothing to compare with": Row(["--config.sample.batch_size=1", "--config.train.batch_size=1"], 1, ["one sample per epoch"]),
    "no noise": Row(["--config.sample.eta=0"], 1, ["config.sample.eta must be"]),
    "training without guidance": Row(["--config.train.cfg=False"], 1, ["train.cfg is False while"]),
    "no step to train on": Row(["--config.train.timestep_fraction=0.1"], 1, ["leaves no step to train on"]),
    "no such prompt file": Row(["--config.prompt_fn=from_file", "--config.prompt_fn_kwargs.path=no.txt"], 1, ['no prompt file "no.txt"']),
    "prompt function raises at once": Row(fault("prompt-error", epoch="'x'"), 1, ["config.prompt_fn .* raised TypeError"]),
    "no such reward": Row(["--config.reward_fn=jpeg"], 1, ['config.reward_fn "jpeg" is no function of']),
    "reward arguments": Row(["--config.reward_fn_kwargs.x=1"], 1, ["do not fit jpeg_compressibility"]),
    "component of a sum": Row(["--config.reward_fn=weighted_sum", "--config.reward_fn_kwargs={'components': [{'reward_fn': 'x'}]}"], 1, ['"x" is no function']),
    "key not set": Row(["--config.reward_fn=vlm_rating", "--config.reward_fn_kwargs.api_key_env=NO_KEY"], 1, ["'NO_KEY', which is not set"]),
    "no server": Row(["--config.reward_fn=vlm_rating", "--config.reward_fn_kwargs.base_url=http://127.0.0.1:9/v1", "--config.reward_fn_kwargs.startup_timeout=1"], 1, ["no vision-language server answers.*vllm serve"]),
    "fp16 on a CPU": Row(["--config.mixed_precision=fp16"], 1, ['"fp16" needs a CUDA GPU']),
    "unknown tracker": Row(["--config.log_with=wandbb"], 1, ['"wandbb" is no tracker']),
    "no such model": Row(["--config.pretrained.model=./nowhere"], 1, ['"./nowhere"']),
    "no layer of that name": Row(["--config.lora.target_modules=('nothing',)"], 1, ["config.lora.target_modules .* do not fit"]),
    "nothing to resume": Row(["--config.resume_from=nowhere"], 1, ['"nowhere": no checkpoint there']),
    "resume without a name": Row(["--config.resume=auto", "--config.run_name="], 1, ["config.run_name, which must be set"]),
    "the log folder cannot be written": Row(["--config.logdir=/proc/logs"], 1, ['config.logdir "/proc/logs": cannot make the folder']),
    "the log folder cannot be written by two": Row(["--config.logdir=/proc/logs"], 1, ['config.logdir "/proc/logs": cannot make the folder'], None, 2),
    "the log folder is a file": Row(["--config.logdir=a_file"], 1, ['config.logdir "a_file": cannot make the folder']),

    # --- rewards
    "reward raises": Row(reward("raises"), 1, ["error: reward function faulty_rewards.py:reward failed with RuntimeError: the scorer fell over"], {1}),
    "reward raises on one of two": Row(reward("raises", rank=1), 1, ["error: process 1: reward function .* the scorer fell over"], {1}, 2),
    "reward ends the program": Row(reward("leaves"), 1, ["failed with SystemExit"], {1}),
    "reward of a wrong shape": Row(reward("shape"), 1, [r"returned rewards of shape \(4, 3\)"], {1}),
    "reward is text": Row(reward("text"), 1, ["returned what are not numbers"], {1}),
    "all rewards fail": Row(reward("nan"), 1, ["failed for 4 of 4 samples.*max_failed_fraction 0.1: 4 x it returned nan"], {1}),
    "rewards overflow": Row(reward("huge"), 1, ["failed for 4 of 4 samples.*4 x it returned 1e\\+308"], {1}),
    "few rewards fail": Row(reward("one-nan", "--config.max_failed_fraction=0.3"), 0, ["25.0% failed", "finished"], {2, 3}, never=NO_ERROR),
    "all rewards equal": Row(reward("equal"), 0, [r"reward 7 \+- 0", "all rewards of this epoch are equal", "finished"], {2, 3}, never=NO_ERROR),
    "reward sleeps for ever": Row(reward("sleeps", "--config.reward_timeout=1"), 1, ["took longer than config.reward_timeout, 1 s"], {1}),
    "reward is never made on one of two": Row(reward("hangs", *IMPATIENT, rank=1), 1, [STUCK.format(1, "loading the reward")], None, 2),
    "reward sleeps on one of two": Row(reward("sleeps", "--config.reward_timeout=1", rank=1), 1, ["process 1: reward function .* took longer"], {1}, 2),

    # --- prompts, sampling, training
    "prompts end": Row(fault("prompt-error"), 1, ["error: prompt function .* failed with LookupError: the prompts are gone"], {1}),
    "prompts end on one of two": Row(fault("prompt-error", rank=1), 1, ["error: process 1: prompt function .* LookupError: the prompts are gone"], {1}, 2),
    "prompt function ends the program": Row(fault("leave"), 1, ["failed with SystemExit: 0"], {1}),
    "noise prediction is never finite": Row(fault("noise-always"), 1, ["failed for 1 of 4 samples.*1 x the picture is not finite"], {1}),
    "noise prediction is not finite once": Row(fault("noise-once", "--config.max_failed_fraction=0.3"), 0, ["25.0% failed", "finished"], {2, 3}, never=NO_ERROR),
    "one gradient is not finite": Row(fault("gradients-once"), 0, ["warning: update 1 was skipped: the loss of 2 of 2 micro-batches was nan", "1 updates skipped", "finished"], {2, 3}, never=NO_ERROR),
    "no update at all": Row(fault("gradients-always", "--config.num_epochs=2", epoch=0), 1, ["every update was skipped, so nothing was learned"], {1, 2}),
    "gradients are never finite": Row(fault("gradients-always", "--config.train.max_skipped_steps=2"), 1, ["2 updates in a row were skipped .*first because the loss of 2 of 2 micro-batches was nan"], {1, 2}),
    "training fails": Row(fault("training-error"), 1, ["ArithmeticError: the loss is odd"], {1}),
    "training fails on one of two": Row(fault("training-error", rank=1), 1, ["ArithmeticError: the loss is odd"], {1}, 2),
    "out of memory": Row(fault("out-of-memory"), 1, ["OutOfMemoryError: CUDA out of memory"], {1}),
    "out of memory on one of two": Row(fault("out-of-memory", rank=1), 1, ["OutOfMemoryError: CUDA out of memory"], {1}, 2),
    "one of two is stuck drawing prompts": Row(fault("stuck-drawing", *IMPATIENT, rank=1), 1, [STUCK.format(1, "epoch 1: sampling")], {1}, 2),
    "one of two is stuck sampling": Row(fault("stuck-sampling", *IMPATIENT), 1, [STUCK.format(0, "epoch 1: sampling")], {1}, 2),
    "one of two is stuck training": Row(fault("stuck-training", *IMPATIENT, rank=1), 1, [STUCK.format(1, "epoch 1: training")], {1}, 2),
    "one of two is stuck saving": Row(fault("stuck-saving", *IMPATIENT), 1, [STUCK.format(0, "epoch 1: saving")], {1}, 2),
    "log-probs differ": Row(fault("other-log-probs"), 0, ["warning: the log-probs of unchanged weights differ by 1.0e-03", "finished"], {2, 3}),
    "log-probs differ and are recomputed": Row(fault("other-log-probs", "--config.train.recompute_log_probs=True"), 0, ["logp_gap 0.0e\\+00", "finished"], {2, 3}, never=[*NO_ERROR, "warning: the log-probs"]),
    "a whole UNet at a LoRA's rate": Row(["--config.use_lora=False", "--config.train.learning_rate=3e-4", "--config.num_epochs=1"], 0, ["warning: train.learning_rate 0.0003 with use_lora False"], {1}),

    # --- saving
    "weights are not finite": Row(fault("not-finite-weights"), 1, ["trained tensors are not finite, first"], {1}),
    "weights differ between two": Row(fault("diverging", rank=1), 1, ["the processes' trained weights differ"], {1}, 2),
    "weights differ between saves": Row(fault("diverging", "--config.save_freq=0", rank=1), 1, ["the processes' trained weights differ", "state after 1 epochs is saved"], {1}, 2),
    "weights overflow between saves": Row(fault("gradients-always", "--config.save_freq=0", "--config.train.max_skipped_steps=2"), 1, ["2 updates in a row were skipped", "saved: .*suspect_checkpoint_2"], set()),
    "no room for the weights": Row(fault("disk-weights"), 1, [NO_ROOM], {1}, never=["Traceback"]),
    "no room for the optimizer": Row(fault("disk-optimizer"), 1, [NO_ROOM], {1}, never=["Traceback"]),
    "no room for the optimizer of two": Row(fault("disk-optimizer"), 1, [NO_ROOM], {1}, 2, never=["Traceback (most recent call last):\n  File \"scripts"]),
    "the disk is full for metrics": Row(fault("disk-rewards"), 1, [r"error: cannot write /dev/full: .*No space left"], {1}, never=["Traceback"]),
    "the disk is full for metrics of two": Row(fault("disk-losses"), 1, [r"error: cannot write /dev/full: .*No space left"], {1}, 2),

    # --- one of two is gone without a word
    "one of two is killed": Row(fault("kill-training", "--config.save_freq=0", rank=1), 1, ["SIGKILL", "state after 1 epochs is saved"], {1}, 2),
    "the first of two is killed": Row(fault("kill-training"), 1, ["SIGKILL"], {1}, 2),

    # --- signals; between saves the last complete epoch is kept and written
    "SIGTERM while sampling": Row(fault("term-sampling", "--config.save_freq=0"), 143, ["state after 1 epochs is saved", "ended by SIGTERM"], {1}),
    "SIGTERM while training": Row(fault("term-training", "--config.save_freq=0"), 143, ["state after 1 epochs is saved", "ended by SIGTERM"], {1}),
    "SIGTERM while writing": Row(fault("term-writing"), 143, ["state after 2 epochs is saved", "ended by SIGTERM"], {1, 2}),
    "SIGINT while training": Row(fault("int-training", "--config.save_freq=0"), 130, ["state after 1 epochs is saved", "ended by SIGINT"], {1}),
    "SIGTERM in the first epoch": Row(fault("term-training", epoch=0), 143, ["ended by SIGTERM"], set()),
    "failure between saves": Row(fault("training-error", "--config.save_freq=0"), 1, ["state after 1 epochs is saved"], {1}),
}
# fmt: on
FILES = {
    "faulty_rewards.py": REWARDS,
    "unknown.py": f"import runpy\ndef get_config():\n    c = runpy.run_path({TINY!r})['get_config']()\n"
    "    c.train.batchsize = 3\n    return c\n",
    "wrong_type.py": f"import runpy\ndef get_config():\n    c = runpy.run_path({TINY!r})['get_config']()\n"
    "    with c.ignore_type():\n        c.use_lora = 'yes'\n    return c\n",
    "a_file": "",
}


def prepare(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    shutil.copy(ROOT / "tests" / "fault_injection.py", folder)


def run(folder: Path, arguments: list[str], processes: int = 1, **environment: str):
    spec = [] if any(a.startswith("--config=") for a in arguments) else [f"--config={TINY}"]
    return launch([*spec, *SHORT, *arguments], folder, processes, timeout=240, HF_HUB_OFFLINE="1", **environment)


def checkpoints_in(folder: Path) -> set[int] | None:
    """Numbers of the run's checkpoints, after a look at each; None if there is no run."""
    runs = list((folder / "logs").glob("[!.]*")) if (folder / "logs").is_dir() else []
    if not runs:
        return None
    [run_folder] = runs
    found = [path for path in (run_folder / "checkpoints").glob("*") if not path.name.startswith(".deleting")]
    assert all(problem_of(path) is None for path in found), found
    found = [path for path in found if not path.name.startswith("suspect_")]
    return {int(path.name.removeprefix("checkpoint_")) for path in found}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_a_fault_has_its_outcome(tmp_path, row):
    prepare(tmp_path)
    result = run(tmp_path, row.arguments, row.processes)
    output = result.stdout + result.stderr
    # torchrun has one code for whatever its processes end with.
    assert result.returncode == row.code or (row.processes > 1 and result.returncode == 1 == min(row.code, 1)), output
    for pattern in row.says:
        assert re.search(pattern, output), f"{pattern!r} is not in\n{output}"
    for text in row.never:
        assert text not in result.stderr
    assert checkpoints_in(tmp_path) == row.left, output


def test_the_documentation_has_every_row_with_its_outcome():
    readme = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert len(TABLE) >= 40
    for name, row in TABLE.items():
        assert re.search(rf"^\| {re.escape(name)} \| {row.code} \| ", readme, flags=re.MULTILINE), name


# --- kill -9, then the same command with resume_from: as if nothing had happened


def final_weights(folder: Path) -> bytes:
    [file] = folder.glob("logs/*/checkpoints/checkpoint_3/*.safetensors")
    return file.read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    prepare(folder)
    result = run(folder, fault("", "--config.num_checkpoint_limit=1"))
    assert result.returncode == 0, result.stderr
    return final_weights(folder), read_metrics(next((folder / "logs").glob("[!.]*")))


@pytest.mark.parametrize("by", ["name", "folder"])
@pytest.mark.parametrize("where", ["kill-sampling", "kill-training", "kill-writing", "kill-pruning"])
def test_after_kill_9_the_same_command_continues_bit_for_bit(tmp_path, undisturbed, where, by):
    if by == "folder" and where not in ("kill-training", "kill-writing"):
        pytest.skip("as by name")
    prepare(tmp_path)
    always = ["--config.num_checkpoint_limit=1"] + ["--config.resume=auto"] * (by == "name")
    assert run(tmp_path, fault(where, *always)).returncode == -9
    [folder] = (tmp_path / "logs").glob("[!.]*")
    assert list(folder.glob("checkpoints/checkpoint_*")), "a whole checkpoint is there at any moment"
    again = fault("", *always) + [f"--config.resume_from={folder}"] * (by == "folder")
    result = run(tmp_path, again)
    assert result.returncode == 0 and "resumed:           after" in result.stdout, result.stderr
    weights, lines = undisturbed
    assert final_weights(tmp_path) == weights
    assert list((tmp_path / "logs").glob("[!.]*")) == [folder] and read_metrics(folder) == lines
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"checkpoint_3"}
    if by == "folder":
        return
    # And once more: there is nothing left to do, which is no error.
    result = run(tmp_path, again)
    assert result.returncode == 0 and "has 3 epochs already" in result.stdout and not result.stderr.count("error")


MANY = 24


def last_words(folder: Path) -> tuple[int, str]:
    """Where the run was when it last wrote into its metrics, and into its checkpoints: epoch, what it had done."""
    files = list(folder.glob("logs/*/metrics.jsonl"))
    unfinished = [path.name.split("_")[0] for path in folder.glob("logs/*/checkpoints/.*")]
    lines = files[0].read_text().splitlines() if files else []
    if unfinished or not lines:
        return -1, unfinished[0] if unfinished else "starting"
    last = json.loads(lines[-1])
    return last["epoch"], next(key for key in ("reward_mean", "loss", "policy/updates") if key in last)


def test_two_processes_of_which_one_is_killed_continue_bit_for_bit(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
        prepare(folder)
    arguments = fault("", "--config.resume=auto", rank=1)
    assert run(straight, arguments, 2).returncode == 0
    assert run(killed, arguments, 2, FAULT="kill-training:1").returncode == 1
    result = run(killed, arguments, 2)
    assert result.returncode == 0 and "resumed:           after 1 epochs" in result.stdout, result.stderr
    folders = [next((folder / "logs").glob("[!.]*")) for folder in (straight, killed)]
    assert_same_checkpoint(*(folder / "checkpoints" / "checkpoint_3" for folder in folders))
    assert read_metrics(folders[0]) == read_metrics(folders[1])


def test_going_back_with_other_options_is_another_run_on_the_dashboard(tmp_path):
    prepare(tmp_path)
    assert run(tmp_path, ["--config.log_with=wandb"]).returncode == 0
    [folder] = (tmp_path / "logs").glob("[!.]*")
    back = ["--config.log_with=wandb", f"--config.resume_from={folder / 'checkpoints' / 'checkpoint_2'}"]
    result = run(tmp_path, [*back, "--config.train.learning_rate=1e-3"])
    assert result.returncode == 0 and "options have changed since steps that dashboards have" in result.stdout
    first, second = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda f: f.stat().st_mtime)
    assert first.name != second.name
    assert [point["_step"] for point in wandb_file.history(second)] == [2]


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew(tmp_path):
    prepare(tmp_path)
    assert run(tmp_path, fault("kill-training", epoch=0)).returncode == -9
    [folder] = (tmp_path / "logs").glob("[!.]*")
    result = run(tmp_path, [f"--config.resume_from={folder}", "--config.num_epochs=1"])
    assert result.returncode == 0 and f"{folder} has no checkpoint yet, so a new run starts" in result.stdout


def test_twenty_kills_at_random_moments_change_nothing(tmp_path):
    """One run, killed again and again wherever it happens to be, and started by the same line."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    arguments = ["--config.resume=auto", f"--config.num_epochs={MANY}", "--config.num_checkpoint_limit=1"]
    for folder in (straight, killed):
        folder.mkdir()
        prepare(folder)
    assert run(straight, arguments).returncode == 0
    [metrics_file] = straight.glob("logs/*/metrics.jsonl")
    seconds = [json.loads(line).get("time/epoch_s", 0) for line in metrics_file.read_text().splitlines()]
    seconds_per_epoch = sum(seconds) / MANY
    generator = random.Random(20)
    command, options = command_for([f"--config={TINY}", *SHORT, *arguments], killed)
    where = []
    while len(where) < 20:
        process = subprocess.Popen(command, **options)
        if generator.random() < 0.25:  # while it starts
            time.sleep(4 * generator.random())
        else:  # once it has written something, at any moment of the next epochs
            begun = time.time()
            while not any(file.stat().st_mtime > begun for file in killed.glob("logs/*/images/*")):
                if process.poll() is not None:
                    break
                time.sleep(0.02)
            time.sleep(4 * seconds_per_epoch * generator.random())
        if process.poll() is not None:
            assert process.returncode == 0  # complete before it could be killed often enough
            [last] = killed.glob(f"logs/*/checkpoints/checkpoint_{MANY}")
            shutil.rmtree(last.parent.parent)  # once more from the start
            where.clear()
            continue
        process.kill()
        process.communicate()
        where.append(last_words(killed))
    assert run(killed, arguments).returncode == 0
    folders = [next((folder / "logs").glob("[!.]*")) for folder in (straight, killed)]
    files = [next(folder.glob(f"checkpoints/checkpoint_{MANY}/*.safetensors")) for folder in folders]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert read_metrics(folders[0]) == read_metrics(folders[1])
    assert len({epoch for epoch, _ in where}) >= 4, where  # which phases they hit differs with the machine's speed


@pytest.mark.parametrize(
    "options, processes",
    [
        (["--config.save_freq=2"], 1),
        (["--config.save_freq=0"], 2),
        (["--config.save_freq=5", "--config.use_lora=False", "--config.train.learning_rate=1e-5"], 1),
        (["--config.save_freq=1", "--config.mixed_precision=bf16"], 2),
    ],
    ids=["every-second", "off-two", "every-fifth-full", "bf16-two"],
)
def test_three_resumes_in_a_row_change_nothing(tmp_path, options, processes):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    for folder in (straight, resumed):
        folder.mkdir()
        prepare(folder)
    options = [*options, "--config.num_epochs=4", "--config.resume=auto"]
    assert run(straight, fault("", *options), processes).returncode == 0
    for epochs in (1, 2, 3):  # stopped in the epoch after, wherever the last save that was due lies
        result = run(resumed, fault("term-training", *options), processes)
        assert result.returncode == (143 if processes == 1 else 1), result.stderr
        assert f"state after {epochs} epochs is saved" in result.stderr or epochs in checkpoints_in(resumed)
    result = run(resumed, fault("", *options), processes)
    assert result.returncode == 0 and "resumed:           after 3 epochs" in result.stdout, result.stderr
    ends = [next(folder.glob("logs/*/checkpoints/checkpoint_4")) for folder in (straight, resumed)]
    assert_same_checkpoint(*ends)
    assert read_metrics(ends[0].parents[1]) == read_metrics(ends[1].parents[1])


def test_resuming_with_another_number_of_processes_is_said(tmp_path):
    prepare(tmp_path)
    assert run(tmp_path, ["--config.num_epochs=1", "--config.resume=auto"]).returncode == 0
    result = run(tmp_path, ["--config.num_epochs=2", "--config.resume=auto"], processes=2)
    assert result.returncode == 0, result.stderr
    assert "after 1 epochs, which 1 process ran: other prompts and noise are drawn now" in result.stdout


def test_target_kl_leaves_out_the_rest_of_an_epochs_updates(tmp_path):
    prepare(tmp_path)
    result = run(
        tmp_path, ["--config.train.num_inner_epochs=4", "--config.train.target_kl=1e-7", "--config.num_epochs=1"]
    )
    assert result.returncode == 0, result.stderr
    [folder] = (tmp_path / "logs").glob("[!.]*")
    updates = [line for line in read_metrics(folder) if "loss" in line]
    # The first finds the policy that sampled, the second one that moved; two of four are left out.
    assert [line["policy/kl_nats"] > 1e-7 for line in updates] == [False, True]
    assert [line["policy/updates"] for line in read_metrics(folder) if "policy/updates" in line] == [2]


def test_sigterm_to_two_processes_leaves_the_last_complete_epoch(tmp_path):
    prepare(tmp_path)
    arguments = ["--config.num_epochs=1000", "--config.save_freq=0", "--config.num_log_images=0"]
    command, options = command_for([f"--config={TINY}", *SHORT, *arguments], tmp_path, num_processes=2)
    process = subprocess.Popen(command, **options)
    deadline = time.monotonic() + 120
    while not any('"epoch": 2' in file.read_text() for file in tmp_path.glob("logs/*/metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    started = time.monotonic()
    process.terminate()
    output, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and time.monotonic() - started < 30
    [epochs] = checkpoints_in(tmp_path)
    assert epochs >= 2 and f"the state after {epochs} epochs is saved" in errors


def test_a_torn_newest_checkpoint_is_skipped_and_said(tmp_path):
    prepare(tmp_path)
    assert run(tmp_path, ["--config.num_epochs=2", "--config.resume=auto"]).returncode == 0
    [newest] = tmp_path.glob("logs/*/checkpoints/checkpoint_2")
    (newest / "optimizer.pt").write_bytes(b"torn")
    result = run(tmp_path, ["--config.num_epochs=3", "--config.resume=auto"])
    assert result.returncode == 0 and "after 1 epochs" in result.stdout, result.stderr
    assert re.search("warning: .*checkpoint_2 is not whole: optimizer.pt has 4 bytes of", result.stdout)
    assert problem_of(newest) is None


def started(folder: Path, arguments: list[str], until: str) -> subprocess.Popen:
    """A run that goes on by itself, as soon as it has written a file of this pattern."""
    command, options = command_for([f"--config={TINY}", *SHORT, *arguments], folder)
    process = subprocess.Popen(command, **options)
    deadline = time.monotonic() + 120
    while not list(folder.glob(until)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    return process


def test_a_second_start_of_a_run_that_is_running_is_refused_and_harms_nothing(tmp_path):
    prepare(tmp_path)
    arguments = ["--config.num_epochs=1000", "--config.num_log_images=0", "--config.resume=auto"]
    first = started(tmp_path, arguments, until="logs/*/checkpoints/checkpoint_*")
    second = run(tmp_path, arguments)
    assert second.returncode == 1 and re.search(
        "error: another process is training this run, since it holds .*lock", second.stderr
    )
    assert first.poll() is None
    first.terminate()
    first.communicate(timeout=60)
    assert first.returncode == 143 and checkpoints_in(tmp_path)


def test_a_second_start_is_refused_also_before_there_is_a_checkpoint(tmp_path):
    prepare(tmp_path)
    arguments = [
        "--config.num_epochs=1000",
        "--config.num_log_images=0",
        "--config.resume=auto",
        "--config.save_freq=0",
    ]
    first = started(tmp_path, arguments, until="logs/*/metrics.jsonl")
    second = run(tmp_path, arguments)
    assert second.returncode == 1 and "error: another process is training this run" in second.stderr
    first.terminate()
    first.communicate(timeout=60)
    assert len(list((tmp_path / "logs").glob("[!.]*"))) == 1


def test_where_every_checkpoint_is_torn_the_new_start_is_said(tmp_path):
    prepare(tmp_path)
    assert run(tmp_path, ["--config.num_epochs=1", "--config.resume=auto"]).returncode == 0
    [only] = tmp_path.glob("logs/*/checkpoints/checkpoint_1")
    (only / "state.json").unlink()
    result = run(tmp_path, ["--config.num_epochs=1", "--config.resume=auto"])
    assert result.returncode == 0 and "finished" in result.stdout, result.stderr
    assert re.search("warning: .*checkpoint_1 is not whole: state.json is not readable", result.stdout)
    assert len(list((tmp_path / "logs").glob("[!.]*"))) == 2


def test_processes_that_see_different_checkpoints_are_refused(tmp_path):
    """As two machines do whose log folders are not the same one."""
    prepare(tmp_path)
    assert run(tmp_path, ["--config.num_epochs=1"]).returncode == 0
    [folder] = (tmp_path / "logs").glob("[!.]*")
    spec = (tmp_path / "apart.py").write_text(
        f"import os, runpy\ndef get_config():\n    c = runpy.run_path({TINY!r})['get_config']()\n"
        f"    c.resume_from = {str(folder)!r} if os.environ['RANK'] == '0' else ''\n    return c\n"
    )
    assert spec
    result = run(tmp_path, ["--config=apart.py"], processes=2)
    assert result.returncode == 1
    assert re.search(r"found different checkpoints .*process 0 test_.*/checkpoint_1, process 1 none", result.stderr)


def test_a_skipped_update_has_a_point_of_its_own_on_the_dashboard(tmp_path):
    prepare(tmp_path)
    result = run(tmp_path, fault("gradients-once", "--config.log_with=wandb"))
    assert result.returncode == 0, result.stderr
    [folder] = (tmp_path / "logs").glob("[!.]*")
    updates = [line for line in read_metrics(folder) if "loss" in line]
    assert [line["step"] for line in updates] == [0, 1, 2] and [line["loss"] is None for line in updates] == [0, 1, 0]
    [file] = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    points = list(wandb_file.history(file))
    assert [point["_step"] for point in points] == [0, 1, 2]
    assert [point["epoch"] for point in points if "reward_mean" in point] == [0, 1, 2]
    assert [read_state(path).global_step for path in sorted((folder / "checkpoints").iterdir())] == [1, 2]


STOPS = {
    "SIGTERM": ["term-training:1"],
    "kill-training": ["kill-training:1"],
    "kill-sampling": ["kill-sampling:1"],
    # Once more before anything new is logged, and again
    "three-kills": ["kill-training:2", "kill-sampling:0", "kill-training:0"],
}


@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
def test_a_stopped_and_resumed_run_is_one_on_the_dashboard(tmp_path, stops):
    prepare(tmp_path)
    always = ["--config.log_with=wandb", "--config.resume=auto", "--config.train.num_inner_epochs=2"]
    always += ["--config.save_freq=2"] if len(stops) > 1 else []
    for stop in stops:
        assert run(tmp_path, fault("", *always), FAULT=stop).returncode in (143, -9)
    result = run(tmp_path, fault("", *always))
    assert result.returncode == 0 and "resumed:           after" in result.stdout, result.stderr
    [folder] = (tmp_path / "logs").glob("[!.]*")
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == len(stops) + 1 and len({file.name for file in files}) == 1
    points = [point for file in files for point in wandb_file.history(file)]
    steps = [point["_step"] for point in points]
    assert steps == sorted(steps) and set(steps) == set(range(6))
    # What the web page shows: of a step that was sent twice, the later values.
    shown = {step: {} for step in steps}
    for point in points:
        shown[point["_step"]] |= point
    for line in read_metrics(folder):
        for key, value in line.items():
            if isinstance(value, (int, float)) and key != "step":
                assert shown[line["step"]][key] == pytest.approx(value), key


def test_secrets_stay_out_of_what_is_printed_and_written(tmp_path):
    prepare(tmp_path)
    secrets = {
        "WANDB_API_KEY": "5ec4e7" * 6 + "abcd",
        "reward_fn_kwargs.api_key": "sk-very-hidden",
        "token": "hf-hidden",
    }
    arguments = [*reward("equal"), f"--config.reward_fn_kwargs.api_key={secrets['reward_fn_kwargs.api_key']}"]
    arguments += [
        f"--config.prompt_fn_kwargs={{'token': '{secrets['token']}'}}",
        "--config.prompt_fn=faulty_rewards.py:prompt",
    ]
    spec = [f"--config={TINY}", *SHORT, *arguments, "--config.log_with=wandb", "--config.num_epochs=1"]
    environment = {"WANDB_API_KEY": secrets["WANDB_API_KEY"], "WANDB_MODE": "offline"}
    result = launch(spec, tmp_path, **environment)
    assert result.returncode == 0 and "reward_fn_kwargs.api_key '***'" in result.stdout, result.stderr
    refused = launch([*spec, "--config.reward_fn_kwargs.strength=2"], tmp_path, **environment)
    assert refused.returncode == 1 and "'api_key': '***'" in refused.stderr
    leaking = launch([*spec, "--config.reward_fn_kwargs.kind=leaks", "--config.num_epochs=2"], tmp_path, **environment)
    assert leaking.returncode == 1 and "RuntimeError: 401 for ***" in leaking.stderr
    written = {path: path.read_bytes() for path in (tmp_path / "logs").rglob("*") if path.is_file()}
    assert len(written) > 10
    for name, secret in secrets.items():
        for run_result in (result, refused, leaking):
            assert secret not in run_result.stdout + run_result.stderr, name
        assert not [path for path, content in written.items() if secret.encode() in content], name


@pytest.mark.parametrize("failing", [0, 1])
def test_without_a_launcher_that_ends_them_processes_end_with_one_that_fails(tmp_path, failing):
    """As started by a cluster's own tools: nobody kills the others."""
    prepare(tmp_path)
    arguments = [f"--config={TINY}", *SHORT, *fault("training-error", rank=failing)]
    started = []
    for rank in (0, 1):
        port = 29517 + failing
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        environment = {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in ranks.items()}}
        command, options = command_for(arguments, tmp_path, **environment)
        started.append(subprocess.Popen(command, **options))
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [1, 1]
    assert "ArithmeticError: the loss is odd" in errors[failing]
    other = errors[1 - failing].splitlines()
    assert f"error: process {failing}: ArithmeticError: the loss is odd" in other, errors
    assert checkpoints_in(tmp_path) == {1}
