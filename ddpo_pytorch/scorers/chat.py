"""Questions about images to a vision-language model behind an OpenAI chat completions server.

vLLM, SGLang, llama.cpp's server and `transformers serve` all speak it. Images travel as JPEG data URIs. What fails for
good fails for its own question only, with the reason.
"""

import base64
import datetime
import email.utils
import logging
import math
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

from ddpo_pytorch.images import jpeg_bytes

RETRIED_STATUSES = {408, 409, 429}  # and 500 and above
MAX_WAIT = 120.0  # seconds between two tries, whatever the server asks for


class ChatSetupError(ValueError):
    """The server cannot be used at all; one line says what would help."""


class RequestFailed(RuntimeError):
    """One question got no usable reply; the message is the reason."""


@dataclass(frozen=True)
class Reply:
    """What the model said.

    Attributes:
        text: may be empty.
        first_token: log-probabilities of the most likely first tokens, by token; None where the engine gives none.
    """

    text: str
    first_token: dict[str, float] | None


# What each of a server's arguments must be, as the message names it
ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda v: isinstance(v, str), "text"),
    "concurrency": (lambda v: _is_whole(v) and v >= 1, "a whole number, 1 or greater"),
    "connect_timeout": (lambda v: _is_number(v) and v > 0, "seconds, greater than 0"),
    "read_timeout": (lambda v: _is_number(v) and v > 0, "seconds, greater than 0"),
    "max_tries": (lambda v: _is_whole(v) and v >= 1, "a whole number, 1 or greater"),
    "backoff": (lambda v: _is_number(v) and v >= 0, "seconds, 0 or greater"),
    "batch_timeout": (lambda v: _is_number(v) and v > 0, "seconds, greater than 0"),
    "startup_timeout": (lambda v: _is_number(v) and v >= 0, "seconds, 0 or greater"),
    "quality": (lambda v: _is_whole(v) and 1 <= v <= 100, "a whole number from 1 to 100"),
    "max_tokens": (lambda v: _is_whole(v) and v >= 1, "a whole number, 1 or greater"),
}


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def check_server(base_url: str = "http://127.0.0.1:8000/v1", api_key_env: str = "", **others: Any) -> None:
    """Check a server's arguments without talking to it.

    Raises:
        ChatSetupError: one that cannot be; the key itself is never in the message.
    """
    try:
        url = urlsplit(base_url)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except (ValueError, TypeError, AttributeError):
        is_url = False
    if not is_url:
        raise ChatSetupError(f"base_url must be like http://127.0.0.1:8000/v1; got {base_url!r}")
    if url.username is not None or url.password is not None:
        raise ChatSetupError("base_url must not hold a user or password; name a variable with the key in api_key_env")
    key = os.environ.get(api_key_env, "") if api_key_env else "none"
    if not key:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]*", api_key_env):  # a key itself, perhaps: not to be repeated
            raise ChatSetupError("api_key_env must be the name of an environment variable that holds the key")
        raise ChatSetupError(f"api_key_env names the environment variable {api_key_env!r}, which is not set")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ChatSetupError(f"the key in the variable {api_key_env!r} has spaces, line ends or letters beyond ASCII")
    for name, value in others.items():
        is_allowed, wanted = ARGUMENTS[name]
        if not is_allowed(value):
            raise ChatSetupError(f"{name} must be {wanted}; got {value!r}")


