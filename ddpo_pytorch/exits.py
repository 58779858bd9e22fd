"""How a run ends that does not end well: what is said, and with which code. Imports nothing heavy."""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from typing import NoReturn

from ddpo_pytorch.named_functions import ConfigError, without_secrets


class Stopped(BaseException):
    """The process was told to end by a signal, whose number is the argument."""


class RunFailure(RuntimeError):
    """A run cannot go on; the message is one line that says why, and nothing in this program is to blame."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))  # what it quotes may have several


class ModelFailure(RunFailure):
    """The model itself has come to nothing, so that its last state is not worth keeping."""


_leaving = threading.Lock()


def leave(code: int, patience: float = 20.0) -> NoReturn:
    """End this process now, even if a reward thread is still busy.

    Args:
        patience: seconds in which dashboards can be closed; one that takes longer is not waited for.
    """
    if not _leaving.acquire(blocking=False):
        time.sleep(2 * patience)  # another thread does it
    threading.Thread(target=_exit_after, args=(patience, code), daemon=True).start()
    try:
        if (wandb := sys.modules.get("wandb")) is not None and getattr(wandb, "run", None) is not None:
            wandb.finish(exit_code=code)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code)


def _exit_after(seconds: float, code: int) -> None:
    time.sleep(seconds)
    os._exit(code)


def say(line: str) -> None:
    """A line to stderr, in one write, so that processes that say it at the same moment do not share a line."""
    with contextlib.suppress(OSError, ValueError):  # nobody listens any more, which must not keep a run from ending
        sys.stderr.write(without_secrets(line) + "\n")
        sys.stderr.flush()


def _print_traceback(error: BaseException) -> None:
    say("".join(traceback.format_exception(error)).rstrip())


def explain_and_leave(error: BaseException) -> NoReturn:
    """Say why a run ends, and end the process with a code that is not 0.

    One line for what the user can mend; a traceback for a fault in somebody's code, the user's reward included.
    """
    if isinstance(error, SystemExit):  # of somebody's function: a whole run does not end like this
        say(f"error: the run was ended by sys.exit({error.code!r})")
        leave(error.code if isinstance(error.code, int) and 0 < error.code < 256 else 1)
    if isinstance(error, (Stopped, KeyboardInterrupt)):
        number = error.args[0] if isinstance(error, Stopped) else signal.SIGINT
        say(f"ended by {signal.Signals(number).name}")
        leave(128 + number, patience=10.0)
    if isinstance(error, ConfigError):
        # Until there is a process group every process finds the same error, and the first one of a machine says it.
        # Another one says it too if the launcher lets it live: then it was the only one to find it.
        rank = os.environ.get("LOCAL_RANK", "0")
        if not _has_process_group() and rank != "0":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        say(f"error: {error}" if _has_process_group() or rank == "0" else f"error: local process {rank}: {error}")
    elif isinstance(error, RunFailure):
        if error.__cause__ is not None:
            _print_traceback(error.__cause__)
        say(f"error: {error}")
    else:
        _print_traceback(error)
    leave(1)


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
