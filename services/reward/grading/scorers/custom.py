"""Load, check and wrap the user's reward function. Runs only in scorer processes.

`path` names a Python file (also as ``file://...``) or, as ``pkg://package.module`` or
``pkg://package/module``, an importable module (`verl/utils/import_utils.py`).
The function is called as verl calls it: ``data_source``, ``solution_str``, ``ground_truth`` and
``extra_info`` by keyword, plus `reward_kwargs`, which override these.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import weakref
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import cast

from services.reward.grading.scorers.registry import Scorer
from sluice.environment.loading import file_module, import_error
from sluice.errors import ConfigError

PACKAGE_PREFIX = "pkg://"
FILE_PREFIX = "file://"
CALL_KEYS = ("data_source", "solution_str", "ground_truth", "extra_info")
KEY = "reward.custom_reward_function"
_MAX_NAMED = 5


class CustomScorer:
    """Calls the user's function, whether sync or async.

    One event loop serves all calls, so that an async function may keep connections open. It is
    closed with the scorer, at the latest when the process ends.

    Args:
        kwargs: further arguments; they override those of the call.
    """

    def __init__(self, function: Callable[..., object], kwargs: Mapping[str, object]) -> None:
        self._function, self._kwargs = function, kwargs
        self._runner: asyncio.Runner | None = None

    def __call__(self, **call: object) -> object:
        """Return the function's result, awaited if it is awaitable."""
        returned = self._function(**{**call, **self._kwargs})
        if not inspect.isawaitable(returned):
            return returned
        if self._runner is None:
            self._runner = asyncio.Runner()
            weakref.finalize(self, self._runner.close)
        return self._runner.run(_result(returned))


async def _result(waiting: Awaitable[object]) -> object:
    return await waiting


def _is_own_function(value: object, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def load_custom_scorer(path: str, name: str, kwargs: Mapping[str, object]) -> Scorer:
    """Import the file or module `path` and wrap its function `name`.

    Raises:
        ConfigError: the file or module is missing or fails to import, has no such function, or
            the function cannot be called with verl's arguments and `kwargs`.
    """
    if path.startswith(PACKAGE_PREFIX):
        module = _package_module(path)
    else:
        module = file_module(path.removeprefix(FILE_PREFIX), f"{KEY}.path")
    function: object = getattr(module, name, None)
    if not callable(function):
        own_functions = [
            n for n, member in vars(module).items() if _is_own_function(member, module)
        ]
        functions_text = f", but {', '.join(own_functions[:_MAX_NAMED])}" if own_functions else ""
        raise ConfigError(
            f"{KEY}.name: {path} defines no function '{name}'{functions_text}; define it or change "
            "the name"
        )
    _check_signature(function, path, name, kwargs)
    return CustomScorer(cast("Callable[..., object]", function), kwargs)


def _package_module(path: str) -> ModuleType:
    name = path.removeprefix(PACKAGE_PREFIX).replace("/", ".")
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"{KEY}.path: {path} names no module; write pkg:// and a dotted name, as in "
            "pkg://package.module"
        )
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise import_error(f"{KEY}.path", path, error) from error


def _check_signature(
    function: Callable[..., object], path: str, name: str, kwargs: Mapping[str, object]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have no signature
        return
    try:
        signature.bind(**dict.fromkeys((*CALL_KEYS, *kwargs)))
    except TypeError as error:
        raise ConfigError(
            f"{KEY}: {path}: {name}{signature} cannot be called with {', '.join(CALL_KEYS)} and "
            f"reward_kwargs {sorted(kwargs)} by keyword: {error}; accept these names or **kwargs"
        ) from error
