"""How a process ends: errors of ours are a line each and exit code 1; bugs keep their traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from sluice.concurrency.exception_leaves import leaves
from sluice.errors import SluiceError


def exit_status(name: str, run: Callable[[], object]) -> int:
    """Runs a program's body; 0 when it returns, 1 after errors of ours, which are printed.

    Args:
        name: stands before each message.
        run: the body.
    """
    try:
        run()
    except SluiceError as error:
        return _report(name, [error])
    except BaseExceptionGroup as group:
        if group.split(SluiceError)[1] is not None:
            raise
        return _report(name, leaves(group))
    return 0


def _report(name: str, errors: list[BaseException] | list[SluiceError]) -> int:
    for line in dict.fromkeys(str(error) for error in errors):
        sys.stderr.write(f"{name}: ERROR {line}\n")
    return 1
