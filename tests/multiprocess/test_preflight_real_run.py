"""`sluice up` refuses what cannot work before it starts a process, with real models and files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from sluice.doctor.prompts import check_data
from sluice.doctor.reward import check_reward
from tests.support.doctor_findings import run_of, severities
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.small_run import Assets
from tests.support.source_tree import ROOT

MODEL, TRAIN = "actor_rollout_ref.model.path", "data.train_files"
START = "from sluice.__main__ import app; app()"
RAISES = "def compute_score(**call):\n    return call['extra_info']['nokey']\n"


def up(assets: Assets, *settings: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", START, "up", str(assets.config), *settings],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_first_rows_are_measured_with_the_models_own_template(
    small_assets: Assets, tmp_path: Path
) -> None:
    rows = prompt_rows(["1 + 1 = ?", "1 + " * 100])
    file = write_prompts(tmp_path / "train.parquet", rows)
    named = (f"{MODEL}={small_assets.folder}/model", f"{TRAIN}={file}", "data.train_batch_size=2")
    train, _, overlong = check_data(run_of(*named, "data.max_prompt_length=64"))
    assert "2 rows" in train.what
    assert overlong.severity == "warning"
    assert "train.parquet, row 1" in overlong.what
    assert severities(check_data(run_of(*named, "data.max_prompt_length=900"))) == ["ok", "ok"]


def test_a_template_that_refuses_all_rows_is_a_problem(
    small_assets: Assets, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(small_assets.folder / "model", model)
    for file in model.glob("chat_template.jinja"):
        file.unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = "{{ raise_exception('roles must alternate') }}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    found = check_data(run_of(f"{MODEL}={model}", f"{TRAIN}={small_assets.folder}/train.parquet"))
    (refused,) = [one for one in found if one.severity == "problem"]
    assert "row 0: messages: the chat template refused them: roles must alternate" in refused.what


def test_built_in_scorers_are_tried_on_the_first_rows(small_assets: Assets) -> None:
    (found,) = check_reward(run_of(f"{TRAIN}={small_assets.folder}/train.parquet"))
    assert found.severity == "ok"
    assert "scores 4 rows" in found.what


def test_a_run_that_cannot_work_is_refused_with_all_reasons_and_starts_nothing(
    small_assets: Assets, tmp_path: Path
) -> None:
    score = tmp_path / "mine.py"
    score.write_text(RAISES, encoding="utf-8")
    cut = tmp_path / "cut.parquet"
    cut.write_bytes((small_assets.folder / "train.parquet").read_bytes()[:-100])
    code, out, error = up(
        small_assets,
        f"sluice.run_dir={tmp_path}/run",
        f"data.val_files={cut}",
        f"reward.custom_reward_function.path={score}",
        "data.max_response_length=4000",
        "actor_rollout_ref.rollout.name=vllm",
        "trainer.logger=[console,swanlab]",
        "data.train_batchsize=3",
    )
    assert code == 1
    assert out.splitlines()[0].startswith("checking ")
    for part in (
        "data.train_batchsize: unknown key",
        "exceed the model's context",
        "vllm is not installed",
        "swanlab is not installed",
        "cut.parquet",
        "KeyError: 'nokey' in compute_score (mine.py:2)",
    ):
        assert error.count(part) == 1, error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_missing_column_is_found_before_anything_starts(
    small_assets: Assets, tmp_path: Path
) -> None:
    table = pq.read_table(small_assets.folder / "train.parquet").drop_columns("reward_model")
    pq.write_table(table, tmp_path / "bare.parquet")
    code, _, error = up(
        small_assets, f"sluice.run_dir={tmp_path}/run", f"{TRAIN}={tmp_path}/bare.parquet"
    )
    assert code == 1
    assert "no column 'reward_model'" in error
    assert "data.prompt_key" not in error
    assert not (tmp_path / "run").exists()
