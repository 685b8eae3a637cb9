"""A user's reward function, loaded from a file. Runs in scorer processes only."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from services.reward.scorers.registry import Scorer
from sluice.errors import ConfigError

MODULE_NAME = "sluice_custom_reward_function"


def load_custom_scorer(path: str, name: str, kwargs: Mapping[str, object]) -> Scorer:
    """Import `path` and wrap its function `name`, sync or async.

    The function is called as verl calls it: ``data_source``, ``solution_str``, ``ground_truth``
    and ``extra_info`` by keyword, and `kwargs`, which win over these.

    Raises:
        ConfigError: the file is missing, fails to import, or has no such function.
    """
    function = _load_function(Path(path), name)
    return (
        _synchronous(function, kwargs)
        if inspect.iscoroutinefunction(function)
        else _plain(function, kwargs)
    )


def _plain(function: Callable[..., object], kwargs: Mapping[str, object]) -> Scorer:
    def score(**call: object) -> object:
        return function(**{**call, **kwargs})

    return score


def _synchronous(function: Callable[..., object], kwargs: Mapping[str, object]) -> Scorer:
    runner = asyncio.Runner()

    async def call_async(call: Mapping[str, object]) -> object:
        result = function(**{**call, **kwargs})
        return await result if inspect.isawaitable(result) else result

    def score(**call: object) -> object:
        return runner.run(call_async(call))

    return score


def _load_function(path: Path, name: str) -> Callable[..., object]:
    key = "reward.custom_reward_function"
    if not path.is_file():
        raise ConfigError(f"{key}.path: no file {path}; give the path of a Python file")
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}.path: {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        last_line = traceback.format_exception_only(error)[-1].strip()
        raise ConfigError(f"{key}.path: {path} fails to import: {last_line}; repair it") from error
    function: object = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"{key}.name: {path} defines no function '{name}'; define it or change the name"
        )
    return cast("Callable[..., object]", function)
