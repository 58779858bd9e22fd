"""Keeps the last complete epoch from being lost when a run is stopped or fails.

A process that is told to end (SIGTERM, SIGINT) ends within seconds, also if it hangs in a library or waits for others.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ddpo_pytorch.exits import ModelFailure, RunFailure, Stopped, explain_and_leave, leave, say

if TYPE_CHECKING:
    from ddpo_pytorch.checkpoints import Snapshot

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Rescue:
    """Holds the state after the last complete epoch until it is on disk. Only the main process's is ever filled."""

    def __init__(self) -> None:
        self._pending: tuple[Snapshot, Path, int] | None = None
        self._lock = threading.RLock()
        self._is_saving = False
        self._deferred: int | None = None

    def keep(self, snapshot: "Snapshot", folder: Path, num_checkpoint_limit: int) -> None:
        """Have this state written, should the run end before a later one is.

        Args:
            folder: RUN/checkpoints.
        """
        self._pending = (snapshot, folder, num_checkpoint_limit)

    def defers(self, number: int) -> bool:
        """Whether a signal must wait for a save that is under way; `Stopped` is raised after it, then."""
        if self._is_saving:
            self._deferred = number
        return self._is_saving

    def save(self, is_suspect: bool = False) -> Path | None:
        """Write what is kept, if anything; returns where.

        Args:
            is_suspect: as of `checkpoints.save_checkpoint`.

        Raises:
            RunFailure: it cannot be written, as `checkpoints.save_checkpoint` says; it is not tried again.
            Stopped: after it, if a signal came meanwhile.
        """
        with self._alone():
            if self._pending is None:
                return None
            from ddpo_pytorch.checkpoints import save_checkpoint

            snapshot, folder, num_checkpoint_limit = self._pending
            self._is_saving = True
            try:
                target = save_checkpoint(folder, snapshot, num_checkpoint_limit, is_suspect)
            finally:
                self._pending = None
                self._is_saving = False
        if self._deferred is not None and threading.current_thread() is threading.main_thread():
            say(f"the state after {snapshot.state.epoch} epochs is saved: {target}")
            raise Stopped(self._deferred)
        return target

    def write(self, is_suspect: bool = False) -> None:
        """As `save`, when a run ends: says where, or why not."""
        try:
            with self._alone():  # also while it is said: the other thread would leave meanwhile
                if self._pending is None:
                    return
                state = f"the state after {self._pending[0].state.epoch} epochs"
                try:
                    say(f"{state} is saved: {self.save(is_suspect)}")
                except Exception as error:
                    say(f"error: {state} could not be saved: {error}")
        except RunFailure as error:
            say(f"error: {error}")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Of the main thread and the one that hears of signals, one at a time."""
        if not self._lock.acquire(timeout=20):
            raise RunFailure("another thread has been writing the last state for 20 s")
        try:
            yield
        finally:
            self._lock.release()

    def end(self, error: BaseException) -> None:
        """Write what is kept, as suspect if it is what the error is about, and end the process."""
        with contextlib.suppress(ValueError):  # only the main thread may
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        try:
            seconds_to_hear = 0.0
            if (distributed := sys.modules.get("ddpo_pytorch.distributed")) is not None:  # not imported for this
                told, error = distributed.tell_others(error)
                seconds_to_hear = distributed.SECONDS_TO_HEAR if told else 0.0
            self.write(is_suspect=isinstance(error, ModelFailure))
            time.sleep(seconds_to_hear)  # the others may ask this process why
            explain_and_leave(error)
        finally:  # whatever went wrong there
            leave(1)


def _end_with_launcher() -> None:
    """Have Linux send SIGTERM if the parent ends: `accelerate launch` of one process passes no signal on."""
    if sys.platform == "linux" and "ACCELERATE_DYNAMO_BACKEND" in os.environ and "LOCAL_RANK" not in os.environ:
        pr_set_pdeathsig = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGTERM))


def end_on_signals(rescue: Rescue, grace: float = 5.0) -> None:
    """From now on SIGTERM and SIGINT raise `Stopped` in the main thread.

    Python runs a handler between two of its own instructions, which may be never in a library that hangs. So a thread
    hears of the signal too, writes what is kept, and after `grace` seconds leaves by itself.
    """
    _end_with_launcher()
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)

    def raise_stopped(number: int, _: object) -> None:
        for other in SIGNALS:  # a second one must not interrupt what the first sets in motion
            signal.signal(other, signal.SIG_IGN)
        if not rescue.defers(number):
            raise Stopped(number)

    def forget_in_child() -> None:
        # A forked child, a reward's pool for instance, shares the pipe: its own end is not this process's.
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget_in_child)

    for number in SIGNALS:
        signal.signal(number, raise_stopped)

    def watch() -> None:
        while True:
            numbers = [n for n in os.read(heard, 64) if n in SIGNALS]
            if numbers:
                rescue.write()
                time.sleep(grace)
                say(f"ended by {signal.Signals(numbers[0]).name}, {grace:g} s after it")
                leave(128 + numbers[0], patience=10.0)

    threading.Thread(target=watch, daemon=True, name="signals").start()
