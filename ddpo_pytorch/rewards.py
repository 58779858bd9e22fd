"""Reward functions: factories whose result scores a batch, f(images, prompts, metadata) -> (rewards (B,), info).

`images` is float32 (B, 3, H, W) in [0, 1] on the CPU, or uint8 (B, H, W, 3). Also here: the one check that every
reward's result passes. Knows nothing of training.
"""

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

# What config.reward_fn can name.
__all__ = ["jpeg_incompressibility", "jpeg_compressibility"]

RewardFn = Callable[[Any, Sequence[str], Sequence[dict]], Any]


def to_uint8(images: Any) -> np.ndarray:
    """Images as uint8 (B, H, W, 3), rounded to the nearest level.

    Args:
        images: float (B, 3, H, W) in [0, 1] (tensor on any device, or array), or uint8 (B, H, W, 3).
    """
    if hasattr(images, "detach"):
        images = images.detach().cpu().float().numpy() if images.is_floating_point() else images.detach().cpu().numpy()
    images = np.asarray(images)
    if images.dtype == np.uint8:
        return images
    return (images.clip(0, 1) * 255).round().astype(np.uint8).transpose(0, 2, 3, 1)


def jpeg_kilobytes(images: Any) -> np.ndarray:
    """Size of each image as a JPEG of quality 95, in kilobytes of 1,000 bytes: float64 (B,)."""
    sizes = []
    for image in to_uint8(images):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="JPEG", quality=95)
        sizes.append(buffer.tell() / 1000)
    return np.array(sizes)


def jpeg_incompressibility() -> RewardFn:
    """JPEG size at quality 95 in kB: detailed, noisy images score high."""

    def reward(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> tuple[np.ndarray, dict]:
        return jpeg_kilobytes(images), {}

    return reward


def jpeg_compressibility() -> RewardFn:
    """Minus the JPEG size at quality 95 in kB: smooth, plain images score high."""

    def reward(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> tuple[np.ndarray, dict]:
        return -jpeg_kilobytes(images), {}

    return reward


def checked_rewards(result: Any, batch_size: int, name: str) -> np.ndarray:
    """A reward function's result as float64 (B,), whatever it came as.

    Accepts (rewards, info) or rewards alone; a tensor (on any device, with or without gradient), array or list of
    numbers. Entries that are not finite become NaN: failed samples, which training leaves out.

    Raises:
        ValueError: not numbers, or not of shape (B,); the message names the function.
    """
    rewards = result[0] if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict) else result
    expected = f"it must return one number per image, shape ({batch_size},), alone or as (rewards, info)"
    if hasattr(rewards, "detach"):
        rewards = rewards.detach().cpu().double().numpy()
    try:
        rewards = np.array([np.nan if r is None else r for r in rewards] if isinstance(rewards, list) else rewards)
        if rewards.dtype.kind not in "fiub":
            raise TypeError(f"they are of type {rewards.dtype}")
        rewards = rewards.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"reward function {name} returned what are not numbers ({error}); {expected}") from error
    if rewards.shape != (batch_size,):
        raise ValueError(f"reward function {name} returned rewards of shape {rewards.shape}; {expected}")
    return np.where(np.isfinite(rewards), rewards, np.nan)
