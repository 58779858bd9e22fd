"""Prompt functions: each call draws one prompt and returns (prompt, metadata). They draw from python's `random`.

Metadata travels with the prompt to the reward function. Knows nothing of models or training.
"""

import ast
import contextlib
import functools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# What config.prompt_fn can name.
__all__ = [
    "from_file",
    "imagenet_all",
    "imagenet_animals",
    "imagenet_dogs",
    "simple_animals",
    "nouns_activities",
    "counting",
]

ASSETS = Path(__file__).parent / "assets"


@functools.cache
def inflect_engine():  # type: ignore[no-untyped-def]
    import inflect  # deferred: 2 s, and only the functions that build phrases need it

    return inflect.engine()


@functools.cache
def _load_lines(path: str) -> tuple[str, ...]:
    """The lines of a user's file, or of a shipped list of that name; UTF-8, surrounding space and blank lines dropped.

    Raises:
        ValueError: no such file, no lines in it, or not UTF-8.
    """
    file = next((f for f in (Path(path).expanduser(), ASSETS / path) if f.is_file()), None)
    if file is None:
        shipped = ", ".join(sorted(f.name for f in ASSETS.glob("*.txt")))
        raise ValueError(f'no prompt file "{path}" here ({Path.cwd()}), and none of the shipped lists: {shipped}')
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f'prompt file "{path}" is not UTF-8: {error}') from error
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines:
        raise ValueError(f'prompt file "{path}" holds no prompts; it must have one on each line')
    return lines


def from_file(path: str, low: int | None = None, high: int | None = None) -> tuple[str, dict]:
    """A line of a text file, any with the same chance.

    Args:
        path: a file of yours, one prompt a line, or a shipped list such as "simple_animals.txt".
        low, high: draw from lines low to high - 1 only, counted from 0.

    Raises:
        ValueError: no such file, or no line between low and high.
    """
    lines = _load_lines(path)[low:high]
    if not lines:
        raise ValueError(
            f'lines {low} to {high} of prompt file "{path}" hold nothing; it has {len(_load_lines(path))} lines'
        )
    return random.choice(lines), {}


def imagenet_all() -> tuple[str, dict]:
    """Any of the 1,000 ImageNet class names."""
    return from_file("imagenet_classes.txt")


def imagenet_animals() -> tuple[str, dict]:
    """One of the 398 animals among ImageNet's classes: the (in)compressibility experiments' prompts."""
    return from_file("imagenet_classes.txt", 0, 398)


def imagenet_dogs() -> tuple[str, dict]:
    """One of the 118 dog breeds among ImageNet's classes."""
    return from_file("imagenet_classes.txt", 151, 269)


def simple_animals() -> tuple[str, dict]:
    """One of 45 common animals, as a bare name: the aesthetic experiment's prompts."""
    return from_file("simple_animals.txt")


def nouns_activities(nouns_file: str, activities_file: str) -> tuple[str, dict]:
    """ "a(n) [noun] [activity]": the alignment experiment's prompts. Files as in `from_file`."""
    noun, activity = random.choice(_load_lines(nouns_file)), random.choice(_load_lines(activities_file))
    return f"{inflect_engine().a(noun)} {activity}", {}


def counting(nouns_file: str, low: int, high: int) -> tuple[str, dict]:
    """ "[number] [nouns]", with the questions and answers that a vision-language reward checks.

    Args:
        nouns_file: as in `from_file`.
        low, high: the number is drawn from low to high, both included.

    Raises:
        ValueError: low > high, or no such file.
    """
    if not 0 <= low <= high:
        raise ValueError(f"counting needs 0 <= low <= high, got low {low} and high {high}")
    engine = inflect_engine()
    count = random.randint(low, high)
    number, noun = engine.number_to_words(count), random.choice(_load_lines(nouns_file))
    metadata = {
        "questions": [
            f"How many {engine.plural(noun)} are there in this image?",
            "What animal is in this image?",
        ],
        "answers": [number, noun],
    }
    return f"{number} {engine.plural(noun, count)}", metadata


# --- prompts of an evaluation, which are always the same


@dataclass(frozen=True)
class PromptSet:
    """Prompts, and their metadata, by the name under which they are evaluated."""

    name: str
    prompts: tuple[str, ...]
    metadata: tuple[dict, ...]


TRAIN_SET = "train"
_SLICE = re.compile(r"(?P<path>.*)\[(?P<low>-?\d*):(?P<high>-?\d*)\]")


def parse_prompt_set(spec: str, draw: Callable[[], tuple[str, dict]], limit: int) -> PromptSet:
    """The prompts that a text stands for.

    Args:
        spec: "train" for the prompts of training; "[NAME=]FILE", as in `from_file`, or "[NAME=]FILE[LOW:HIGH]" for some
            of its lines, counted from 0.
        draw: the prompt function with its arguments.
        limit: how many prompts at most: a file's first ones, or the first different ones that are drawn.

    Raises:
        ValueError: no such file, or no lines there.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError('a prompt set is "train", or "[NAME=]FILE[LOW:HIGH]" with the name and lines optional')
    if spec == TRAIN_SET:
        return _drawn_set(draw, limit)
    name, has_name, place = spec.rpartition("=")
    match = _SLICE.fullmatch(place)
    path = match["path"] if match else place
    low, high = (int(match[part]) if match and match[part] else None for part in ("low", "high"))
    lines = _load_lines(path)[low:high][:limit]
    if not lines:
        raise ValueError(f'there are no such lines in "{path}", which has {len(_load_lines(path))}')
    name = name if has_name else Path(path).stem
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f'"{name}" is no name of letters, digits, "_", "-" and "."; write NAME={place}')
    return PromptSet(name, lines, tuple({} for _ in lines))


def _drawn_set(draw: Callable[[], tuple[str, dict]], limit: int) -> PromptSet:
    """The first different prompts that a function draws from one seed; the state of `random` is as before."""
    state = random.getstate()
    random.seed(0)
    try:
        found: dict[str, dict] = {}
        for _ in range(50 * limit):
            prompt, metadata = draw()
            found.setdefault(prompt, metadata)
            if len(found) == limit:
                break
    finally:
        random.setstate(state)
    return PromptSet(TRAIN_SET, tuple(found), tuple(found.values()))


def parse_prompts(text: str) -> PromptSet:
    """Prompts as a command line has them: a file as in `parse_prompt_set`, a list in Python's form, or "a cat, a dog".

    Raises:
        ValueError: none in it, or a file that is not there.
    """
    is_file = text.endswith(".txt") or _SLICE.fullmatch(text) is not None and ".txt[" in text
    with contextlib.suppress(OSError):  # too long for a file's name
        is_file = is_file or Path(text).expanduser().is_file()
    if is_file:
        return parse_prompt_set(text, lambda: ("", {}), limit=10**6)
    listed: object = None
    if text.lstrip().startswith(("[", "(")):
        try:
            listed = ast.literal_eval(text)
        except (ValueError, SyntaxError) as error:
            raise ValueError(f"it is no list of texts: {error}") from error
    if isinstance(listed, (list, tuple)):
        prompts = tuple(str(prompt).strip() for prompt in listed)
    else:
        prompts = tuple(part.strip() for part in text.split(","))
    prompts = tuple(prompt for prompt in prompts if prompt)
    if not prompts:
        raise ValueError("there is no prompt in it")
    return PromptSet("prompts", prompts, tuple({} for _ in prompts))
