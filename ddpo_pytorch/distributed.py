"""What several processes must do together: fail, and draw random numbers that are a function of where they are."""

import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed
from accelerate import Accelerator

from ddpo_pytorch.exits import ModelFailure, RunFailure
from ddpo_pytorch.named_functions import ConfigError


class ProcessFailure(RunFailure):
    """Some process failed; raised on all of them with its message."""


class AnotherProcessFailed(RuntimeError):
    """Raised by `check_others`: what this process does now is of no use any more."""


# Where a failing process says so, in the store by which the process group was set up
FAILURE_KEY = "ddpo_pytorch/failure"
# Seconds after which processes that have not met a failed one end without meeting it
PATIENCE = 20.0
# Seconds between two looks at whether another process has failed; a failing one waits a little longer than that
INTERVAL = 1.0
SECONDS_TO_HEAR = 3.0

# What a process has failed with, once this one has heard of it: its number, its message, whether the model is at fault
_heard: list[tuple[int, str, bool]] = []


def _store() -> torch.distributed.Store:
    return torch.distributed.distributed_c10d._get_default_store()


def check_others(accelerator: Accelerator) -> None:
    """Raise if another process has failed in `fail_together`; cheap, no collective, for use inside its long loops.

    Raises:
        AnotherProcessFailed: so that this process meets the failed one at the end of the block at once.
    """
    if accelerator.num_processes > 1 and _listen():
        raise AnotherProcessFailed("process {}: {}".format(*_heard[0][:2]))


def tell_others(error: BaseException) -> tuple[bool, BaseException]:
    """Let the other processes end too, within half a minute, even if they wait where this one will never be.

    Returns:
        Whether this process was the first to fail, in which case others may not have met it yet; and what it is to end
        with: the error, or another process's that was there before and led to it.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False, error
    if torch.distributed.get_world_size() == 1:
        return False, error
    own_rank = torch.distributed.get_rank()
    # In a thread: a store whose machine is gone may not answer.
    telling = threading.Thread(target=_tell, args=(own_rank, error), daemon=True)
    telling.start()
    telling.join(5.0)
    others = [failure for failure in _heard if failure[0] != own_rank]
    if others and isinstance(error, Exception) and not isinstance(error, (ConfigError, RunFailure)):
        rank, message, is_of_model = others[0]
        failure = (ModelFailure if is_of_model else ProcessFailure)(f"process {rank}: {message}")
        failure.__cause__ = error
        return False, failure
    return not others, error


def _tell(rank: int, error: BaseException) -> None:
    with contextlib.suppress(Exception):  # the others may be gone
        if not _store().check([FAILURE_KEY]):
            _store().set(FAILURE_KEY, json.dumps([rank, _said(error), isinstance(error, ModelFailure)]))
        _listen()


def _listen() -> bool:
    """Whether a process has failed; what it said is kept in `_heard`, since its store may be gone soon."""
    if not _heard and _store().check([FAILURE_KEY]):
        rank, message, is_of_model = json.loads(_store().get(FAILURE_KEY))
        _heard.append((rank, message, is_of_model))
    return bool(_heard)


def _said(error: BaseException) -> str:
    """One line: of an error that is one, itself; of others with their kind."""
    return f"{error}" if isinstance(error, (ConfigError, RunFailure)) else f"{type(error).__name__}: {error}"


def arrive(accelerator: Accelerator) -> None:
    """Count this process's arrivals where processes meet: who has fewer than the others is waited for."""
    if accelerator.num_processes > 1:
        _store().add(_arrivals_key(accelerator.process_index), 1)


def _arrivals_key(rank: int) -> str:
    return f"ddpo_pytorch/arrivals/{rank}"


def count_together(accelerator: Accelerator, name: str, amount: int) -> int:
    """Add to a counter that all processes share, and return its value. No collective; needs several processes."""
    return _store().add(f"ddpo_pytorch/{name}", amount)


_meetings = itertools.count()  # processes meet in the same order, so they count alike


