"""Run every check of the repository and close with a summary; `make test`, `test-fast`, `lint`.

All checks run even if one fails, so that one run shows everything; a test that ends its process
ends its tier alone. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PYTHON = sys.executable
# In falling order of duration: two run at a time. The first takes a minute without its cache, and
# runs beside the tests.
STATIC: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("types (mypy)", (f"{BIN}/mypy",)),
    ("generated code (protoc)", (PYTHON, "tools/generate_protos.py", "--check")),
    ("spelling (codespell)", (f"{BIN}/codespell",)),
    ("words (the glossary's)", (PYTHON, "-m", "tools.check_words")),
    ("generated chart (Helm)", (PYTHON, "-m", "tools.generate_helm_values", "--check")),
    ("generated docs (keys)", (PYTHON, "-m", "tools.generate_config_docs", "--check")),
    ("generated docs (metrics)", (PYTHON, "-m", "tools.generate_metric_docs", "--check")),
    ("generated docs (API)", (PYTHON, "-m", "tools.generate_api_reference", "--check")),
    ("import contracts (import-linter)", (f"{BIN}/lint-imports", "--no-logo")),
    ("protos (buf lint)", (f"{BIN}/buf", "lint")),
    ("protos (buf breaking)", (PYTHON, "tools/check_proto_breaking.py")),
    ("lint (ruff)", (f"{BIN}/ruff", "check")),
    ("format (ruff)", (f"{BIN}/ruff", "format", "--check")),
)
# Real processes have their own run, so that a leak of one tier cannot colour the other.
SEPARATE_TIER = "multiprocess"
# Helpers, and tiers with an environment or a machine of their own.
NOT_RUN_HERE = ("support", "agents", "harness", "engine_vendor", "engine_sglang", "gpu")
# The inner loop: pure code and numbers, without the modules of tests/slow_modules.txt.
FAST_TIERS = ["tests/unit", "tests/parity"]
# Seconds in which a check ends; one that hangs must show its output before CI ends the whole run.
LIMIT_S = 4200.0
_RUNNING: set[subprocess.Popen[bytes]] = set()
"""The checks under way."""
_IS_ENDING = threading.Event()


@dataclass(frozen=True, slots=True)
class Result:
    """How one check ended; a skip is a pass with a reason."""

    name: str
    passed: bool
    seconds: float
    output: str = ""
    counts: dict[str, int] = field(default_factory=dict)


def _environment() -> dict[str, str]:
    """Allow no network and one torch thread, so that processes share the cores fairly."""
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Else each of several hundred service processes compiles the tree again.
    quiet["PYTHONDONTWRITEBYTECODE"] = ""
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **quiet, "PATH": path}


def run_command(name: str, command: Sequence[str], *, shows: bool = False) -> Result:
    """Run one check and keep what it prints, unless it is shown as it comes."""
    start = time.monotonic()
    # A file, since a pipe stays open for as long as any process that a test left behind.
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        output = None if shows else printed
        try:
            running = subprocess.Popen(
                command, cwd=ROOT, env=_environment(), stdout=output, stderr=output
            )
        except FileNotFoundError:
            missing = f"{command[0]} is not installed; run `make test`, which installs the tools"
            return Result(name, False, 0.0, missing)
        late = ""
        _RUNNING.add(running)
        if _IS_ENDING.is_set():
            running.kill()
        try:
            running.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            late = f"\n{name} did not end in {LIMIT_S:.0f} s, and was ended"
            _end(running)
        finally:
            running.kill()  # has an effect after an interrupt alone
            _RUNNING.discard(running)
        printed.seek(0)
        text = printed.read() + late
    return Result(name, running.returncode == 0, time.monotonic() - start, text)


def _end(running: subprocess.Popen[bytes]) -> None:
    """End a check that hangs; pytest's workers print where they are."""
    if workers := _children(running):
        _signal(workers, signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            running.wait(10)
    running.kill()
    running.wait()


def end_all(number: int, _frame: object) -> NoReturn:
    """End every check with its workers as Ctrl-C does, start no other, and leave."""
    _IS_ENDING.set()
    checks = list(_RUNNING)
    for running in checks:
        _signal([*_children(running), running.pid], signal.SIGINT)
    for running in checks:
        with suppress(subprocess.TimeoutExpired):
            running.wait(10)
        running.kill()
    sys.exit(128 + number)


def _children(running: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes that a check has started; Linux alone lists them."""
    listed = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    with suppress(OSError):
        return [int(pid) for pid in listed.read_text().split()]
    return []


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def run_static(pool: ThreadPoolExecutor) -> tuple[Future[Result], Iterator[Result]]:
    """Start the checks that only read; return the longest, and each other one as it ends."""
    longest, *others = [pool.submit(run_command, name, command) for name, command in STATIC]
    return longest, (run.result() for run in as_completed(others))


def pytest_runs() -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
    """Return names and folders of the two pytest runs: tests of one process, and of several."""
    folders = sorted(path.name for path in (ROOT / "tests").iterdir() if path.is_dir())
    tiers = [tier for tier in folders if any((ROOT / "tests" / tier).rglob("test_*.py"))]
    fast = [tier for tier in tiers if tier not in (SEPARATE_TIER, *NOT_RUN_HERE)]
    return (
        (f"tests ({', '.join(fast)})", [f"tests/{tier}" for tier in fast]),
        (f"tests ({SEPARATE_TIER})", [f"tests/{SEPARATE_TIER}"]),
    )


def missing_slow_modules() -> list[str]:
    """Return modules of tests/slow_modules.txt that moved or went."""
    lines = (ROOT / "tests" / "slow_modules.txt").read_text(encoding="utf-8").splitlines()
    names = [line.split()[0] for line in lines if line and not line.startswith("#")]
    return [name for name in names if not (ROOT / "tests" / name).is_file()]


def run_tests(name: str, arguments: Sequence[str], num_waiting: int, *, shows: bool) -> Result:
    """Run pytest with a worker for every core, and some more since their tests wait.

    Tests of one file stay with one worker and in order, since they may share fixtures that are
    expensive. Files run in the order of `tests/conftest.py`.

    Args:
        num_waiting: the workers beyond those.
        shows: pass its output on as it comes; else the result has it.
    """
    workers = str(max(2, os.cpu_count() or 1) + num_waiting)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        parallel = ["-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"]
        # A worker that dies ends the run: xdist 3.8 waits for ever once it has replaced one.
        parallel += ["--max-worker-restart", "0"]
        command = [PYTHON, "-m", "pytest", "-q", f"--junitxml={report}", *parallel, *arguments]
        done = run_command(name, command, shows=shows)
        return replace(done, counts=read_counts(report))


def read_counts(report: Path) -> dict[str, int]:
    """Count tests by result in pytest's report; a run that left none counts as one failure."""
    if not report.exists():
        return {"passed": 0, "failed": 1, "skipped": 0}
    suites = ElementTree.parse(report).getroot().iter("testsuite")  # noqa: S314 written by pytest
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for key in totals:
            totals[key] += int(suite.get(key, "0"))
    failed = totals["failures"] + totals["errors"]
    passed = totals["tests"] - failed - totals["skipped"]
    return {"passed": passed, "failed": failed, "skipped": totals["skipped"]}


def _print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _show(result: Result) -> None:
    skipped = result.passed and result.output.startswith("skipped:")
    if result.output and (skipped or not result.passed):
        _print_line(result.output.rstrip())
    _print_line(f"{'ok    ' if result.passed else 'FAILED'} {result.name}  {result.seconds:.1f} s")


def summary(results: Sequence[Result], seconds: float) -> str:
    """Print how many tests passed; return the figures as a JSON object on one line."""
    totals = {
        key: sum(result.counts.get(key, 0) for result in results)
        for key in ("passed", "failed", "skipped")
    }
    failed = [result.name for result in results if not result.passed]
    if any(result.counts for result in results):
        _print_line(
            f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped"
        )
    figures = {
        "ok": not failed,
        "failed_checks": failed,
        "tests": totals,
        "check_seconds": {result.name: round(result.seconds, 1) for result in results},
        "seconds_total": round(seconds, 1),
    }
    return json.dumps(figures)


def _run_all(arguments: argparse.Namespace, pool: ThreadPoolExecutor) -> list[Result]:
    longest, others = run_static(pool)
    results = []
    for result in others:
        _show(result)
        results.append(result)
    if arguments.fast:
        for gone in missing_slow_modules():
            _print_line(f"tests/slow_modules.txt names {gone}, which is not there; correct it")
        name = "fast tests (unit, parity)"
        _print_line(f"\n{name}")
        results.append(run_tests(name, [*FAST_TIERS, "-m", "not slow"], 1, shows=True))
    elif not arguments.static:
        results += _run_all_tests(pool)
    _show(longest.result())
    return [longest.result(), *results]


def _run_all_tests(pool: ThreadPoolExecutor) -> list[Result]:
    """Run tests of one process beside those of several, which often wait for each other.

    These take longer, so that their output is shown as it comes.
    """
    (name, selected), (longer, longer_selected) = pytest_runs()
    beside = pool.submit(run_tests, name, selected, 0, shows=False)
    _print_line(f"\n{longer}, and beside them {name}")
    shown = run_tests(longer, longer_selected, 1, shows=True)
    _show(beside.result())
    return [beside.result(), shown]


def main() -> int:
    """Run the chosen checks; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--static", action="store_true", help="leave the tests out")
    what.add_argument("--fast", action="store_true", help="leave slow tests and tiers out")
    arguments = parser.parse_args()
    start = time.monotonic()
    with ThreadPoolExecutor(max_workers=2) as pool:
        signal.signal(signal.SIGTERM, end_all)
        results = _run_all(arguments, pool)
    _print_line("\nsummary")
    for result in results:
        _show(Result(result.name, result.passed, result.seconds))
    _print_line(summary(results, time.monotonic() - start))
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
