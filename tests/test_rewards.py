import io

import numpy as np
import torch
from PIL import Image

from ddpo_pytorch.images import to_uint8
from ddpo_pytorch.rewards import jpeg_compressibility, jpeg_incompressibility


def pictures() -> torch.Tensor:
    """Plain grey, a gradient, noise: float NCHW."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.linspace(0, 1, 64).expand(3, 64, 64)
    return torch.stack([torch.full((3, 64, 64), 0.5), gradient, torch.rand(3, 64, 64, generator=generator)])


def test_jpeg_rewards_are_the_kilobytes_of_quality_95():
    images = pictures()
    rewards, info = jpeg_incompressibility()(images, ["a"] * 3, [{}] * 3)
    for image, reward in zip(images, rewards, strict=True):
        buffer = io.BytesIO()
        array = np.uint8(np.round(image.numpy().transpose(1, 2, 0) * 255))
        Image.fromarray(array).save(buffer, "JPEG", quality=95)
        assert reward == len(buffer.getvalue()) / 1000
    assert info == {} and rewards[0] < rewards[1] < rewards[2]
    np.testing.assert_array_equal(jpeg_compressibility()(images, [], [])[0], -rewards)


def test_float_tensors_and_uint8_arrays_give_the_same():
    images = pictures()
    arrays = to_uint8(images)
    assert arrays.dtype == np.uint8 and arrays.shape == (3, 64, 64, 3)
    expected, _ = jpeg_compressibility()(images, [], [])
    for same in (arrays, torch.from_numpy(arrays), images.numpy(), images.double()):
        np.testing.assert_array_equal(jpeg_compressibility()(same, [], [])[0], expected)