class ChatClient:
    """A model on a server, asked many questions at a time."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000/v1",
        model: str = "",
        api_key_env: str = "",
        concurrency: int = 8,
        connect_timeout: float = 5.0,
        read_timeout: float = 60.0,
        max_tries: int = 5,
        backoff: float = 2.0,
        batch_timeout: float = 500.0,
        startup_timeout: float = 600.0,
        quality: int = 80,
        max_tokens: int = 64,
    ) -> None:
        """
        Args:
            base_url: up to and with /v1.
            model: as the server calls it; "": the only one that it serves.
            api_key_env: environment variable that holds the key; "": the server wants none.
            concurrency: questions under way at a time, of one process.
            connect_timeout, read_timeout: seconds, for each try.
            max_tries: per question.
            backoff: seconds before the second try, give or take a quarter; doubled for each further one, or what the
                server's Retry-After asks for where that is longer.
            batch_timeout: seconds for all questions about one batch of images; those without a reply by then have
                failed, with the reason of the last try. Below config.reward_timeout, which ends the run.
            startup_timeout: seconds to wait for a server that does not answer yet.
            quality: of the JPEGs, 1 to 100.
            max_tokens: of a reply.
        """
        import openai

        check_server(
            base_url,
            api_key_env,
            model=model,
            concurrency=concurrency,
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            max_tries=max_tries,
            backoff=backoff,
            batch_timeout=batch_timeout,
            startup_timeout=startup_timeout,
            quality=quality,
            max_tokens=max_tokens,
        )
        self.base_url, self.model = base_url.rstrip("/"), model
        self.api_key_env = api_key_env
        self.max_tries, self.backoff, self.startup_timeout = max_tries, backoff, startup_timeout
        self.connect_timeout, self.read_timeout, self.batch_timeout = connect_timeout, read_timeout, batch_timeout
        self.quality, self.max_tokens = quality, max_tokens
        self._last_problem = "none was answered"
        self._noticed = -math.inf
        for name in ("httpx", "httpx2"):  # which log every request as information
            logging.getLogger(name).setLevel(logging.WARNING)
        self._client = openai.OpenAI(
            base_url=self.base_url,
            api_key=os.environ[api_key_env] if api_key_env else "none",
            timeout=openai.Timeout(read_timeout, connect=connect_timeout),
            max_retries=0,  # the tries are counted here, where their reasons are kept
        )
        self._jitter = random.Random()  # the global one is seeded, and belongs to the prompts
        self._threads = ThreadPoolExecutor(concurrency, "chat")

    # --- at the start of a run

    def wait_until_served(self, needs_logprobs: bool = False) -> None:
        """Return once the server answers a question about a picture with the model.

        While nothing answers, says so every 30 seconds.

        Raises:
            ChatSetupError: nothing answers in time, the key is refused, the model is not served, or its reply is of no
                use.
        """
        served = self._served_models()
        if not self.model and served is not None and len(served) == 1:
            self.model = served[0]
        if served is not None and self.model not in served:
            chosen = f'does not serve the model "{self.model}"' if self.model else "serves several models: say which"
            raise ChatSetupError(f"{self.base_url} {chosen}; it has {', '.join(served) or 'none'}")
        try:
            reply = self.ask(Image.new("RGB", (64, 64), "grey"), "What colour is this?", needs_logprobs)
        except RequestFailed as error:
            raise ChatSetupError(f"a first question failed: {error}") from error
        if needs_logprobs and not reply.first_token:
            raise ChatSetupError(
                f"{self.base_url} gives no log-probabilities of tokens, which this reward needs; vLLM, SGLang and "
                "llama.cpp's server do, `transformers serve` does not"
            )

    def _served_models(self) -> list[str] | None:
        """Names of the models; None where the server does not list them."""
        import openai

        started = time.monotonic()
        while True:
            try:
                return [entry.id for entry in self._client.models.list().data]
            except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
                raise ChatSetupError(self._refused(error.status_code)) from error
            except openai.APIStatusError as error:
                if not _is_retried(error.status_code):
                    return None
                reason = f"HTTP {error.status_code}"
            except openai.APIConnectionError as error:
                reason = _connection_problem(error)
            except Exception:  # an answer that is no list of models
                return None
            if time.monotonic() - started > self.startup_timeout:
                raise ChatSetupError(
                    f"no vision-language server answers at {self.base_url} after {self.startup_timeout:g} s "
                    f"({reason}); start one first, for instance: {self.launch_line()}"
                )
            self._notice(f"waiting for a vision-language server at {self.base_url} ({reason})")
            time.sleep(1)

    def _notice(self, line: str) -> None:
        """Print a line, of the first process and every 30 seconds at most."""
        if time.monotonic() - self._noticed >= 30 and os.environ.get("RANK", "0") == "0":
            self._noticed = time.monotonic()
            print(line, flush=True)

    def launch_line(self) -> str:
        """A command that would serve the model where this client looks for it."""
        return f"vllm serve {self.model or 'MODEL'} --port {urlsplit(self.base_url).port or 8000}"

    def _refused(self, status: int) -> str:
        key = f"the key in {self.api_key_env}" if self.api_key_env else "a request without a key (set api_key_env)"
        return f"{self.base_url} refuses {key}: HTTP {status}"

    # --- questions

    def ask_all(
        self, images: Sequence[Image.Image], questions: Sequence[str], needs_logprobs: bool = False
    ) -> list[Reply | RequestFailed]:
        """Ask one question of each image, `concurrency` at a time; a reply or its failure for each, in order."""

        deadline = time.monotonic() + self.batch_timeout

        def attempt(image: Image.Image, question: str) -> Reply | RequestFailed:
            try:
                return self.ask(image, question, needs_logprobs, deadline)
            except RequestFailed as error:
                return error

        return list(self._threads.map(attempt, images, questions))

    def ask(self, image: Image.Image, question: str, needs_logprobs: bool = False, deadline: float = math.inf) -> Reply:
        """Ask one question, with as many tries as there may be.

        Args:
            deadline: of time.monotonic(), for all tries together.

        Raises:
            RequestFailed: the server was not reached or answered with an error at the last try, answered with one that
                trying again would not change, or with something that is no chat completion.
        """
        import openai

        uri = "data:image/jpeg;base64," + base64.b64encode(jpeg_bytes(image, self.quality)).decode()
        content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": question}]
        options: dict[str, Any] = {"logprobs": True, "top_logprobs": 20} if needs_logprobs else {}
        for tries in range(1, self.max_tries + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                raise RequestFailed(f"{self._last_problem} ({self.batch_timeout:g} s for a batch are over)")
            wait = 0.0
            try:
                completion = self._client.chat.completions.create(
                    model=self.model,
                    messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
                    max_tokens=self.max_tokens,
                    temperature=0,
                    timeout=openai.Timeout(min(self.read_timeout, left), connect=min(self.connect_timeout, left)),
                    **options,
                )
                return _parsed(completion)
            except openai.APIStatusError as error:
                if error.status_code in (401, 403):
                    raise RequestFailed(self._refused(error.status_code)) from error
                reason = f"HTTP {error.status_code} from {self.base_url}: {_one_line(error.message)}"
                if not _is_retried(error.status_code):
                    hint = "" if self.base_url.endswith("/v1") else " (should base_url end in /v1?)"
                    raise RequestFailed(reason + hint * (error.status_code == 404)) from error
                wait = _retry_after(error.response.headers.get("retry-after"))
            except openai.APIConnectionError as error:
                reason = f"{_connection_problem(error)} at {self.base_url}"
            except Exception as error:  # whatever the client makes of a reply that is no chat completion
                said = f"{type(error).__name__}: {error}"
                raise RequestFailed(f"unreadable reply from {self.base_url} ({_one_line(said)})") from error
            self._last_problem = reason
            self._notice(f"a question will be asked again: {reason}")
            if tries < self.max_tries:
                jittered = self.backoff * 2 ** (tries - 1) * self._jitter.uniform(0.75, 1.25)
                left = max(0.0, deadline - time.monotonic())
                time.sleep(min(MAX_WAIT, max(wait, jittered), left))
        raise RequestFailed(f"{reason} ({self.max_tries} tries)")


def _is_retried(status: int) -> bool:
    return status in RETRIED_STATUSES or status >= 500


def _retry_after(header: str | None) -> float:
    """Seconds that a Retry-After header asks for, as a number or a date; 0 if it is neither."""
    try:
        seconds = float(header or 0)
        return seconds if math.isfinite(seconds) else 0.0
    except ValueError:
        pass
    try:
        moment = email.utils.parsedate_to_datetime(str(header))
    except ValueError:
        return 0.0
    return (moment - datetime.datetime.now(moment.tzinfo)).total_seconds()


def _connection_problem(error: Exception) -> str:
    import openai

    if isinstance(error, openai.APITimeoutError):
        return "no answer in time"
    return f"no connection ({_one_line(str(error.__cause__ or error)) or type(error.__cause__).__name__})"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _parsed(completion: Any) -> Reply:
    """The first choice of a chat completion. Raises whatever its absence raises."""
    choice = completion.choices[0]
    text = choice.message.content
    if text is not None and not isinstance(text, str):
        raise TypeError(f"the reply's content is {type(text).__name__}")
    steps = choice.logprobs.content if choice.logprobs is not None else None
    first = {str(top.token): min(0.0, float(top.logprob)) for top in steps[0].top_logprobs} if steps else None
    return Reply(text or "", first)


# --- what replies are worth


def holds_words(reply: str, answer: str) -> bool:
    """Whether a reply has an answer in it, as whole words and in any case: "ant" is not in "elephant"."""
    return re.search(rf"(?<!\w){re.escape(answer.casefold())}(?!\w)", reply.casefold()) is not None


def yes_probability(first_token: dict[str, float]) -> float:
    """P(yes) / (P(yes) + P(no)) from a first token's log-probabilities, in any spelling; NaN if it is neither."""
    totals = {"yes": 0.0, "no": 0.0}
    for token, log_prob in first_token.items():
        word = re.sub(r"\W|_|▁|Ġ", "", token).casefold()
        if word in totals:
            totals[word] += math.exp(log_prob)
    both = totals["yes"] + totals["no"]
    return totals["yes"] / both if both > 0 else math.nan


def rating(reply: str, pattern: str) -> float:
    """The number in the first match's first group; NaN if nothing matches or it is no number."""
    match = re.search(pattern, reply)
    try:
        return float(match[1]) if match else math.nan
    except (ValueError, TypeError):  # the group is no number, or took no part in the match
        return math.nan
