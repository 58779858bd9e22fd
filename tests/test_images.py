import numpy as np
import torch

from ddpo_pytorch.images import jpeg_bytes, to_pil, to_uint8


def test_pixels_are_rounded_and_not_cut():
    assert to_uint8(torch.full((1, 3, 1, 1), 254.6 / 255)).max() == 255
    assert to_uint8(torch.tensor([-0.1, 0.0, 1.2]).view(1, 3, 1, 1)).ravel().tolist() == [0, 0, 255]


def test_pil_images_and_jpegs_show_the_same_picture():
    images = torch.zeros(1, 3, 4, 6)
    images[:, 0, :, :3] = 1  # left half red
    [picture] = to_pil(images)
    assert picture.size == (6, 4) and [picture.getpixel(xy) for xy in ((0, 0), (5, 3))] == [(255, 0, 0), (0, 0, 0)]
    np.testing.assert_array_equal(np.asarray(picture), to_uint8(images)[0])
    assert jpeg_bytes(picture, 95).startswith(b"\xff\xd8") and len(jpeg_bytes(picture, 10)) < len(
        jpeg_bytes(picture, 95)
    )
