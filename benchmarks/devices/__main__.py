"""Measure on the CPU what will matter on devices; `make bench-devices`.

Parts, and the keys of the JSON object that is printed last; those of other parts are null:

engines     vllm_python_ratio: sluice's Python CPU of a token from vLLM over that of an earlier
            commit; vllm_overhead: tokens/s at 128 sequences over vLLM alone; with --vllm-python
            only
wire        batch_bytes_ratio: bytes into a trainer rank over those of its samples and prompts, the
            worst of four; batch_s: seconds on loopback until all ranks have taken a batch of
            512 x 16 samples of 20,000 tokens

missed names the keys that miss their bars; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.devices import engines, wire
from benchmarks.reporting import print_line, print_report
from tools.phases import tool_parser

KEYS = (*wire.KEYS, *engines.KEYS)
MOST: Mapping[str, float] = {**wire.MOST, **engines.MOST}
LEAST: Mapping[str, float] = {**engines.LEAST}

Part = Callable[[argparse.Namespace], Mapping[str, object]]


def _engines(parsed: argparse.Namespace) -> Mapping[str, object]:
    if parsed.vllm_python is None:
        print_line("engines: left out, there is no --vllm-python")
        return {}
    return engines.measure(parsed.vllm_python)


PARTS: Mapping[str, Part] = {
    "wire": lambda _: wire.measure(),
    "engines": _engines,
}


def missed(report: Mapping[str, object]) -> list[str]:
    """Return the keys whose figures miss their bars; a key without a figure misses none."""
    found = {key: each for key, each in report.items() if isinstance(each, int | float)}
    # "not <=" and not ">", so that nan misses every bar.
    keys = [key for key, bar in MOST.items() if key in found and not found[key] <= bar]
    return keys + [key for key, bar in LEAST.items() if key in found and not found[key] >= bar]


def _parts(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: give some of {','.join(PARTS)}")
    return names


def main(arguments: Sequence[str]) -> int:
    """Run the parts; return the exit status."""
    parser = tool_parser(__doc__, "python -m benchmarks.devices --parts wire")
    parser.add_argument("--parts", type=_parts, default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--vllm-python", help="of an environment with vLLM and sluice")
    parsed = parser.parse_args(arguments)
    # Before the first rank starts, which inherits them.
    os.environ |= {"OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
    report: dict[str, object] = dict.fromkeys(KEYS)
    for name in parsed.parts:
        began_s = time.monotonic()
        report |= PARTS[name](parsed)
        print_line(f"{name}: {time.monotonic() - began_s:.0f} s")
    report["missed"] = missed(report)
    print_report(report)
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
