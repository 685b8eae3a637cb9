"""Environments as authors write them, and real servers that play them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from services.reward.episodes.client import ServedEnvironments, ServedEpisode, spread_over_servers
from services.reward.episodes.drivers import AddressFor, EpisodeTask
from services.reward.episodes.workers import EnvironmentWorkers, running_workers
from sluice.config.schema.service import EnvironmentConfig
from sluice.environment.servicer import served_environment
from sluice.environment.source import EnvironmentSource
from sluice.types import Answer, ChatMessage, Prompt, PromptOrigin, ToolCall

CALCULATOR = '''
class Calculator:
    def reset(self, prompt, ground_truth, **row):
        self.truth = ground_truth

    def calc(self, expression: str) -> str:
        """Evaluate arithmetic, such as 47 * 38."""
        return str(eval(expression, {"__builtins__": {}}))

    def score(self, answer: str) -> float:
        return float(answer.strip() == self.truth)
'''
LIMIT_BYTES = 1 << 24
_numbers = count()


def author_file(folder: Path, text: str, name: str = "world.py") -> EnvironmentSource:
    """A file of an author."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return EnvironmentSource(str(path))


def row(truth: str = "1786", **extra_info: Any) -> Prompt:
    """A row of the data set."""
    messages = (ChatMessage("user", "What is 47 * 38?"),)
    origin = PromptOrigin.DATASET
    return Prompt("p0", 0, messages, "sums", truth, origin, 5, extra_info=extra_info)


def calls(*wanted: tuple[str, Any], content: str = "") -> Answer:
    """An answer that calls tools: name and arguments, or their text."""
    made = [
        ToolCall(name, given if isinstance(given, str) else json.dumps(given), f"call_{index}")
        for index, (name, given) in enumerate(wanted)
    ]
    return Answer(content, tool_calls=tuple(made))


def episode(
    servers: ServedEnvironments, prompt: Prompt | None = None, *, name: str = "", seed: int = 7
) -> ServedEpisode:
    """A new episode."""
    number = f"episode-{next(_numbers)}"
    return servers.begin(EpisodeTask(number, name, prompt or row(), seed, 60.0))


@asynccontextmanager
async def drivers(
    address_for: AddressFor, call_timeout_s: float = 120.0
) -> AsyncIterator[ServedEnvironments]:
    """How the reward service calls these servers."""
    async with ServedEnvironments(
        address_for, call_timeout_s=call_timeout_s, max_message_bytes=LIMIT_BYTES
    ) as found:
        yield found


@asynccontextmanager
async def served(
    source: EnvironmentSource, folder: Path, call_timeout_s: float = 120.0
) -> AsyncIterator[ServedEnvironments]:
    """A server in this process."""
    address = f"unix:{folder / 'world.sock'}"
    async with (
        served_environment(source.load(), address, 0) as at,
        drivers(spread_over_servers([at]), call_timeout_s) as found,
    ):
        yield found


@asynccontextmanager
async def worked(
    source: EnvironmentSource, **settings: Any
) -> AsyncIterator[tuple[ServedEnvironments, EnvironmentWorkers]]:
    """Worker processes."""
    limits = EnvironmentConfig(**({"workers": 1, "call_timeout_s": 120.0} | settings))
    async with (
        running_workers(source, limits) as workers,
        drivers(workers.address_for, limits.call_timeout_s) as found,
    ):
        yield found, workers
