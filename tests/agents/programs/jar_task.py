"""The task that an agent gets on standard input: a question, and jars that only its tool sees."""

from __future__ import annotations

import json
import sys


class JarTask:
    """A question about jars.

    Attributes:
        question: the user's message.
    """

    def __init__(self, row: dict) -> None:
        self.question = row["messages"][-1]["content"]
        self._jars = row["extra_info"]["jars"]

    def look(self, jar: str) -> str:
        """Return the number in a jar, or what is wrong with the letter."""
        return str(self._jars.get(jar, f"There is no jar {jar}."))


def read_task() -> JarTask:
    """Read the task."""
    return JarTask(json.load(sys.stdin))
