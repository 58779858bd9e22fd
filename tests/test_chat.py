"""Questions to a real server, through a proxy that has its bad days."""

import base64
import io
import math
import time

import pytest
from PIL import Image
from vlm_server import close, cut, free_port, garbage, slow, status

from ddpo_pytorch.scorers.chat import (
    ChatClient,
    ChatSetupError,
    Reply,
    RequestFailed,
    check_server,
    holds_words,
    rating,
    yes_probability,
)


def client(base_url, **options):
    return ChatClient(**{"base_url": base_url, "backoff": 0.05, "read_timeout": 30.0, "max_tokens": 8, **options})


def picture(colour="red"):
    return Image.new("RGB", (40, 24), colour)


def test_a_question_travels_as_an_openai_chat_completion_with_a_jpeg(proxy):
    asker = client(proxy.base_url, quality=50)
    asker.wait_until_served()
    reply = asker.ask(picture(), "What is this?")
    assert isinstance(reply, Reply) and reply.text and reply.first_token is None
    question = proxy.questions[-1]
    assert question["model"] == asker.model and question["temperature"] == 0 and question["max_tokens"] == 8
    [message] = question["messages"]
    image, text = message["content"]
    assert (message["role"], text["text"]) == ("user", "What is this?")
    prefix, _, data = image["image_url"]["url"].partition(",")
    sent = Image.open(io.BytesIO(base64.b64decode(data)))
    assert prefix == "data:image/jpeg;base64" and sent.size == (40, 24) and sent.getpixel((5, 5))[0] > 240


def test_replies_come_in_order_and_depend_on_the_picture(proxy):
    asker = client(proxy.base_url, concurrency=4)
    asker.wait_until_served()
    colours = ["red", "green", "blue", "white"]
    alone = [asker.ask(picture(colour), "What?").text for colour in colours]
    assert len(set(alone)) == 4
    together = asker.ask_all([picture(colour) for colour in colours], ["What?"] * 4)
    assert [reply.text for reply in together] == alone


@pytest.mark.parametrize(
    "fault",
    [*map(status, (408, 409, 429, 500, 503)), close, cut, slow(2.0)],
    ids=["408", "409", "429", "500", "503", "closed", "cut", "slow"],
)
def test_what_may_pass_is_tried_again(proxy, fault):
    asker = client(proxy.base_url, read_timeout=1.0)
    asker.wait_until_served()
    before = len(proxy.questions)
    proxy.faults = [fault, fault]
    assert asker.ask(picture(), "What?").text
    assert len(proxy.questions) - before == 3


def test_waits_grow_and_retry_after_is_honoured(proxy):
    asker = client(proxy.base_url, backoff=0.2)
    asker.wait_until_served()
    proxy.times.clear()
    proxy.faults = [status(503), status(503), status(429, Retry_After="2"), None]
    asker.ask(picture(), "What?")
    waits = [b - a for a, b in zip(proxy.times, proxy.times[1:], strict=False)]
    assert 0.15 <= waits[0] < 1 and 0.3 <= waits[1] < 1.5 and 2 <= waits[2] < 4


def test_after_the_last_try_the_reason_is_kept_and_others_are_not_hurt(proxy):
    asker = client(proxy.base_url, concurrency=1, max_tries=3)
    asker.wait_until_served()
    before = len(proxy.questions)
    proxy.faults = [status(500)] * 3
    failed, fine = asker.ask_all([picture(), picture()], ["What?"] * 2)
    assert isinstance(failed, RequestFailed) and isinstance(fine, Reply)
    assert "HTTP 500" in str(failed) and "injected 500" in str(failed) and "(3 tries)" in str(failed)
    assert proxy.base_url in str(failed) and len(proxy.questions) - before == 4


def test_a_batch_has_a_deadline_and_keeps_the_reason(proxy):
    """A server that takes questions and never answers: all tries of all questions would take minutes."""
    asker = client(proxy.base_url, concurrency=2, read_timeout=0.5, batch_timeout=1.2)
    asker.wait_until_served()
    proxy.always = slow(30)
    started = time.monotonic()
    failures = asker.ask_all([picture()] * 6, ["What?"] * 6)
    assert time.monotonic() - started < 3
    assert all(isinstance(f, RequestFailed) for f in failures)
    assert all(f"no answer in time at {proxy.base_url} (1.2 s for a batch are over)" == str(f) for f in failures)


