import contextlib
import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from ddpo_pytorch import distributed
from ddpo_pytorch.distributed import AnotherProcessFailed, ProcessFailure, fail_together, raise_together, seed_epoch
from ddpo_pytorch.exits import RunFailure
from ddpo_pytorch.named_functions import ConfigError


def test_random_draws_are_a_function_of_seed_epoch_and_process():
    def draws(*place):
        streams = seed_epoch(*place, torch.device("cpu"))
        return (
            [random.random(), float(np.random.rand()), float(torch.rand(1))],
            torch.randn(3, generator=streams.noise).tolist(),
            torch.randperm(9, generator=streams.shuffle).tolist(),
        )

    reference = draws(42, 3, 1)
    assert draws(42, 3, 1) == reference
    for other in ((43, 3, 1), (42, 4, 1), (42, 3, 0), (42, 1, 3)):
        assert all(a != b for a, b in zip(draws(*other), reference, strict=True))


def test_one_process_alone_fails_with_its_own_error():
    with pytest.raises(KeyError, match="mine"), fail_together(Accelerator(cpu=True)):
        raise KeyError("mine")
    with pytest.raises(ProcessFailure, match="^KeyError: 'mine'$"):
        raise_together(Accelerator(cpu=True), KeyError("mine"))
    with fail_together(Accelerator(cpu=True)):
        pass


def of_two(monkeypatch, own, other):
    """What `raise_together` raises on the first of two processes, which have these errors."""

    theirs = []
    monkeypatch.setattr(distributed, "exchange", lambda _, entry: theirs.append(entry) or [entry])
    with contextlib.suppress(Exception):
        raise_together(Accelerator(cpu=True), other)
    monkeypatch.setattr(distributed, "exchange", lambda _, entry: [entry, *theirs])
    with pytest.raises(Exception) as caught:
        raise_together(Accelerator(cpu=True), own)
    return caught.value


def test_what_all_processes_say_is_said_once_and_what_one_says_has_its_number(monkeypatch):
    same = of_two(monkeypatch, ConfigError("wrong key"), ConfigError("wrong key"))
    assert isinstance(same, ConfigError) and str(same) == "wrong key" and same.__cause__ is None
    one = of_two(monkeypatch, None, KeyError("x"))
    assert isinstance(one, ProcessFailure) and str(one) == "process 1: KeyError: 'x'" and one.__cause__ is None
    both = of_two(monkeypatch, KeyError("x"), RunFailure("no server"))
    assert str(both) == "process 0: KeyError: 'x'; process 1: no server" and isinstance(both.__cause__, KeyError)
    called_off = of_two(monkeypatch, AnotherProcessFailed("process 1"), RunFailure("no server"))
    assert str(called_off) == "process 1: no server" and called_off.__cause__ is None
