"""One process's half of the golden update; started by test_update.py through torchrun."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from golden_ppo import GoldenUpdate

if __name__ == "__main__":
    accelerator = Accelerator()
    assert accelerator.num_processes == 2
    golden = GoldenUpdate(accelerator)
    batches = golden.micro_batches()
    half = len(batches) // 2
    start = accelerator.process_index * half
    result = golden.step(batches[start : start + half])
    document = {
        "factors": {name: p.detach() for name, p in golden.factors().items()},
        "gradients": golden.gradients,
        "statistics": result.statistics,
    }
    torch.save(document, Path(sys.argv[1]) / f"{accelerator.process_index}.pt")
    accelerator.end_training()