def bad_log_prob(reply):
    top = {"token": "yes", "logprob": None, "bytes": None}
    reply["choices"][0]["logprobs"] = {"content": [{**top, "top_logprobs": [top]}]}


def test_log_probabilities_that_are_none_are_an_unreadable_reply(proxy):
    asker = client(proxy.base_url)
    asker.wait_until_served()
    proxy.edit = bad_log_prob
    with pytest.raises(RequestFailed, match="unreadable reply"):
        asker.ask(picture(), "Is it?", needs_logprobs=True)


@pytest.mark.parametrize(
    "fault, says",
    [
        (status(400), "HTTP 400"),
        (status(404), "HTTP 404"),
        (status(401), "refuses a request without a key"),
        (garbage(b"<html>busy</html>", "text/html"), "unreadable reply"),
        (garbage(b"{nonsense"), "unreadable reply"),
        (garbage(b"{}"), "unreadable reply"),
        (garbage(b'{"choices": []}'), "unreadable reply"),
        (garbage(b'{"choices": [{"message": {"content": [1]}}]}'), "unreadable reply"),
        (garbage(b"null"), "unreadable reply"),
    ],
    ids=["400", "404", "401", "html", "nonsense", "empty", "no-choices", "wrong-type", "null"],
)
def test_what_will_not_pass_fails_at_once_with_its_reason(proxy, fault, says):
    asker = client(proxy.base_url)
    asker.wait_until_served()
    before = len(proxy.questions)
    proxy.faults = [fault]
    with pytest.raises(RequestFailed, match=says):
        asker.ask(picture(), "What?")
    assert len(proxy.questions) - before == 1


def test_an_empty_reply_is_a_reply(proxy):
    asker = client(proxy.base_url)
    asker.wait_until_served()
    proxy.edit = lambda reply: reply["choices"][0]["message"].update(content=None)
    assert asker.ask(picture(), "What?") == Reply("", None)


def test_log_probabilities_of_the_first_token_are_read(proxy):
    def add_log_probs(reply):
        top = [
            {"token": " Yes", "logprob": math.log(0.6), "bytes": None},
            {"token": "no", "logprob": math.log(0.2), "bytes": None},
        ]
        reply["choices"][0]["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}

    proxy.edit = add_log_probs
    asker = client(proxy.base_url)
    asker.wait_until_served(needs_logprobs=True)
    reply = asker.ask(picture(), "Is it?", needs_logprobs=True)
    assert proxy.questions[-1]["logprobs"] is True and proxy.questions[-1]["top_logprobs"] == 20
    assert yes_probability(reply.first_token) == pytest.approx(0.75)


def test_the_key_is_taken_from_the_environment(proxy, monkeypatch):
    monkeypatch.setenv("MY_KEY", "open-sesame")
    client(proxy.base_url, api_key_env="MY_KEY").wait_until_served()
    assert set(proxy.keys) == {"Bearer open-sesame"}


# --- the start


def test_a_server_that_starts_late_is_waited_for(proxy, capsys, monkeypatch):
    """It loads, which it says by 503, then answers."""
    proxy.always = status(503)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            proxy.always = None

    monkeypatch.setattr(time, "sleep", sleep)
    client(proxy.base_url).wait_until_served()
    assert len(slept) == 3


def test_waiting_is_said_every_30_seconds_and_ends_with_a_line_to_start_one(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + 10))
    port = free_port()
    says = (
        rf"no vision-language server answers at http://127.0.0.1:{port}/v1 after 100 s.*vllm serve llava --port {port}"
    )
    with pytest.raises(ChatSetupError, match=says):
        client(f"http://127.0.0.1:{port}/v1", model="llava", startup_timeout=100.0).wait_until_served()
    assert capsys.readouterr().out.count("waiting for a vision-language server") == 4