def exchange(accelerator: Accelerator, value: Any) -> list[Any]:
    """Every process's value, by its number, through the process group's store; every process must call it.

    No collective: those are for gradients and samples. Takes milliseconds once the last process is here.

    Args:
        value: small, and JSON can hold it.

    Raises:
        RuntimeError: the store is gone, or the process group's timeout has passed.
    """
    if accelerator.num_processes == 1:
        return [value]
    arrive(accelerator)
    store, meeting = _store(), next(_meetings)
    ranks = range(accelerator.num_processes)

    def keys(number: int) -> list[str]:
        return [f"ddpo_pytorch/meeting/{number}/{rank}" for rank in ranks]

    store.set(keys(meeting)[accelerator.process_index], json.dumps(value))
    started, pause = time.monotonic(), 0.001
    while not store.check(keys(meeting)):
        if time.monotonic() - started > _timeout(accelerator):
            raise RuntimeError(f"waited {_timeout(accelerator) / 60:.3g} minutes for the other processes")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    values = [json.loads(store.get(key)) for key in keys(meeting)]
    if accelerator.is_main_process and meeting > 0:
        for key in keys(meeting - 1):  # all are here, so all have read those
            store.delete_key(key)
    return values


def _timeout(accelerator: Accelerator) -> float:
    """Of the process group, in seconds."""
    handler = accelerator.init_handler
    return handler.timeout.total_seconds() if handler is not None and handler.timeout is not None else 5400.0


def raise_together(accelerator: Accelerator, error: BaseException | None) -> None:
    """Raise on every process if any of them has an error; every process must call this.

    Without it the healthy processes would wait at their next collective for one that is gone.

    Raises:
        ConfigError: if all the errors are of this kind.
        ModelFailure: if one of them is.
        ProcessFailure: for other errors. All say what went wrong, and on which processes where not on all.
    """
    is_own = error is not None and not isinstance(error, AnotherProcessFailed)
    is_plain = isinstance(error, (ConfigError, RunFailure))  # one line that stands for itself
    message = _said(error) if is_own and error is not None else None
    own_kind = next((name for name, kind in KINDS.items() if isinstance(error, kind)), "ProcessFailure")
    try:
        gathered = [(text, KINDS[kind]) for text, kind in exchange(accelerator, [message, own_kind])]
    except Exception as lost:
        if message is not None:
            raise ProcessFailure(f"{message}; the other processes could not be told ({lost})") from error
        raise ProcessFailure(f"the other processes are gone: {lost}") from None
    failures = {
        m: [rank for rank, (other, _) in enumerate(gathered) if other == m] for m, _ in gathered if m is not None
    }
    if not failures:
        return
    said = [
        text if len(ranks) == len(gathered) else f"process {', '.join(map(str, ranks))}: {text}"
        for text, ranks in failures.items()
    ]
    kinds = {kind for text, kind in gathered if text is not None}
    if kinds == {ConfigError}:
        raise ConfigError("; ".join(said)) from None
    cause = error.__cause__ if is_plain and error is not None else error
    raise (ModelFailure if ModelFailure in kinds else ProcessFailure)("; ".join(said)) from (cause if is_own else None)


KINDS: dict[str, type[Exception]] = {
    "ConfigError": ConfigError,
    "ModelFailure": ModelFailure,
    "ProcessFailure": ProcessFailure,
}


@contextlib.contextmanager
def fail_together(accelerator: Accelerator) -> Iterator[None]:
    """Run a block that may fail on one process; every process must pass here, and no collective may stand inside."""
    error = None
    try:
        yield
    except (Exception, SystemExit) as e:  # also if somebody's function would end the program
        if accelerator.num_processes == 1:
            raise
        error = e
        if not isinstance(e, AnotherProcessFailed):
            _tell(accelerator.process_index, e)
    raise_together(accelerator, error)


class Lifeline(Protocol):
    """Keeps a run's state from being lost, as `rescue.Rescue` does."""

    def write(self, is_suspect: bool = False) -> None:
        """Put on disk what is not yet there."""

    def end(self, error: BaseException) -> None:
        """Write, and end the process."""


