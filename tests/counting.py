"""Prompts for `--config.prompt_fn=counting.py:prompt_fn`: counts what a run does, into a file for each process."""

import ctypes
import gc
import json
import os
from pathlib import Path

import torch.distributed
import torch.distributed.distributed_c10d as c10d

RANK = os.environ.get("RANK", "0")
COLLECTIVES = [
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_to_all", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter", "scatter"),
]


class Allocations(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def bytes_in_use() -> int:
    """Of this process's heap, torch's tensors among it; what is free, but not given back to the system, is not."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Allocations
    found = mallinfo2()
    return found.uordblks + found.hblkhd


drawn = 0
counts: dict[str, int] = {}
memory: list[int] = []


def counted(name, original):
    def call(*args, **kwargs):
        counts[name] = counts.get(name, 0) + 1
        Path(f"counts_{RANK}.json").write_text(json.dumps(counts))
        return original(*args, **kwargs)

    return call


def prompt_fn(samples=4):
    """Draws an animal.

    Args:
        samples: drawn in each epoch and process; at the first of the first epoch counting starts.
    """
    global drawn
    drawn += 1
    if drawn == 2:  # the first one was drawn by the plan
        for name in COLLECTIVES:
            wrapped = counted(name, getattr(c10d, name))
            setattr(torch.distributed, name, wrapped)
            setattr(c10d, name, wrapped)
    if drawn % samples == 2 % samples:
        gc.collect()
        memory.append(bytes_in_use())
        Path(f"memory_{RANK}.json").write_text(json.dumps(memory))
    return ["cat", "dog", "fox"][drawn % 3], {}
