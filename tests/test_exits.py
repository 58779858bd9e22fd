import subprocess
import sys
import time

import pytest

CASES = {
    "config": ("ConfigError('batch sizes do not fit')", 1, ["error: batch sizes do not fit"]),
    "failure": ("RunFailure('the server is gone')", 1, ["error: the server is gone"]),
    "interrupt": ("KeyboardInterrupt()", 130, ["ended by SIGINT"]),
    "terminate": ("Stopped(15)", 143, ["ended by SIGTERM"]),
    "exit": ("SystemExit(3)", 3, ["error: the run was ended by sys.exit(3)"]),
    "exit-0": ("SystemExit(0)", 1, ["error: the run was ended by sys.exit(0)"]),
    "exit-256": ("SystemExit(256)", 1, ["error: the run was ended by sys.exit(256)"]),  # the system would make 0 of it
    "exit-with-words": ("SystemExit('words')", 1, ["error: the run was ended by sys.exit('words')"]),
}


def ended(raising, busy_thread=False, **environment):
    code = (
        "import threading, time\n"
        "from ddpo_pytorch.exits import *\n"
        "from ddpo_pytorch.named_functions import ConfigError\n"
        f"if {busy_thread}: threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        f"try: {raising}\n"
        "except BaseException as error: explain_and_leave(error)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment, check=False
    )


@pytest.mark.parametrize("error, code, says", CASES.values(), ids=CASES)
def test_each_kind_of_end_has_its_words_and_code(error, code, says):
    result = ended(f"raise {error}", busy_thread=True)
    assert result.returncode == code and result.stderr.splitlines() == says


def test_a_fault_in_code_shows_where():
    result = ended("1 / 0")
    assert result.returncode == 1 and "Traceback" in result.stderr and "ZeroDivisionError" in result.stderr
    cause = "\n  try: 1 / 0\n  except Exception as e: raise RunFailure('reward mine failed') from e"
    result = ended(cause)
    assert "ZeroDivisionError" in result.stderr and result.stderr.splitlines()[-1] == "error: reward mine failed"


def test_what_every_process_finds_alike_is_said_once():
    assert ended("raise ConfigError('no')", LOCAL_RANK="0").stderr == "error: no\n"
    killed_by_its_launcher = "threading.Timer(1, os.kill, (os.getpid(), 15)).start(); raise ConfigError('no')"
    result = ended(f"import os; {killed_by_its_launcher}", LOCAL_RANK="1")
    assert (result.stderr, result.returncode) == ("", -15)
    # Nobody ended it: the first process has not found the error, or not this one.
    result = ended("raise ConfigError('no')", LOCAL_RANK="1")
    assert (result.stderr, result.returncode) == ("error: local process 1: no\n", 1)


@pytest.mark.parametrize("error, code", [("RunFailure('x')", 1), ("Stopped(15)", 143), ("KeyError('x')", 1)])
def test_a_terminal_that_is_gone_does_not_keep_a_process_from_ending_with_its_code(error, code):
    for close in ("os.close(2)", "sys.stderr.close()", "sys.stderr = open('/dev/full', 'w')"):
        assert ended(f"import os, sys; {close}; raise {error}", busy_thread=True).returncode == code


def test_a_dashboard_that_cannot_be_closed_does_not_hold_the_process():
    fake = "import sys, types, time\n  def finish(exit_code): raise OSError\n"
    fake += "  sys.modules['wandb'] = types.SimpleNamespace(run=1, finish=finish)\n"
    result = ended("\n  " + fake + "  raise ConfigError('no')", busy_thread=True)
    assert result.returncode == 1 and "error: no" in result.stderr


def test_a_dashboard_that_hangs_is_left_behind_by_one_thread_and_by_two():
    fake = "import sys, types\n  finish = lambda exit_code: time.sleep(60)\n"
    fake += "  sys.modules['wandb'] = types.SimpleNamespace(run=1, finish=finish)\n"
    leaving = "  threading.Thread(target=leave, args=(5, 1.0)).start()\n  time.sleep(0.3)\n  leave(6, 1.0)\n"
    started = time.monotonic()
    assert ended("\n  " + fake + "  leave(5, 1.0)").returncode == 5
    assert ended("\n  " + fake + leaving).returncode == 5
    assert time.monotonic() - started < 20
