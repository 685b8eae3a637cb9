"""Load an environment in a process of its own: ``python -m sluice.environment.check``.

It reads an `EnvironmentSource` from standard input and writes the names of the tools to standard
output. It ends with 1 and the reason on standard error if the environment cannot be loaded.
"""

from __future__ import annotations

import sys

from sluice.concurrency.answers import answer_asked
from sluice.concurrency.process import exit_status
from sluice.environment.source import EnvironmentSource


def _loaded(source: EnvironmentSource) -> list[str]:
    """Return the name of the environment, and those of its tools."""
    world = source.load()
    return [world.name, *(tool.name for tool in world.tools)]


if __name__ == "__main__":
    sys.exit(exit_status("environment", lambda: answer_asked(EnvironmentSource, _loaded)))
