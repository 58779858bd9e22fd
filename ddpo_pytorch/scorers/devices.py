"""Where a scorer's model lives, and in which precision."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def own_device(device: torch.device | str | None) -> torch.device:
    """The device given, or else this process's current GPU, or the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def own_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A precision by its name or as torch has it.

    Raises:
        ValueError: another name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f'dtype must be one of {", ".join(DTYPES)}; got "{dtype}"')
    return DTYPES[dtype]
