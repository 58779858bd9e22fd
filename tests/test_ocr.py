"""rapidocr with its real models, on text that was drawn here."""

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from ddpo_pytorch import rewards
from ddpo_pytorch.scorers.ocr import match_prompts, quoted_text, text_match


def written(text, size=256):
    image = Image.new("RGB", (size, size), "white")
    ImageDraw.Draw(image).text((20, size // 3), text, fill="black", font=ImageFont.load_default(size=size // 7))
    return np.asarray(image)


def test_drawn_text_is_read_and_compared_with_the_quoted_one():
    pictures = np.stack([written("Hello World"), written("Hello World"), written("STOP"), written("")])
    prompts = ['a sign that says "hello world"', 'a sign that says "hello there"', "a sign 'STOP'", 'a sign "stop"']
    reward, info = rewards.ocr_match()(pictures, prompts, [{}] * 4)
    assert [text.replace(" ", "").casefold() for text in info["read"]] == ["helloworld", "helloworld", "stop", ""]
    # "helloworld" to "hellothere" is five changed letters of ten.
    np.testing.assert_allclose(reward, [1, 0.5, 1, 0])
    assert info["failures"] == [None] * 4


def test_a_prompt_without_quotes_is_a_failed_sample():
    scores, reasons = match_prompts(["stop", "stop", "x"], ["a sign", 'a "stop" sign', 'an empty " " sign'])
    np.testing.assert_array_equal(scores, [np.nan, 1, np.nan])
    assert reasons[0] == 'the prompt puts no text in quotes: "a sign"' and reasons[1] is None and reasons[2]


@pytest.mark.parametrize(
    "prompt, text",
    [
        ('a "B" and a "C d"', "B C d"),
        ("a sign “curly”", "curly"),
        ("a sign ‘single’", "single"),
        ("a dog's sign 'it'", "it"),
        ("a dog's and a cat's", None),
        ("a sign 'Don't stop'", "Don't stop"),
        ("a sign ‘Don’t stop’", "Don’t stop"),
        ("5'10\" tall and 6'2\"", None),
        ('5\'10" tall with a "sign"', "sign"),
        ("nothing", None),
    ],
)
def test_quotes_are_found(prompt, text):
    assert quoted_text(prompt) == text


@pytest.mark.parametrize(
    "wanted, read, score",
    [("abcd", "abcd", 1), ("abcd", "abxd", 0.75), ("abcd", "", 0), ("ab", "something else", 0), ("A b", "ab", 1)],
)
def test_the_match_is_one_minus_the_share_of_edits(wanted, read, score):
    assert text_match(wanted, read) == score