def test_a_wrong_key_an_unknown_model_and_missing_log_probabilities_end_the_start_at_once(proxy, monkeypatch):
    monkeypatch.setenv("MY_KEY", "wrong")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waited"))
    with pytest.raises(ChatSetupError, match='does not serve the model "gpt"; it has .*llava'):
        client(proxy.base_url, model="gpt").wait_until_served()
    with pytest.raises(ChatSetupError, match="gives no log-probabilities"):
        client(proxy.base_url).wait_until_served(needs_logprobs=True)
    proxy.faults = [status(400)]
    with pytest.raises(ChatSetupError, match="a first question failed: HTTP 400"):
        client(proxy.base_url).wait_until_served()
    proxy.always = status(401)
    with pytest.raises(ChatSetupError, match="refuses the key in MY_KEY: HTTP 401"):
        client(proxy.base_url, api_key_env="MY_KEY").wait_until_served()


def test_a_server_without_a_list_of_models_is_taken_at_its_first_reply(proxy):
    served = client(proxy.base_url)
    served.wait_until_served()
    proxy.always = status(404)
    proxy.faults = [None]
    client(proxy.base_url, model=served.model).wait_until_served()


@pytest.mark.parametrize(
    "options, says",
    [
        ({"base_url": "localhost:8000"}, "base_url must be like http://.*got 'localhost:8000'"),
        ({"base_url": "http://host:port/v1"}, "base_url must be like"),
        ({"base_url": 5}, "base_url must be like"),
        ({"base_url": "https://me:secret@host/v1"}, "must not hold a user or password"),
        ({"api_key_env": "NO_SUCH_KEY"}, "'NO_SUCH_KEY', which is not set"),
        ({"api_key_env": "sk-secret-itself"}, "api_key_env must be the name of an environment variable"),
        ({"max_tries": 0}, "max_tries must be a whole number, 1 or greater; got 0"),
        ({"concurrency": 1.5}, "concurrency must be"),
        ({"quality": 101}, "quality must be a whole number from 1 to 100; got 101"),
        ({"read_timeout": "60"}, "read_timeout must be seconds, greater than 0; got '60'"),
        ({"backoff": math.nan}, "backoff must be"),
    ],
)
def test_arguments_that_cannot_work_are_refused_without_a_word_to_the_server(options, says):
    for refuse in (check_server, ChatClient):
        with pytest.raises(ChatSetupError, match=says) as caught:
            refuse(**options)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-secret\r", "sk-secret ", "sk-secr\u00e9t"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(monkeypatch, key):
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(ChatSetupError, match="the key in the variable 'MY_KEY' has spaces") as caught:
        check_server(api_key_env="MY_KEY")
    assert "sk-" not in str(caught.value)


# --- what replies are worth


@pytest.mark.parametrize(
    "reply, answer, is_held",
    [
        ("There is an elephant.", "ant", False),
        ("There is an ant.", "ant", True),
        ("ANT!", "ant", True),
        ("Two cats", "two", True),
        ("Twenty-two", "two", True),
        ("two_cats", "two", False),
        ("", "ant", False),
        ("ein Bär", "bär", True),
        ("a polar  bear", "polar bear", False),
        ("It costs $5.", "$5", True),
        ("Straße", "STRASSE", True),
    ],
)
def test_answers_are_whole_words_in_any_case(reply, answer, is_held):
    assert holds_words(reply, answer) is is_held


@pytest.mark.parametrize(
    "tokens, expected",
    [
        ({"Yes": 0.5, "No": 0.25}, 2 / 3),
        ({"yes": 0.25, " YES": 0.25, "▁Yes.": 0.1, "Ġno": 0.2}, 0.75),
        ({"yes": 0.3}, 1.0),
        ({"No": 0.3, "maybe": 0.6}, 0.0),
        ({"maybe": 0.6}, math.nan),
        ({}, math.nan),
    ],
)
def test_yes_is_weighed_against_no_in_any_spelling(tokens, expected):
    value = yes_probability({token: math.log(p) for token, p in tokens.items()})
    assert value == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    "reply, pattern, expected",
    [
        ("I rate it 7 of 10", r"(\d+)", 7),
        ("8.5/10", r"(\d+(?:\.\d+)?)", 8.5),
        ("Score: four", r"(\d+)", math.nan),
        ("Score: four", r"Score: (\w+)", math.nan),
        ("Reason 1. Rating: 3", r"Rating: (\d)", 3),
        ("none", r"(\d+)?none", math.nan),
    ],
)
def test_ratings_are_the_first_group_of_the_first_match(reply, pattern, expected):
    assert rating(reply, pattern) == pytest.approx(expected, nan_ok=True)