class Phases:
    """Ends this process if it waits in vain for another, which it names, or for one that has failed."""

    def __init__(self, accelerator: Accelerator, timeout: float, rescue: Lifeline) -> None:
        """
        Args:
            timeout: seconds that a process waits for others where they meet.
            rescue: writes and ends, in a thread of its own, while the main one waits in vain.
        """
        self.accelerator, self.timeout, self.rescue = accelerator, timeout, rescue
        self._closed = threading.Event()
        if accelerator.num_processes > 1:
            threading.Thread(target=self._watch, daemon=True, name="phases").start()

    def enter(self, phase: str) -> None:
        """Say what this process does from now on, having arrived there."""
        if self.accelerator.num_processes > 1:
            _store().set(f"ddpo_pytorch/phase/{self.accelerator.process_index}", phase)
            arrive(self.accelerator)

    def behind(self, arrivals: int) -> list[str]:
        """The processes that have arrived less often, as "process 1, which is at epoch 3: sampling"."""
        found = []
        for rank in range(self.accelerator.num_processes):
            if _store().add(_arrivals_key(rank), 0) < arrivals:
                key = f"ddpo_pytorch/phase/{rank}"
                phase = _store().get(key).decode() if _store().check([key]) else "the start"
                found.append(f"process {rank}, which is at {phase}")
        return found

    def close(self) -> None:
        """From now on processes may leave when they like."""
        self._closed.set()

    def _watch(self) -> None:
        try:
            reason = self._in_vain()
        except RuntimeError as lost:  # the store is gone, and with it the process that holds it
            if not self._closed.is_set():
                self.rescue.write()
            self._closed.wait(PATIENCE)
            reason = self._failure() if _heard else RunFailure(f"the other processes are gone: {lost}")
        if reason is not None and not self._closed.is_set():
            self.rescue.end(reason)

    def _failure(self) -> RunFailure:
        rank, message, is_of_model = _heard[0]
        return (ModelFailure if is_of_model else RunFailure)(f"process {rank}: {message}")

    def _in_vain(self) -> RunFailure | None:
        """Returns as soon as there is nothing to wait for, with the reason."""
        rank = self.accelerator.process_index
        arrivals, since, failed_since = -1, 0.0, None
        while not self._closed.wait(min(INTERVAL, self.timeout / 4)):
            now = time.monotonic()
            if _listen():
                failed_rank, _, is_of_model = _heard[0]
                if failed_since is None:
                    failed_since = now
                    self.rescue.write(is_suspect=is_of_model)  # at once: this process may be ended from outside
                # The failed one itself has more to say, once it has met the others or their connections are cut.
                if now - failed_since > PATIENCE * (2 if failed_rank == rank else 1):
                    return self._failure()
            own = _store().add(_arrivals_key(rank), 0)
            if own != arrivals:
                arrivals, since = own, now
            elif now - since > self.timeout and (stuck := self.behind(own)):
                waited = f"waited {(now - since) / 60:.3g} minutes (config.timeout_minutes)"
                return RunFailure(f"{waited} for {' and for '.join(stuck)}")
        return None


@dataclass
class RandomStreams:
    """Generators of one epoch, apart from each other so that a thread drawing numbers disturbs nobody."""

    noise: torch.Generator  # on the device: initial latents and DDIM noise
    shuffle: torch.Generator  # on the CPU: the order of training


def seed_epoch(seed: int, epoch: int, process_index: int, device: torch.device) -> RandomStreams:
    """Seed python, numpy and torch, and make the epoch's generators, from (seed, epoch, process) alone.

    So nothing about randomness needs saving: a resumed epoch draws what the uninterrupted one would have drawn.
    """
    state = np.random.SeedSequence([seed, epoch, process_index]).generate_state(4, np.uint32)
    python_seed, global_seed, noise, shuffle = (int(s) for s in state)
    random.seed(python_seed)
    np.random.seed(global_seed)
    torch.manual_seed(global_seed)
    return RandomStreams(
        noise=torch.Generator(device).manual_seed(noise), shuffle=torch.Generator().manual_seed(shuffle)
    )
