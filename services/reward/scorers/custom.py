"""A user's reward function, loaded from a file. Runs in scorer processes only."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
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
    if inspect.iscoroutinefunction(function):
        return AsyncScorer(function, kwargs)
    return partial(_call, function, kwargs)


def _call(function: Callable[..., object], kwargs: Mapping[str, object], **call: object) -> object:
    return function(**{**call, **kwargs})


class AsyncScorer:
    """An async function behind a plain call.

    One event loop serves all calls, so that the function may keep connections open.
    """

    def __init__(
        self, function: Callable[..., Awaitable[object]], kwargs: Mapping[str, object]
    ) -> None:
        self._function, self._kwargs = function, kwargs
        self._runner = asyncio.Runner()

    def __call__(self, **call: object) -> object:
        """Run the function to its end."""
        return self._runner.run(self._await({**call, **self._kwargs}))

    def close(self) -> None:
        """Close the event loop."""
        self._runner.close()

    async def _await(self, call: Mapping[str, object]) -> object:
        return await self._function(**call)


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
