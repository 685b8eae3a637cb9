"""`sluice doctor` as a process, for a run with real faults; what it asks other processes."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sluice.doctor import packages
from sluice.doctor.examination import CHECKS
from sluice.doctor.reward import check_reward
from sluice.quickstart.arithmetic import TASKS, draw_problem, make_dialogues
from sluice.quickstart.tokenizer import save_tokenizer, train_tokenizer
from tests.support.certified import authority, write_pair, write_security
from tests.support.doctor_findings import only, run_of, write_model
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.source_tree import ROOT

OF_THE_RUN = ("configuration", "extras", "model", "data", "reward", "ports", "security")
VARIABLES = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
# The command's own program, with the checks that its first argument names.
PATIENT = """
import sys
from dataclasses import replace
from sluice.cli import doctor, main

names = sys.argv.pop(1).split(",")
checks = [check for check in doctor.CHECKS if check.name in names]
doctor.CHECKS = tuple(replace(check, deadline_s=3600.0) for check in checks)
main.app()
"""


def sound_run(folder: Path) -> list[str]:
    write_model(folder / "model")
    rng = random.Random(0)
    problems = [draw_problem(rng, TASKS["quickstart"]) for _ in range(30)]
    save_tokenizer(train_tokenizer(make_dialogues(problems, rng, 0.1)), folder / "model", 512)
    train = write_prompts(folder / "train.parquet", prompt_rows([str(i) for i in range(100)]))
    return [
        f"actor_rollout_ref.model.path={folder}/model",
        f"data.train_files={train}",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        f"sluice.run_dir={folder}/run",
        "trainer.device=cpu",
        "sluice.rollout.device=cpu",
        "reward.scorer_pool.timeout_s=300",
    ]


def expired(folder: Path) -> list[str]:
    files = write_security(folder)
    pair = authority("ours").service(("127.0.0.1",), -1)
    files["cert_file"], files["key_file"] = write_pair(folder, "expired", pair)
    return [f"sluice.security.{name}={value}" for name, value in files.items()]


def answered(command: list[str], arguments: list[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and object of a process that has no variables of the machine's own."""
    done = subprocess.run(
        [sys.executable, *command, *arguments, "--json"],
        cwd=ROOT,
        env={name: os.environ[name] for name in VARIABLES if name in os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def examined(arguments: list[str]) -> tuple[int, dict[str, Any]]:
    """By the checks of the run's own files and ports, which are given all the time they want."""
    return answered(["-c", PATIENT, ",".join(OF_THE_RUN), "doctor"], arguments)


def problems(found: dict[str, Any]) -> dict[str, str]:
    return {one["check"]: one["what"] for one in found["findings"] if one["severity"] == "problem"}


def test_a_sound_run_has_no_problem_and_nothing_of_it_is_made(tmp_path: Path) -> None:
    code, found = examined(sound_run(tmp_path))
    assert problems(found) == {}
    assert {one["check"] for one in found["findings"]} == set(OF_THE_RUN)
    assert (code, found["ok"], found["has_run"]) == (0, True, True)
    assert not (tmp_path / "run").exists()


def test_the_command_reports_every_check_in_order_and_makes_nothing(tmp_path: Path) -> None:
    # What it says of this machine, and whether it is late here, is the machine's.
    code, found = answered(["-m", "sluice.cli.main", "doctor"], sound_run(tmp_path))
    reported = list(dict.fromkeys(one["check"] for one in found["findings"]))
    assert reported == [check.name for check in CHECKS]
    assert code == (0 if found["ok"] else 1)
    assert found["ok"] == (not problems(found))
    assert not (tmp_path / "run").exists()


def test_a_taken_port_a_cut_shard_and_an_expired_certificate_are_each_reported(
    tmp_path: Path,
) -> None:
    arguments = [*sound_run(tmp_path), *expired(tmp_path)]
    shard = tmp_path / "model" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, found = examined([*arguments, f"sluice.reward.endpoint.port={port}"])
    reported = problems(found)
    assert set(reported) == {"model", "ports", "security"}, reported
    assert shard.name in reported["model"]
    assert f"sluice.reward.endpoint.port = {port}" in reported["ports"]
    assert "has expired" in reported["security"]
    assert (code, found["ok"]) == (1, False)


def test_torch_is_imported_in_a_separate_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_PROBE_S", 3600.0)
    assert isinstance(packages.probe_torch({}), packages.TorchBuild)


def test_a_reward_function_is_loaded_and_what_its_import_raises_is_reported(tmp_path: Path) -> None:
    file, key = tmp_path / "mine.py", "reward.custom_reward_function.path"
    body = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    file.write_text(f"{body}    return 1.0\n", encoding="utf-8")
    only(check_reward(run_of(f"{key}={file}")), "ok")
    file.write_text("raise RuntimeError('no licence')\n", encoding="utf-8")
    assert "no licence" in only(check_reward(run_of(f"{key}={file}")), "problem").what
