"""What several processes must do together: fail, and draw random numbers that are a function of where they are."""

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import gather_object

from ddpo_pytorch.exits import ModelFailure, RunFailure
from ddpo_pytorch.named_functions import ConfigError


class ProcessFailure(RunFailure):
    """Some process failed; raised on all of them with its message."""


class AnotherProcessFailed(RuntimeError):
    """Raised by `check_others`: what this process does now is of no use any more."""


# Where a failing process says so, in the store by which the process group was set up
FAILURE_KEY = "ddpo_pytorch/failure"


def _store() -> torch.distributed.Store:
    return torch.distributed.distributed_c10d._get_default_store()


def check_others(accelerator: Accelerator) -> None:
    """Raise if another process has failed in `fail_together`; cheap, no collective, for use inside its long loops.

    Raises:
        AnotherProcessFailed: so that this process meets the failed one at the end of the block at once.
    """
    if accelerator.num_processes > 1 and _store().check([FAILURE_KEY]):
        raise AnotherProcessFailed(_store().get(FAILURE_KEY).decode())


def count_together(accelerator: Accelerator, name: str, amount: int) -> int:
    """Add to a counter that all processes share, and return its value. No collective; needs several processes."""
    return _store().add(f"ddpo_pytorch/{name}", amount)


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
    message = (f"{error}" if is_plain else f"{type(error).__name__}: {error}") if is_own else None
    kind = next((kind for kind in (ConfigError, ModelFailure) if isinstance(error, kind)), ProcessFailure)
    gathered = gather_object([(message, kind)])
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
            _store().set(FAILURE_KEY, f"process {accelerator.process_index}")
    raise_together(accelerator, error)


class Phases:
    """What each process is doing, so that one that is stuck can be named."""

    def __init__(self, accelerator: Accelerator, timeout: float, on_stuck: Callable[[RunFailure], None]) -> None:
        """
        Args:
            timeout: seconds that a process waits for others in one phase.
            on_stuck: called in a thread of its own, while the main one waits in vain.
        """
        self.accelerator, self.timeout, self.on_stuck = accelerator, timeout, on_stuck
        self._place = (0, time.monotonic())  # how many phases were entered, and when the last one was
        if accelerator.num_processes > 1:
            threading.Thread(target=self._watch, daemon=True, name="phases").start()

    def enter(self, phase: str) -> None:
        """Say what this process does from now on."""
        self._place = (self._place[0] + 1, time.monotonic())
        if self.accelerator.num_processes > 1:
            entry = json.dumps([self._place[0], phase])
            _store().set(f"ddpo_pytorch/phase/{self.accelerator.process_index}", entry)

    def behind(self, own_count: int) -> list[str]:
        """The processes that have entered fewer phases, as "process 1, which is at epoch 3: sampling"."""
        found = []
        for rank in range(self.accelerator.num_processes):
            key = f"ddpo_pytorch/phase/{rank}"
            count, phase = json.loads(_store().get(key)) if _store().check([key]) else (0, "the start")
            if count < own_count:
                found.append(f"process {rank}, which is at {phase}")
        return found

    def _watch(self) -> None:
        while True:
            time.sleep(min(5.0, self.timeout / 4))
            place = self._place
            waited = time.monotonic() - place[1]
            if waited > self.timeout and (stuck := self.behind(place[0])) and self._place == place:
                self.on_stuck(
                    RunFailure(
                        f"waited {waited / 60:.3g} minutes (config.timeout_minutes) for {' and for '.join(stuck)}"
                    )
                )
                return


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
