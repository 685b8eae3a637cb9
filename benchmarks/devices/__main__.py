"""Measure on the CPU what will matter on devices; `make bench-devices`.

Parts, and the keys of the JSON object that is printed last; those of other parts are null:

engines     vllm_python_ratio: sluice's Python CPU of a token from vLLM over that of an earlier
            commit; vllm_overhead: tokens/s at 128 sequences over vLLM alone; with --vllm-python
            only
shares      bytes_share_ratio: bytes into a worker of a replica of four over a quarter of the model,
            the worst; host_share_ratio: its host memory for weights over its share, the most
            during three updates
wire        batch_bytes_ratio: bytes into a trainer rank over those of its samples and prompts, the
            worst of four; batch_s: seconds on loopback until all ranks have taken a batch of
            512 x 16 samples of 20,000 tokens

missed names the keys that miss their bars; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.devices import engines, shares, wire
from benchmarks.parts import Part, missed, parts_parser, run_parts
from benchmarks.reporting import print_line

KEYS = (*wire.KEYS, *shares.KEYS, *engines.KEYS)
MOST: Mapping[str, float] = {**wire.MOST, **shares.MOST, **engines.MOST}
LEAST: Mapping[str, float] = {**engines.LEAST}


def _engines(parsed: argparse.Namespace) -> Mapping[str, object]:
    if parsed.vllm_python is None:
        print_line("engines: left out, there is no --vllm-python")
        return {}
    return engines.measure(parsed.vllm_python)


PARTS: Mapping[str, Part] = {
    "wire": lambda _: wire.measure(),
    "shares": lambda _: shares.measure(),
    "engines": _engines,
}


def main(arguments: Sequence[str]) -> int:
    """Run the parts; return the exit status."""
    parser = parts_parser(__doc__, "python -m benchmarks.devices --parts wire", PARTS)
    parsed = parser.parse_args(arguments)
    return run_parts(parsed, PARTS, KEYS, partial(missed, most=MOST, least=LEAST))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
