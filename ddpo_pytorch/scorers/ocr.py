"""What stands written in a picture, read by rapidocr, against what a prompt asks for in quotes."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddpo_pytorch.images import to_uint8

# Straight double quotes that are no inches, curly ones, or single ones that are no apostrophes.
QUOTED = re.compile(r"(?<!\d)\"([^\"]+)\"|“([^”]+)”|«([^»]+)»|(?<!\w)['‘]((?:[^'’]|(?<=\w)['’](?=\w))+)['’](?!\w)")


def quoted_text(prompt: str) -> str | None:
    """The text that a prompt puts in quotes; several pieces are joined by spaces, None if there is none."""
    pieces = [next(group for group in match.groups() if group) for match in QUOTED.finditer(prompt)]
    return " ".join(pieces) or None


def text_match(wanted: str, read: str) -> float:
    """1 - edit distance / length of the wanted text, not below 0; case and spaces do not count.

    Args:
        wanted: with at least one character that is no space.
    """
    from rapidfuzz.distance import Levenshtein

    wanted, read = ("".join(text.casefold().split()) for text in (wanted, read))
    return max(0.0, 1 - Levenshtein.distance(wanted, read) / len(wanted))


class TextReader:
    """rapidocr's detection and recognition models, which come inside its wheel. Runs on the CPU."""

    def __init__(self, num_threads: int = 1) -> None:
        """
        Args:
            num_threads: of one call.
        """
        from rapidocr import RapidOCR

        self.engine = RapidOCR(
            params={
                "Global.log_level": "error",
                "EngineConfig.onnxruntime.intra_op_num_threads": num_threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )

    def read(self, images: Any) -> list[str]:
        """The text in each image, its lines joined by spaces; empty where none is found.

        Args:
            images: float (B, 3, H, W) in [0, 1], or uint8 (B, H, W, 3).
        """
        texts = []
        for image in to_uint8(images):
            result = self.engine(np.ascontiguousarray(image[:, :, ::-1]))  # BGR, as OpenCV has it
            texts.append(" ".join(result.txts or ()))
        return texts


def match_prompts(read: Sequence[str], prompts: Sequence[str]) -> tuple[np.ndarray, list[str | None]]:
    """How well texts match what the prompts quote: float64 (B,) from 0 to 1, NaN with its reason without quotes."""
    wanted = [quoted_text(prompt) for prompt in prompts]
    rewards = [text_match(w, r) if w and w.strip() else np.nan for w, r in zip(wanted, read, strict=True)]
    reasons = [
        None if w and w.strip() else f'the prompt puts no text in quotes: "{prompt}"'
        for w, prompt in zip(wanted, prompts, strict=True)
    ]
    return np.array(rewards), reasons
