"""Load the environment that a file defines: a class, or an async function."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType

from sluice.environment.classes import RESET, TURN, class_environment
from sluice.environment.episodes import Environment
from sluice.environment.loops import loop_environment
from sluice.errors import ConfigError

_VERL_TOOLS_REMEDY = (
    "name a file of verl's functions in actor_rollout_ref.rollout.multi_turn.function_tool_path "
    "instead (sluice env check --verl)"
)
_VERL_SCORERS_REMEDY = (
    "verl is not installed here; its scorers are built in (set reward.scorer_routes), or copy the "
    "function into the file"
)
PATH_KEY, NAME_KEY = "sluice.environment.path", "sluice.environment.name"


def file_environment(path: str, name: str | None = None) -> Environment:
    """Load a file.

    Args:
        name: class or async function in it; ``None``: the only public one in it.

    Raises:
        ConfigError: it fails to import, or defines no environment that can be used; names file,
            method and remedy.
    """
    module = file_module(path, PATH_KEY)
    member = _find_named(module, path, name) if name else _find_only(module, path)
    file = Path(path).name
    return (
        class_environment(member, file)
        if isinstance(member, type)
        else loop_environment(member, file)
    )


def file_module(path: str, key: str) -> ModuleType:
    """Import a file by its path. Raise ConfigError, which names `key`, if that fails."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{key}: no file {path}; give the path of a Python file")
    module_name = f"sluice_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # files beside it can be imported
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise import_error(key, path, error) from error
    return module


def import_error(key: str, path: str, error: Exception) -> ConfigError:
    """Return the error for what `key` names and cannot be imported, with its place."""
    exception_text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError):
        file, line = error.filename, error.lineno
    else:
        deepest = traceback.extract_tb(error.__traceback__)[-1]
        file, line = deepest.filename, deepest.lineno
    is_of_verl = isinstance(error, ModuleNotFoundError) and str(error.name).startswith("verl")
    remedy = "repair it"
    if is_of_verl:
        remedy = _VERL_TOOLS_REMEDY if key == PATH_KEY else _VERL_SCORERS_REMEDY
    return ConfigError(
        f"{key}: {path} fails to import: {exception_text} ({file}, line {line}); {remedy}"
    )


def _find_named(module: ModuleType, path: str, name: str) -> type | Callable[..., object]:
    member = getattr(module, name, None)
    if isinstance(member, type) or inspect.isfunction(member):
        return member
    raise ConfigError(
        f"{NAME_KEY}: {path} defines no class or function {name!r}; it has: "
        f"{', '.join(candidate.__name__ for candidate in _candidates(module)) or 'none'}"
    )


def _find_only(module: ModuleType, path: str) -> type | Callable[..., object]:
    candidates = _candidates(module)
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(candidate.__name__ for candidate in candidates)
    if candidates:
        raise ConfigError(f"{NAME_KEY}: {path} defines {names}; set it to one of them")
    raise ConfigError(
        f"{PATH_KEY}: {path} defines no environment; write a class with the method {RESET} or "
        f"{TURN}, or async def run(task, policy), or set {NAME_KEY} to a class with neither"
    )


def _candidates(module: ModuleType) -> list[type | Callable[..., object]]:
    """Return the public classes and async functions that may be the environment."""
    return [
        value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
        and (_may_be_environment(value) or inspect.iscoroutinefunction(value))
    ]


def _may_be_environment(value: object) -> bool:
    if not isinstance(value, type) or issubclass(value, Enum | BaseException):
        return False
    if hasattr(value, RESET) or hasattr(value, TURN):
        return True
    methods = [name for name in vars(value) if not name.startswith("_")]
    return bool(methods) and not is_dataclass(value)
