"""Finished images in the forms that scorers and people need: uint8 arrays, PIL images, JPEG bytes."""

import io
from typing import Any

import numpy as np
from PIL import Image


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


def to_pil(images: Any) -> list[Image.Image]:
    """Images, as for `to_uint8`, one by one: what preprocessing made for photographs expects."""
    return [Image.fromarray(image) for image in to_uint8(images)]


def jpeg_bytes(image: Image.Image, quality: int) -> bytes:
    """An image as a JPEG file of that quality, 1 to 100."""
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=quality)
    return buffer.getvalue()
