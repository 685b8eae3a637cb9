"""The source of an environment, as configured.

``python -m sluice.environment.source`` loads one in a process of its own: it reads an
`EnvironmentSource` from standard input and answers with the names of the environment and its tools
(`sluice.concurrency.answers`).
"""

from __future__ import annotations

import sys

import msgspec

from sluice.concurrency.answers import serve_answer
from sluice.concurrency.process import exit_status
from sluice.environment.episodes import Environment
from sluice.environment.loading import file_environment
from sluice.environment.verl_tools import verl_environment


class EnvironmentSource(msgspec.Struct, frozen=True):
    """A file with a class or function, or verl's tools."""

    path: str | None = None
    name: str | None = None
    function_tool_path: str | None = None
    tool_config_path: str | None = None

    @property
    def is_given(self) -> bool:
        """Whether there is an environment at all."""
        return bool(self.path or self.function_tool_path or self.tool_config_path)

    def load(self) -> Environment:
        """Load it; raise ConfigError, which names file, method and remedy."""
        if self.path is not None:
            return file_environment(self.path, self.name)
        return verl_environment(self.function_tool_path, self.tool_config_path)


def _names(source: EnvironmentSource) -> list[str]:
    environment = source.load()
    return [environment.name, *(tool.name for tool in environment.tools)]


if __name__ == "__main__":
    sys.exit(exit_status("sluice", lambda: serve_answer(EnvironmentSource, _names)))
