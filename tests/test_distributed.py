import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from ddpo_pytorch.distributed import ProcessFailure, fail_together, raise_together, seed_epoch


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
    with pytest.raises(ProcessFailure, match="process 0: KeyError: 'mine'"):
        raise_together(Accelerator(cpu=True), KeyError("mine"))
    with fail_together(Accelerator(cpu=True)):
        pass
