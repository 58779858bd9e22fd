"""Functions that a config names, shipped or the user's own, and the checks of their arguments. Imports no torch."""

import importlib
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_SECRET = r"(?:api_?keys?|keys?|tokens?|secrets?|passwords?|passwd|pwd|credentials?|auth|authorization)"
SECRET_NAME = re.compile(rf"(^|_|-){_SECRET}$", re.IGNORECASE)
# In any text: user and password of a URL, a URL's arguments, what HTTP headers hold, keys by their usual beginnings
SECRET_TEXTS = [
    (re.compile(r"(\w+://)[^/@\s]+@"), r"\1***@"),
    (re.compile(rf"([?&](?:\w*[_-])?{_SECRET}=)[^&\s'\"]+", re.IGNORECASE), r"\1***"),
    (re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}"), r"\1 ***"),
    (re.compile(r"\b(?:sk-[\w-]{16,}|hf_\w{20,})"), "***"),
]


class ConfigError(ValueError):
    """The user asked for something that cannot work; the message is one line and says what would."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()).rstrip())  # what it quotes may have several


def load_module(name: str, path: str) -> types.ModuleType:
    """Run a python file as a module of that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look for it
    spec.loader.exec_module(module)
    return module


def _add_to_path(folder: Path) -> None:
    """Let the modules in a folder be imported, after all others."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def resolve_function(spec: str, shipped: types.ModuleType, option: str) -> Callable:
    """The function that a config names.

    Args:
        spec: a name in the `__all__` of `shipped`, "package.module:function", or "path/to/file.py:function".
        option: the config key, for messages.

    Raises:
        ConfigError: no such function, file or module.
    """
    location, _, name = spec.rpartition(":")
    if not location:
        names = shipped.__all__
        if name not in names:
            raise ConfigError(
                f'config.{option} "{name}" is no function of {shipped.__name__}, which has {", ".join(names)}; '
                'your own is "package.module:function" or "path/to/file.py:function"'
            )
        return getattr(shipped, name)
    if location.endswith(".py"):
        if not Path(location).is_file():
            raise ConfigError(f'config.{option} "{spec}": there is no file "{location}" here ({Path.cwd()})')
        _add_to_path(Path(location).resolve().parent)  # it may import its siblings
    else:
        _add_to_path(Path.cwd())
    try:
        if location.endswith(".py"):
            module = load_module(f"{option}_{Path(location).stem}", location)
        else:
            module = importlib.import_module(location)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f'config.{option} "{spec}": cannot import "{location}" ({said})') from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f'config.{option} "{spec}": "{location}" has no function "{name}"')
    return function


_secrets: set[str] = set()


def remember_secrets(options: Any) -> None:
    """Have the secrets among these options masked in any text from now on, such as in an error of a server's client."""
    if isinstance(options, Mapping):
        for key, value in options.items():
            if isinstance(value, str) and len(value) >= 6 and without_secrets(value, str(key)) == "***":
                _secrets.add(value)
            remember_secrets(value)
    elif isinstance(options, (list, tuple)):
        for value in options:
            remember_secrets(value)


def without_secrets(value: Any, key: str = "") -> Any:
    """A copy of a nest of options to be shown or kept: what is called a key, token, secret or password is "***".

    So is what looks like one in any text. A name that ends in _env is of a variable, and stays.
    """
    if isinstance(value, Mapping):
        return {name: without_secrets(entry, str(name)) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(without_secrets(entry, key) for entry in value)
    if not isinstance(value, str) or not value:
        return value
    if SECRET_NAME.search(re.sub(r"([a-z])([A-Z])", r"\1_\2", key)):
        return "***"
    for secret in _secrets:
        value = value.replace(secret, "***")
    for pattern, replacement in SECRET_TEXTS:
        value = pattern.sub(replacement, value)
    return value


def check_arguments(function: Callable, kwargs: Mapping[str, Any], option: str) -> None:
    """Raises ConfigError if the function cannot be called with these; the message shows its signature."""
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        parameters = inspect.signature(function).replace(return_annotation=inspect.Signature.empty)
        signature = f"{getattr(function, '__name__', function)}{parameters}"
        raise ConfigError(
            f"config.{option}_kwargs {without_secrets(kwargs)} do not fit {signature}: {error} "
            f"(config.{option}_kwargs={{}} empties them)"
        ) from error


def with_device(factory: Callable, kwargs: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """Arguments for a reward factory: if it has a parameter `device` that is not set, the process's own."""
    return {"device": device, **kwargs} if "device" in inspect.signature(factory).parameters else dict(kwargs)
