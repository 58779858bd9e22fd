"""How a process that is told to end does so; in processes of their own."""

import os
import signal
import subprocess
import sys
import time

import pytest

HEAD = """
import sys, time, types
from pathlib import Path
from ddpo_pytorch import rescue
from ddpo_pytorch.exits import *

class State: epoch = 3
class Snapshot: state = State()
def save_checkpoint(folder, snapshot, limit, is_suspect=False):
    (folder / ("suspect" if is_suspect else "saved")).write_text(str(limit))
    return folder / "saved"
checkpoints = types.SimpleNamespace(save_checkpoint=save_checkpoint)  # the real one takes seconds to import
sys.modules["ddpo_pytorch.checkpoints"] = checkpoints
lifeline = rescue.Rescue()
lifeline.keep(Snapshot(), Path(sys.argv[1]), 5)
"""


def ended(tmp_path, body, number=None):
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + body, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if number is not None:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
    started = time.monotonic()
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors, time.monotonic() - started


BUSY = """
try:
    rescue.end_on_signals(lifeline, grace=1.0)
    print("ready", flush=True)
    {work}
except BaseException as error:
    lifeline.end(error)
"""
SLEEP = "time.sleep(3600)"
# Signals are handled between two instructions of Python; a power of large numbers is one.
HANG = "pow(3, 10**9)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("work", [SLEEP, HANG], ids=["sleeps", "hangs-in-C"])
def test_a_signal_ends_the_process_with_its_code_and_the_state_on_disk(tmp_path, number, work):
    code, errors, seconds = ended(tmp_path, BUSY.format(work=work), number)
    assert code == 128 + number and seconds < 15
    assert (tmp_path / "saved").read_text() == "5"
    assert "the state after 3 epochs is saved" in errors and f"ended by {number.name}" in errors


def test_any_failure_keeps_the_state_but_one_of_the_model_apart(tmp_path):
    assert ended(tmp_path, "lifeline.end(RunFailure('no server'))")[0] == 1
    assert (tmp_path / "saved").exists()
    (tmp_path / "saved").unlink()
    assert ended(tmp_path, "lifeline.end(ModelFailure('not finite'))")[0] == 1
    assert not (tmp_path / "saved").exists() and (tmp_path / "suspect").exists()


def test_what_is_on_disk_already_is_not_written_again_and_a_full_disk_is_said(tmp_path):
    ended(tmp_path, "lifeline.save(); Path(sys.argv[1], 'saved').unlink(); lifeline.end(RunFailure('x'))")
    assert not (tmp_path / "saved").exists()
    failing = "def full(*_): raise OSError(28, 'No space left')\ncheckpoints.save_checkpoint = full\n"
    code, errors, _ = ended(tmp_path, failing + "lifeline.end(Stopped(15))")
    assert code == 143 and "could not be saved: [Errno 28] No space left" in errors


SLOW_DISK = """
def slowly(folder, snapshot, limit, is_suspect):
    with (folder / "writes").open("a") as file:
        file.write("begun ")
    print("ready", flush=True)
    time.sleep(1.5)
    return save_checkpoint(folder, snapshot, limit)
checkpoints.save_checkpoint = slowly
"""


@pytest.mark.parametrize("work", ["lifeline.save()", "lifeline.write()"])
def test_a_signal_waits_for_a_save_that_is_under_way(tmp_path, work):
    body = SLOW_DISK + BUSY.format(work=work + "; time.sleep(5)").replace('print("ready", flush=True)', "")
    code, errors, seconds = ended(tmp_path, body, signal.SIGTERM)
    assert code == 143 and errors.count("is saved") == 1 and (tmp_path / "saved").exists()
    assert (tmp_path / "writes").read_text() == "begun " and seconds < 4


def test_a_launcher_that_is_killed_takes_its_process_along_with_the_state_on_disk(tmp_path):
    """`accelerate launch` of one process hears of no signal."""
    child = HEAD + BUSY.format(work=SLEEP)
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"
    environment = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"} | {"ACCELERATE_DYNAMO_BACKEND": "no"}
    command = [sys.executable, "-c", launcher, child, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)  # until the child, too, has closed its end
    assert (tmp_path / "saved").exists()


def test_what_could_not_be_saved_is_not_tried_again(tmp_path):
    failing = (
        "def full(*_): print('tried', file=sys.stderr); raise RunFailure('full')\ncheckpoints.save_checkpoint = full\n"
    )
    body = "try: lifeline.save()\nexcept RunFailure as error: lifeline.end(error)\n"
    code, errors, _ = ended(tmp_path, failing + body)
    assert code == 1 and errors.splitlines() == ["tried", "error: full"]


def test_a_forked_child_that_is_ended_does_not_end_its_parent(tmp_path):
    """As a reward's multiprocessing pool does."""
    body = """
import os, signal
rescue.end_on_signals(lifeline, grace=0.5)
for number in (signal.SIGTERM, signal.SIGINT):
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    time.sleep(0.2)
    os.kill(child, number)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == number
time.sleep(1.5)
lifeline.save()
Path(sys.argv[1], "saved").unlink()
leave(7)
"""
    code, errors, _ = ended(tmp_path, body)
    assert code == 7 and errors == "" and not (tmp_path / "saved").exists()
