"""The defects of a first hour, each as a check: it returns what is still wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sluice.concurrency.process import process_marks
from tools.first_hour.shell import Shell, has, settings
from tools.phases import until

Check = Callable[[Shell], list[str]]
_RUN = "runs/mine"


def _summary(shell: Shell, run: str = _RUN) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((shell.folder / run / "summary.json").read_text())
    return found


def _killed(shell: Shell, run: str, *names: str) -> None:
    """Kill services of a run, by the process ids that they noted."""
    for mark in process_marks(shell.folder / run):
        if mark.name in names:
            os.kill(mark.pid, signal.SIGKILL)


def interrupted_and_resumed(shell: Shell) -> dict[int, list[str]]:
    """Interrupt a run, resume it into a file, and read its end: defects 1, 2, 7, 12 and 13."""
    with shell.running(
        "first.log", "up", "run.yaml", *settings(trainer__logger="[console]")
    ) as run:
        run.until(r"^step +4/")
        code, text = run.end(signal.SIGINT)
    saved = _summary(shell)["checkpoint_step"]
    interrupted = has(text, "interrupted after step", f"# from step {saved}")
    interrupted += (
        [] if (code, bool(saved)) == (130, True) else [f"exit code {code}, saved {saved}"]
    )
    logged = shell.folder / _RUN / "metrics.jsonl"
    last = int(saved or 0) + 3
    with shell.running(
        "resumed.log", "up", f"{_RUN}/config.yaml", f"trainer.total_training_steps={last}"
    ) as run:
        code, text = run.end()
    files = [
        name for name in ("report.html", "summary.json") if not (logged.parent / name).is_file()
    ]
    end = has(text, f"finished after step {last} of {last}", "checkpoint ", "report ", "0 lost")
    return {
        1: has(text, rf"step +{last - 2}/{last} ", rf"step +{last}/{last} "),
        2: end + files + ([] if code == 0 else [f"exit code {code}"]),
        7: [] if logged.is_file() else ["metrics.jsonl"],
        12: has(text, "checking configuration", r"starting \d+ processes"),
        13: interrupted,
    }


def killed_services(shell: Shell) -> dict[int, list[str]]:
    """Kill trainer and reward service of a run that trains: defects 3 and 16."""
    words = settings(sluice__run_dir="runs/killed", trainer__save_freq=3)
    with shell.running("killed.log", "up", "run.yaml", *words) as run:
        run.until(r"^step +5/")
        _killed(shell, "runs/killed", "trainer", "reward")
        seen: list[str] = []

        def restarting() -> bool:
            run.look()
            _, text = shell.run("status", "runs/killed")
            seen.append(text)
            return "(try 1 of " in text

        until("a status that names the restart", restarting, timeout_s=60)
        run.until(r"^step +12/")
        _, text = shell.run("status", "runs/killed", "--json")
        share = float(json.loads(text.splitlines()[-1])["accounts"]["tokens_residual_share"])
        run.end(signal.SIGINT)
    wrong = [text for text in seen if "not running" in text]
    return {3: wrong, 16: [] if share < 0.01 else [f"tokens_residual_share {share:.3f}"]}


def shown_by_command(defect: Mapping[str, Any], shell: Shell) -> list[str]:
    """Check a defect of `defects.toml`."""
    words = defect["command"]
    if words[0] == "up":
        with shell.running(f"defect-{defect['number']}.log", *words) as run:
            code, text = run.end()
    else:
        code, text = shell.run(*words)
    wrong = has(text, *defect["has"])
    wrong += [part for part in defect.get("has_not", ()) if part in text]
    if defect.get("starts_nothing") and re.search(r"starting \d+ processes", text):
        wrong.append("it started processes")
    if "fails" in defect and defect["fails"] != (code != 0):
        wrong.append(f"exit code {code}")
    return wrong


def deleted_folder(shell: Shell) -> list[str]:
    """Defect 14: the folder of a live run is deleted."""
    with shell.running("gone.log", "up", "run.yaml", "sluice.run_dir=runs/gone") as run:
        run.until(r"^step +2/")
        shutil.rmtree(shell.folder / "runs/gone", ignore_errors=True)
        run.until("was deleted or replaced while the run is active")
        run.end(signal.SIGTERM)
    return []


def solved_task(shell: Shell) -> list[str]:
    """Defect 15: the filter drops nearly every group."""
    words = settings(
        reward__custom_reward_function__path="solved.py", sluice__run_dir="runs/solved"
    )
    with shell.running("solved.log", "up", "run.yaml", *words) as run:
        run.until("of the groups are mixed .*too easy")
        run.end(signal.SIGTERM)
    return []


GROUPED: tuple[Callable[[Shell], dict[int, list[str]]], ...] = (
    interrupted_and_resumed,
    killed_services,
)
_TABLE = tomllib.loads(Path(__file__).with_name("defects.toml").read_text(encoding="utf-8"))
# Number, name and check; a number may have several.
SINGLE: Sequence[tuple[int, str, Check]] = (
    *((one["number"], one["name"], partial(shown_by_command, one)) for one in _TABLE["defect"]),
    (14, "the folder of a live run is deleted", deleted_folder),
    (15, "the filter drops nearly every group", solved_task),
)
