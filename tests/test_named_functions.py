import pytest

from ddpo_pytorch import named_functions
from ddpo_pytorch.named_functions import remember_secrets, without_secrets
from ddpo_pytorch.run_plan import split_overrides, without_secret_arguments

KEY = "sk-" + "a1B2" * 6
SECRETS = {
    "by name": ({"api_key": "x"}, {"api_key": "***"}),
    "camel case": ({"apiKeys": ["x", "y"]}, {"apiKeys": ["***", "***"]}),
    "deep down": ({"a": ({"hf_token": "x"},)}, {"a": ({"hf_token": "***"},)}),
    "other words": ({"credentials": "x", "Authorization": "y"}, {"credentials": "***", "Authorization": "***"}),
    "a URL's password": ({"url": "https://me:x@host/v1"}, {"url": "https://***@host/v1"}),
    "a URL's argument": ({"url": "http://h/v1?a=1&api_key=x"}, {"url": "http://h/v1?a=1&api_key=***"}),
    "a header": ({"line": "Bearer abcdefgh"}, {"line": "Bearer ***"}),
    "by its beginning": (f"no access with {KEY}", "no access with ***"),
    "of the hub": ("hf_" + "x" * 34, "***"),
}


@pytest.mark.parametrize("value, shown", SECRETS.values(), ids=SECRETS)
def test_secrets_are_not_shown(value, shown):
    assert without_secrets(value) == shown


def test_a_secret_of_the_config_is_masked_in_any_text(monkeypatch):
    monkeypatch.setattr(named_functions, "_secrets", set())
    remember_secrets({"kwargs": {"components": ({"api_key": "hush-hush"},), "token": "ab"}, "model": "mine"})
    assert without_secrets("401 for hush-hush at mine, ab") == "401 for *** at mine, ab"


def test_what_is_no_secret_stays():
    plain = {"api_key_env": "MY_KEY", "model": "hf-internal-testing/tiny", "token": "", "keys": 3, "path": "a/b?c=d"}
    assert without_secrets(plain) == plain


def test_a_command_line_is_shown_without_its_secrets():
    line = ["train.py", "--config=c.py", "--config.reward_fn_kwargs.api_key", KEY, "--config.seed=3"]
    line += ["--config.reward_fn_kwargs={'token': 'x', 'n': 1}"]
    assert without_secret_arguments(*split_overrides(line)) == [
        *("train.py", "--config=c.py", "--config.reward_fn_kwargs.api_key=***", "--config.seed=3"),
        "--config.reward_fn_kwargs={'token': '***', 'n': 1}",
    ]
