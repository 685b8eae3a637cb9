"""The defects of a first hour, each as a check: it returns what is still wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from typing import Any

from tools.first_hour.shell import Shell, has, settings, started_processes
from tools.first_hour.world import rows, write_rows
from tools.phases import until

Check = Callable[[Shell], list[str]]
_RUN = "runs/mine"


def _summary(shell: Shell, run: str = _RUN) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((shell.folder / run / "summary.json").read_text())
    return found


def _killed(shell: Shell, run: str, *names: str) -> None:
    """Kill services of a run, by the process ids that they noted."""
    for name in names:
        mark = json.loads((shell.folder / run / "processes" / f"{name}.json").read_text())
        os.kill(int(mark["pid"]), signal.SIGKILL)


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


def raising_reward(shell: Shell) -> list[str]:
    """Defect 4: a reward function that always raises."""
    words = settings(
        reward__custom_reward_function__path="always.py", sluice__run_dir="runs/always"
    )
    code, text = shell.run("up", "run.yaml", *words)
    missing = has(text, r"always\.py", "nokey", "line 2|always\\.py:2")
    missing += ["it started processes"] if started_processes(text) else []
    return missing + (["exit code 0"] if code == 0 else [])


def overlong_row(shell: Shell) -> list[str]:
    """Defect 5: one overlong prompt costs itself."""
    words = settings(
        data__train_files="huge.parquet",
        data__truncation="error",
        sluice__run_dir="runs/huge",
        trainer__total_training_steps=5,
        data__shuffle=False,
        trainer__total_epochs=10,
    )
    with shell.running("huge.log", "up", "run.yaml", *words) as run:
        code, text = run.end()
    return has(text, "finished after step 5 of 5") + ([] if code == 0 else [f"exit code {code}"])


def missing_packages(shell: Shell) -> list[str]:
    """Defect 6: packages for engine and loggers are checked before the start."""
    code, text = shell.run("train", "--script", "run_verl.sh", "sluice.run_dir=runs/verl")
    missing = has(text, "vllm", "wandb", "pip install")
    missing += ["it started processes"] if started_processes(text) else []
    return missing + (["exit code 0"] if code == 0 else [])


def launch_script(shell: Shell) -> list[str]:
    """Defect 8: a launch script of verl is read as it is."""
    _, text = shell.run("config", "check", "run_verl.sh")
    wrong = ["an error about the script's words"] if "write key.path=value" in text else []
    return wrong + has(text, r"verl\.trainer\.main_ppo")


def broken_data(shell: Shell) -> list[str]:
    """Defect 9: data files are read before the start."""
    folder = shell.folder
    write_rows(folder / "empty.parquet", [])
    write_rows(folder / "column.parquet", [{"prompt": each["prompt"]} for each in rows(8)])
    write_rows(folder / "text.parquet", [{**each, "prompt": "What is 1 + 1?"} for each in rows(8)])
    whole = (folder / "train.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    wrong = []
    for name in ("empty", "column", "text", "cut"):
        code, text = shell.run("config", "check", "run.yaml", f"data.train_files={name}.parquet")
        if code == 0 or f"{name}.parquet" not in text:
            wrong.append(f"{name}.parquet passes: {text[-300:]}")
    return wrong


def all_at_once(shell: Shell) -> list[str]:
    """Defect 10: keys, types and rules come in one report."""
    words = ("data.train_batchsize=3", "actor_rollout_ref.rollout.n=four")
    _, text = shell.run("config", "check", "run.yaml", *words, "algorithm.adv_estimator=grppo")
    return has(text, "train_batchsize", r"rollout\.n", "grppo")


def short_context(shell: Shell) -> list[str]:
    """Defect 11: the model's context against prompt and response."""
    words = settings(data__max_prompt_length=1024, data__max_response_length=2048)
    code, text = shell.run("config", "check", "run.yaml", *words)
    return has(text, "512", "max_response_length") + (["exit code 0"] if code == 0 else [])


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
SINGLE: Mapping[int, Check] = {
    4: raising_reward,
    5: overlong_row,
    6: missing_packages,
    8: launch_script,
    9: broken_data,
    10: all_at_once,
    11: short_context,
    14: deleted_folder,
    15: solved_task,
}
