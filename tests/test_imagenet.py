"""EfficientNet-Lite0 with its real weights, on real photographs."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from ddpo_pytorch import rewards
from ddpo_pytorch.scorers.imagenet import ImagenetClassifier, class_names, classes_named, log_prob_of_named


@pytest.fixture(scope="module")
def classifier():
    return ImagenetClassifier(device="cpu")


def names(prompt):
    return {class_names()[k] for k in classes_named(prompt)}


@pytest.mark.parametrize(
    "photograph, prompt, others",
    [
        ("china.jpg", "a palace", ["a daisy", "a zebra", "a sports car"]),
        ("flower.jpg", "a daisy", ["a palace", "a zebra", "a sports car"]),
    ],
)
def test_real_photographs_are_recognised(photograph, prompt, others):
    image = load_sample_image(photograph)  # uint8, 427 x 640
    prompts = [prompt, *others]
    scores, info = rewards.imagenet_class(device="cpu")(np.stack([image] * 4), prompts, [{}] * 4)
    assert info["failures"] == [None] * 4 and info["looks_like"][0] in prompt
    assert np.exp(scores[0]) > 0.15 and scores[0] == scores.max() and (scores[1:] < np.log(0.01)).all()


def test_log_probabilities_are_normalised_and_the_same_for_floats(classifier):
    image = load_sample_image("china.jpg")[None].copy()
    log_probs = classifier.log_probs(image)
    assert log_probs.shape == (1, 1000) and log_probs.dtype == np.float64
    assert np.exp(log_probs).sum() == pytest.approx(1)
    floats = torch.from_numpy(image).permute(0, 3, 1, 2) / 255
    np.testing.assert_array_equal(classifier.log_probs(floats), log_probs)


def test_preprocessing_is_the_published_scale_at_224_pixels(classifier):
    pixels = classifier.preprocess(Image.new("RGB", (64, 80), (0, 127, 255)))
    assert pixels.shape == (3, 224, 224)
    assert pixels[:, 100, 100].tolist() == [-127 / 128, 0, 1]


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("a daisy", {"daisy"}),
        ("Two ZEBRAS", {"zebra"}),
        ("tench, Tinca tinca", {"tench, Tinca tinca"}),
        (
            "a great white shark",
            {"great white shark, white shark, man-eater, man-eating shark, Carcharodon carcharias"},
        ),
        ("a tiger cat on the sofa", {"tiger cat"}),
        ("a crane", {"crane"}),
        ("a sphinx", set()),
        ("", set()),
        ("of the", set()),
        ("a photo of a zebra", {"zebra"}),
        ("an oil painting of the zebra in a bottle", {"zebra"}),
        # No class is a deer, and what comes after it is not what was asked for.
        ("a deer riding a bike", set()),
        ("a deer washing the dishes", set()),
        ("a turkey on a mountain bike", set()),
        ("a sewing machine", {"sewing machine"}),
        ("a zebra that looks like a bee", {"zebra"}),
    ],
)
def test_a_prompt_names_the_classes_that_hold_its_word(prompt, expected):
    assert names(prompt) == expected


def test_several_classes_of_one_word_are_all_named_and_parts_of_words_are_not():
    cats = names("a cat")
    assert {"tabby, tabby cat", "tiger cat", "Persian cat", "Siamese cat, Siamese", "Egyptian cat"} <= cats
    assert not any("catamaran" in name for name in cats)
    assert len(classes_named("a crane")) == 2  # the bird and the machine share one name
    for same in ("a cat riding a bike", "a black cat", "two cats", "a house cat", "a cat washing the dishes"):
        assert names(same) == cats
    assert names("an angry bee") == {"bee", "bee eater", "apiary, bee house"}  # and no beer bottle


def test_probabilities_of_the_named_classes_are_summed():
    log_probs = np.log(np.full((3, 1000), 1e-3))
    rewards, reasons = log_prob_of_named(log_probs, ["a cat", "a daisy", "a sphinx"])
    np.testing.assert_allclose(rewards[:2], np.log([1e-3 * len(classes_named("a cat")), 1e-3]))
    assert np.isnan(rewards[2]) and reasons == [None, None, '"a sphinx" names no class of ImageNet']


def test_a_classifier_that_is_not_there_is_named():
    with pytest.raises(ValueError, match='cannot load the classifier "efficientnot"'):
        ImagenetClassifier("efficientnot", device="cpu")
