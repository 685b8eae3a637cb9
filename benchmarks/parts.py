"""A benchmark of several parts: choose and run them, compare figures with bars, report once."""

from __future__ import annotations

import argparse
import math
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.reporting import print_line, print_report
from tools.phases import tool_parser

Part = Callable[[argparse.Namespace], Mapping[str, Any]]
NO_BARS: Mapping[str, float] = {}
NO_KEYS: Mapping[str, Sequence[str]] = {}


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


def missed(
    report: Mapping[str, Any], most: Mapping[str, float], least: Mapping[str, float] = NO_BARS
) -> list[str]:
    """Return the keys whose figures miss their bars; a key without a figure misses none.

    The bars of a key with several figures by name have both names: ``key.name``. None for one of
    them misses every bar.
    """
    found = {key: each for key, each in report.items() if isinstance(each, int | float)}
    for key, figures in report.items():
        if isinstance(figures, Mapping):
            found |= {
                f"{key}.{name}": math.nan if each is None else each
                for name, each in figures.items()
            }
    # "not <=" and not ">", so that nan misses every bar.
    keys = [key for key, bar in most.items() if key in found and not found[key] <= bar]
    return keys + [key for key, bar in least.items() if key in found and not found[key] >= bar]


def run_parts(
    parsed: argparse.Namespace,
    parts: Mapping[str, Part],
    keys: Sequence[str],
    find_missed: Callable[[Mapping[str, Any]], list[str]],
    keys_of: Mapping[str, Sequence[str]] = NO_KEYS,
) -> int:
    """Run the chosen parts; print all keys and those missed; return the exit status.

    A part that fails ends no other: `failed` has its error by its name, and so have its keys.

    Args:
        parsed: of `parts_parser`.
        parts: all, by name.
        keys: of the report.
        find_missed: returns the keys of a report that miss their bars.
        keys_of: those of each part.
    """
    # Before the first process starts, which inherits them.
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
    report: dict[str, Any] = dict.fromkeys(keys)
    failed: dict[str, str] = {}
    for name in parsed.parts:
        began_s = time.monotonic()
        try:
            found = parts[name](parsed)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the other parts have figures
            traceback.print_exc()
            failed[name] = f"failed: {type(error).__name__}: {error}"
            found = dict.fromkeys(keys_of.get(name, ()), failed[name])
        report |= {key: value for key, value in found.items() if key in report}
        print_line(f"{name}: {time.monotonic() - began_s:.0f} s")
    report |= {"missed": find_missed(report), "failed": failed}
    print_report(report)
    return 1 if report["missed"] or failed else 0
