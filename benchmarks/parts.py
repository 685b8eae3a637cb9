"""A benchmark of several parts: choose and run them, compare figures with bars, report once."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.reporting import ROOT, print_line, print_report
from tools.phases import tool_parser


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a benchmark.

    A key with several figures by name has a bar for each: ``key.name``. A figure that is None
    misses every bar.

    Attributes:
        measure: returns figures by key; takes the command line.
        most: bars that figures may not exceed.
        least: bars that they have to reach.
        further: keys without a bar.
        needs: an option, by its name in the namespace, without which the part is left out.
    """

    measure: Callable[[argparse.Namespace], Mapping[str, Any]]
    most: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)
    further: Sequence[str] = ()
    needs: str = ""

    @property
    def keys(self) -> list[str]:
        """Return the keys of its figures, each once."""
        keys = (bar.partition(".")[0] for bar in (*self.most, *self.least))
        return list(dict.fromkeys((*keys, *self.further)))

    def figures(self, parsed: argparse.Namespace) -> Mapping[str, Any]:
        """Measure; without what it needs return why, by key."""
        if self.needs and getattr(parsed, self.needs) is None:
            option = self.needs.replace("_", "-")
            return dict.fromkeys(self.keys, f"left out: there is no --{option}")
        return self.measure(parsed)

    def missed(self, report: Mapping[str, Any]) -> list[str]:
        """Return the bars that a report misses; one without a figure is not missed."""
        found: dict[str, float] = {}
        for key in self.keys:
            figures = report[key] if isinstance(report[key], Mapping) else {"": report[key]}
            for name, each in figures.items():
                value = math.nan if each is None and name else each
                if isinstance(value, int | float):
                    found[f"{key}.{name}" if name else key] = value
        # "not <=" and not ">", so that nan misses every bar.
        keys = [key for key, bar in self.most.items() if key in found and not found[key] <= bar]
        return keys + [
            key for key, bar in self.least.items() if key in found and not found[key] >= bar
        ]


def tests_pass(*names: str, **environment: str) -> bool:
    """Run tests of this repository that assert a figure, such as ``tests/a.py::test_b``."""
    command = (sys.executable, "-m", "pytest", "-q", *names)
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False)
    return ended.returncode == 0


def parts_parser(
    document: str | None, example: str, parts: Mapping[str, Part]
) -> argparse.ArgumentParser:
    """Return a parser with the options that all such benchmarks have."""

    def chosen(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in parts]:
            raise argparse.ArgumentTypeError(f"{unknown[0]}: give some of {','.join(parts)}")
        return names

    parser = tool_parser(document, example)
    parser.add_argument("--parts", type=chosen, default=list(parts), help=",".join(parts))
    parser.add_argument("--vllm-python", help="of an environment with vLLM and sluice")
    return parser


def run_parts(parsed: argparse.Namespace, parts: Mapping[str, Part]) -> int:
    """Run the chosen parts; print all keys and those missed; return the exit status.

    A part that fails ends no other: `failed` has its error by its name, and so have its keys. Those
    of a part that is left out say why.

    Args:
        parsed: of `parts_parser`.
        parts: all, by name.
    """
    # Before the first process starts, which inherits them.
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
    report: dict[str, Any] = {key: None for part in parts.values() for key in part.keys}
    failed: dict[str, str] = {}
    for name in parsed.parts:
        began_s, part = time.monotonic(), parts[name]
        try:
            found = part.figures(parsed)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the other parts have figures
            traceback.print_exc()
            failed[name] = f"failed: {type(error).__name__}: {error}"
            found = dict.fromkeys(part.keys, failed[name])
        report |= {key: value for key, value in found.items() if key in report}
        print_line(f"{name}: {time.monotonic() - began_s:.0f} s")
    missed = [key for part in parts.values() for key in part.missed(report)]
    report |= {"missed": missed, "failed": failed}
    print_report(report)
    return 1 if missed or failed else 0
