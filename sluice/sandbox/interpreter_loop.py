"""A Python interpreter that keeps its variables, inside a sandbox.

The sandbox gets this file as text, so it imports the standard library only. Each line of input is
JSON with ``code`` and ``mark``; all output from `STARTED`, or the last mark, until the mark belongs
to the code.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import traceback
from typing import Any

STARTED = "sluice: interpreter started\n"


def main() -> None:
    """Answer until the input ends."""
    with os.fdopen(os.dup(0), "r", encoding="utf-8") as requests:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        namespace: dict[str, Any] = {"__name__": "__main__"}
        os.write(1, STARTED.encode())
        process = os.getpid()
        for line in requests:
            request = json.loads(line)
            run(request["code"], namespace)
            sys.stdout.flush()
            if os.getpid() != process:  # a fork that the code let come back must not answer as well
                os._exit(0)
            os.write(1, request["mark"].encode())


def run(code: str, namespace: dict[str, Any]) -> None:
    """Execute code, and print the value of a last expression, as a notebook does."""
    try:
        tree = ast.parse(code, "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), namespace)  # noqa: S102 - what the sandbox is for
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<code>", "eval"), namespace)  # noqa: S307
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    except SystemExit:
        return
    except BaseException as error:  # noqa: BLE001 - whatever the code raises is its output
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, frames, file=sys.stdout)


if __name__ == "__main__":
    main()
