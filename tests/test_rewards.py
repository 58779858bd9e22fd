import io
import math

import numpy as np
import pytest
import torch
from PIL import Image

from ddpo_pytorch.rewards import checked_rewards, jpeg_compressibility, jpeg_incompressibility, to_uint8


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


def test_pixels_are_rounded_and_not_cut():
    assert to_uint8(torch.full((1, 3, 1, 1), 254.6 / 255)).max() == 255
    assert to_uint8(torch.tensor([-0.1, 0.0, 1.2]).view(1, 3, 1, 1)).ravel().tolist() == [0, 0, 255]


@pytest.mark.parametrize(
    "result",
    [
        [1, 2.5],
        np.array([1, 2.5], dtype=np.float32),
        torch.tensor([1, 2.5], requires_grad=True),
        torch.tensor([1, 2.5], dtype=torch.bfloat16),
        ([1, 2.5], {"info": 1}),
        [torch.tensor(1), torch.tensor(2.5)],
    ],
    ids=repr,
)
def test_rewards_may_come_in_many_forms(result):
    rewards = checked_rewards(result, 2, "f")
    assert rewards.dtype == np.float64 and rewards.tolist() == [1, 2.5]


def test_a_reward_that_is_no_finite_number_is_a_failed_sample():
    np.testing.assert_array_equal(checked_rewards([1, None, math.inf, math.nan], 4, "f"), [1, *[math.nan] * 3])


@pytest.mark.parametrize(
    "result, says",
    [
        ([1.0], r"shape \(1,\)"),
        (np.zeros((2, 1)), r"shape \(2, 1\)"),
        (3.0, r"shape \(\)"),
        (["good", "bad"], "not numbers"),
        ([[1], [1, 2]], "not numbers"),
        (None, "not numbers"),
    ],
    ids=repr,
)
def test_a_wrong_result_is_refused_with_the_functions_name(result, says):
    with pytest.raises(ValueError, match=rf"reward function mine\.py:f .*{says}.*shape \(2,\)"):
        checked_rewards(result, 2, "mine.py:f")
