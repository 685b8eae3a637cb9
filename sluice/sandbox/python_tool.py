"""A Python tool for episodes: the base of an environment of multi-turn runs."""

from __future__ import annotations

from dataclasses import replace

from sluice.sandbox import choice as _choice
from sluice.sandbox.interpreter import Interpreter as _Interpreter
from sluice.sandbox.run_result import SandboxEnd as _End

CALL_S = 10.0
OUTPUT_CHARS = 8000
_OUTPUT_BYTES = 1 << 20


class Python:
    """Lets the policy run Python. Variables and files last for the episode.

    Its sandbox is that of the configuration, or bubblewrap. A derived class adds ``score`` and
    further tools.
    """

    def __init__(self) -> None:
        config = _choice.inherited_config()
        limits = replace(_choice.limits_of(config), wall_s=CALL_S, output_bytes=_OUTPUT_BYTES)
        self._interpreter = _Interpreter(_choice.process_sandbox(config), limits)

    def reset(self, **_row: object) -> None:
        """Begin an episode without variables and files."""
        self._interpreter.close()

    def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of a last expression.

        Variables and files in the working folder stay for the next call.

        Args:
            code: the program text.
        """
        reply = self._interpreter.run(code)
        text = shorten_middle(reply.output.rstrip("\n"), OUTPUT_CHARS)
        if reply.end is None:
            return text or "(no output)"
        reason = "the code ended Python" if reply.end is _End.FINISHED else str(reply.end)
        restart_note = f"[{reason}; Python starts again, without variables and files]"
        return f"{text}\n{restart_note}" if text else restart_note

    def close(self) -> None:
        """End the interpreter."""
        self._interpreter.close()


def shorten_middle(text: str, max_chars: int) -> str:
    """Return a text without its middle if it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
