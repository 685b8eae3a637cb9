"""The command `sluice`: those that start a run print a line before anything is loaded."""

from __future__ import annotations

import io
import sys

_STARTING = ("up", "train", "quickstart")
_INTERRUPTED = 130
_SILENT = {"-q", "--quiet", "--help"}


def app() -> None:
    """Run the command."""
    strict = {"strict", "surrogateescape"}
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in strict:
        # Characters that the encoding lacks are escaped, as on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    if sys.argv[1:2] and sys.argv[1] in _STARTING and not _SILENT.intersection(sys.argv):
        stream = sys.stderr if "--json" in sys.argv else sys.stdout
        stream.write("checking configuration, files, packages and devices\n")
        stream.flush()
    try:
        # The commands import for a second, and longer on a busy machine.
        from sluice.cli.main import app as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    app()
