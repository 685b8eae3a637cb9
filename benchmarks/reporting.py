"""What benchmarks share: programs whose output appears at once, runs, and figures in turns."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def print_line(line: str) -> None:
    """Print a line, and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def print_report(report: Mapping[str, object], folder: Path | None = None) -> int:
    """Print the last line, and write it to ``bench.json`` in the folder; return 0."""
    line = json.dumps(report)
    if folder is not None:
        (folder / "bench.json").write_text(f"{line}\n", encoding="utf-8")
    print_line(line)
    return 0


def last_json(command: Sequence[str]) -> dict[str, Any]:
    """Run a program, show its output as it comes, and return the JSON object of its last line.

    Raises:
        SystemExit: it failed.
    """
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        for line in process.stdout or ():
            last = line.rstrip()
            print_line(last)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command[:3])} ended with code {process.returncode}")
    found: dict[str, Any] = json.loads(last)
    return found


def sluice(*arguments: str) -> None:
    """Run a command of sluice; raise CalledProcessError if it fails."""
    print_line(" ".join(("sluice", *arguments)))
    subprocess.run((sys.executable, "-m", "sluice.cli.main", *arguments), cwd=ROOT, check=True)


def summary_of(run_dir: Path) -> dict[str, Any]:
    """Return the summary of a run that has ended."""
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return summary


def quickstart(run_dir: Path, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Train by `sluice quickstart`; return the run's summary."""
    sluice("quickstart", "--seed", str(seed), "--run-dir", str(run_dir), *overrides)
    return summary_of(run_dir)


def empty_run_folder(run_dir: Path, assets: Path, task: str, seed: int) -> None:
    """Empty a run's folder, and put model and data there, which are made once in `assets`."""
    from sluice.cli.run.quickstart import mark_run_folder
    from sluice.quickstart.prepare import prepare

    prepare(assets, task=task, seed=seed, progress=lambda _: None)
    if run_dir.exists():
        shutil.rmtree(run_dir)
    mark_run_folder(run_dir)
    shutil.copytree(assets, run_dir / "assets")


def alternate(kinds: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return figures of each kind; take turns, so that other load of the machine meets all."""
    figures: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, measure in kinds.items():
            figures[kind].append(measure())
    return figures
