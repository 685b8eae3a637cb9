"""Try sluice on one GPU of 80 GB, without a network, in minutes; `make gpu-smoke`.

Each part is a process of its own with a deadline, so that one that fails ends no other. The last
line is one JSON object, which is also written to ``report.json``, with date and device:

passed      whether no part failed
failed      their names, with the end of what they printed in ``NAME.log``
rules       tests/gpu: learner against the CPU in float32, the engine contract, memory of the head
dense_*, experts_*  an update of a random model, rows of 8,192 tokens: tokens/s, model FLOPs over
            the GPU's peak, bytes at the peak over what `sluice plan` predicts
engine      tokens/s of the embedded engine and of transformers, seconds to the first token, ms
            without a token for an update
quickstart  held-out accuracy before and after, seconds
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.reporting import ROOT, print_line, print_report
from tools.phases import tool_parser

_PYTHON = (sys.executable, "-m")
_UPDATE = (*_PYTHON, "benchmarks.gpu_smoke.update")
_PARTS: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "rules": (200, (*_PYTHON, "pytest", "-q", "-o", "filterwarnings=default", "tests/gpu")),
    "dense_1.7b": (150, (*_UPDATE, "1.7b")),
    "dense_8b": (150, (*_UPDATE, "8b")),
    "experts_30b_a3b": (150, (*_UPDATE, "30b-a3b")),
    "engine": (
        150,
        (
            *_PYTHON,
            *("benchmarks.engine", "--device", "cuda", "--models", "0.5b"),
            *("--sequences", "128", "--new-tokens", "128", "--repeats", "2", "--updates", "3"),
        ),
    ),
    "quickstart": (150, (*_PYTHON, "benchmarks.gpu_smoke.quickstart")),
}


def main(arguments: Sequence[str]) -> int:
    """Run the parts; return 1 if one failed."""
    parsed = _arguments(arguments)
    if not torch.cuda.is_available():
        print_line(f"torch {torch.__version__} finds no GPU")
        return 1
    parsed.report.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    found = {name: _measured(name, parsed.report) for name in parsed.parts}
    failed = [name for name, figures in found.items() if figures is None]
    report = {
        "passed": not failed,
        "failed": failed,
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began_s),
        **{name: figures for name, figures in found.items() if figures},
    }
    (parsed.report / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    print_report(report)
    return 1 if failed else 0


def _measured(name: str, folder: Path) -> dict[str, Any] | None:
    """Run one part; return its figures, None if it failed."""
    seconds, command = _PARTS[name]
    began_s, log = time.monotonic(), folder / f"{name}.log"
    print_line(f"{name} ...")
    with log.open("w", encoding="utf-8") as output:
        outcome = _run(command, output, seconds)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    print_line(f"{name}: {outcome or 'ok'}, {time.monotonic() - began_s:.0f} s")
    if outcome:
        print_line("\n".join(lines[-25:]))
        return None
    try:
        figures = json.loads(lines[-1])
    except ValueError:
        figures = {"outcome": lines[-1].strip("= ")}
    print_line(json.dumps(figures))
    return dict(figures)


def _run(command: Sequence[str], output: IO[str], seconds: float) -> str:
    """Run a program, and end what it started; return how it failed, or nothing."""
    program = subprocess.Popen(
        command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
    )
    try:
        code = program.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    return f"exit code {code}" if code else ""


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = tool_parser(__doc__, "python -m benchmarks.gpu_smoke --parts rules dense_8b")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--report", type=Path, default=ROOT / "runs" / "gpu-smoke")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
