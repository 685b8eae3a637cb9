"""Launch scripts of verl on the command line: checked, started, translated."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sluice.cli.arguments import split_arguments
from sluice.cli.main import commands
from sluice.config.loading.loader import load_config
from sluice.errors import ConfigError
from tests.support.isolation import forbid_isolation, isolated

SCRIPT = """#!/usr/bin/env bash
set -x
batch=$((16 * 4))
pip install -U something
python3 -m verl.trainer.main_ppo \\
    --config-name=other \\
    data.train_files=$SCRIPT_DATA/train.parquet \\
    data.train_batch_size=$batch \\
    data.gen_batch_size=192 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    trainer.logger='["console","wandb"]' \\
    trainer.total_epochs=15 $@
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("SCRIPT_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(SCRIPT, encoding="utf-8")
    return "run.sh"


def sluice(*arguments: str) -> Result:
    return CliRunner().invoke(commands, arguments)


@isolated
def test_a_script_is_checked_as_it_is_with_its_last_word(script: str) -> None:
    found = sluice("config", "check", script, "trainer.total_epochs=2", "--no-files", "--json")
    keys = json.loads(found.stdout)["keys"]
    assert keys["data.gen_batch_size"] == "not applicable"
    assert keys["data.train_batch_size"] == "honoured"
    assert set(keys) == {
        "data.train_files",
        "data.train_batch_size",
        "data.gen_batch_size",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.use_dynamic_bsz",
        "trainer.logger",
        "trainer.total_epochs",
        "algorithm.adv_estimator",
    }
    assert found.stderr.splitlines() == [
        "run.sh: bash runs the script to read its arguments; programs are recorded.",
        "  not run: pip install -U something",
        "  warning: $SCRIPT_DATA has no value; set it: SCRIPT_DATA=... sluice ...",
        "  ignored: --config-name=other; give what it changes of verl's defaults as key=value",
        "  launch: verl.trainer.main_ppo, 8 settings",
        "  added: algorithm.adv_estimator=gae, verl's default; settings beside the script win",
    ]


@isolated
@pytest.mark.parametrize(
    ("setting", "estimator"),
    [
        ("", "gae"),
        (" algorithm.adv_estimator=grpo", "grpo"),
        (" +algorithm.adv_estimator=rloo", "rloo"),
    ],
)
def test_a_script_without_an_estimator_trains_verls(
    setting: str, estimator: str, script: str
) -> None:
    Path(script).write_text(SCRIPT.replace(" $@", setting), encoding="utf-8")
    assert sluice("init", "run.yaml", "--from", script).exit_code == 0
    assert load_config(Path("run.yaml"), ()).algorithm.adv_estimator == estimator


@isolated
@pytest.mark.parametrize(
    "named", ["algorithm={adv_estimator: rloo}", "algorithm.adv_estimator=rloo", "own.overrides"]
)
def test_an_estimator_beside_a_script_wins_over_verls(named: str, script: str) -> None:
    Path("own.overrides").write_text("algorithm.adv_estimator=rloo\n", encoding="utf-8")
    Path(script).write_text(SCRIPT.replace(" $@", ""), encoding="utf-8")
    read_from, overrides = split_arguments([script, named], trust_script=False)
    assert load_config(read_from, overrides).algorithm.adv_estimator == "rloo"


@isolated
def test_a_scripts_configuration_file_comes_before_its_settings(script: str) -> None:
    Path("other.yaml").write_text("data: {seed: 5, train_batch_size: 1}", encoding="utf-8")
    Path(script).write_text(SCRIPT.replace("--config-name", "--config-path=. --config-name"))
    found = sluice("config", "check", script, "--no-files", "--json")
    keys = json.loads(found.stdout)["keys"]
    assert keys["data.seed"] == "honoured"
    assert "  configuration: other.yaml" in found.stderr.splitlines()
    assert sluice("init", "run.yaml", "--from", script).exit_code == 0
    config = load_config(Path("run.yaml"), ())
    assert (config.data.seed, config.data.train_batch_size) == (5, 64)


def test_the_name_of_verls_own_file_asks_for_nothing(script: str) -> None:
    own = SCRIPT.replace("--config-name=other", "--config-name='ppo_megatron_trainer.yaml'")
    Path(script).write_text(own, encoding="utf-8")
    found = sluice("config", "check", script, "--trust-script", "--no-files")
    lines = found.stderr.splitlines()
    assert "  ignored: --config-name=ppo_megatron_trainer.yaml" in lines


def test_a_note_names_the_keys_of_a_recipe_that_generates_ahead(script: str) -> None:
    module = "verl.experimental.one_step_off_policy.main_ppo"
    text = SCRIPT.replace("verl.trainer.main_ppo", module).replace("--config-name=other", "")
    Path(script).write_text(text, encoding="utf-8")
    check = ("config", "check", script, "--trust-script", "--no-files", "--json")
    keys = ["algorithm.rollout_correction.bypass_mode=true", "sluice.asynchrony.max_staleness=1"]
    for number in (0, 1):
        lines = sluice(*check, *keys[:number]).stderr.splitlines()
        (note,) = [line for line in lines if line.startswith("  note: ")]
        assert note.endswith(f"for the same here, add {' '.join(keys[number:])}")
    found = sluice(*check, *keys)
    assert "  note: " not in found.stderr
    assert "bypass" not in str(json.loads(found.stdout)["violations"])


@isolated
def test_a_configuration_files_variables_are_those_of_the_script(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPT_NAME", "here")
    monkeypatch.setenv("SCRIPT_OTHER", "here")
    Path("base.yaml").write_text("trainer: {project_name: '${oc.env:SCRIPT_NAME,x}'}", "utf-8")
    text = "defaults: [ppo_trainer, base]\ntrainer: {experiment_name: '${oc.env:SCRIPT_OTHER}'}"
    Path("other.yaml").write_text(text, encoding="utf-8")
    text = SCRIPT.replace("--config-name", "--config-path=. --config-name")
    Path(script).write_text(text.replace("set -x", "export SCRIPT_NAME=there"), encoding="utf-8")
    assert sluice("init", "run.yaml", "--from", script).exit_code == 0
    trainer = load_config(Path("run.yaml"), ()).trainer
    assert (trainer.project_name, trainer.experiment_name) == ("there", "here")


@isolated
def test_processes_of_a_run_have_the_variables_that_its_script_exports(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SCRIPT_MODE", "SCRIPT_DEVICES", "SCRIPT_OWN"):
        monkeypatch.setenv(name, "here")
        monkeypatch.delenv(name)
    text = SCRIPT.replace("set -x", "export SCRIPT_MODE=offline; SCRIPT_OWN=1")
    Path(script).write_text(text.replace("python3", "SCRIPT_DEVICES=0,1 python3"), encoding="utf-8")
    refused = sluice("train", script, "data.train_batchsize=3")
    assert "  exports: SCRIPT_DEVICES, SCRIPT_MODE" in refused.stderr.splitlines()
    assert (os.environ["SCRIPT_MODE"], os.environ["SCRIPT_DEVICES"]) == ("offline", "0,1")
    assert "SCRIPT_OWN" not in os.environ


@isolated
def test_training_a_script_takes_its_settings_and_starts_nothing_that_is_wrong(script: str) -> None:
    for words in (("--script", script), (script,)):
        refused = sluice("train", *words, "data.train_batchsize=3")
        assert isinstance(refused.exception, ConfigError)
        assert "data.train_batchsize: unknown key" in str(refused.exception)


@pytest.mark.parametrize(
    "words",
    [
        ("config", "check", "run.sh"),
        ("doctor", "run.sh"),
        ("train", "--script", "run.sh"),
        ("train", "run.sh"),
        ("up", "run.sh"),
        ("prepare", "run.sh"),
        ("init", "--from", "run.sh"),
    ],
)
def test_a_script_that_cannot_be_isolated_runs_only_if_it_is_trusted(
    words: tuple[str, ...], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SCRIPT.replace(" $@", " data.train_batchsize=3 > run.log")
    Path(script).write_text(text, encoding="utf-8")
    forbid_isolation(monkeypatch, Path("bin"))
    refused = sluice(*words)
    assert isinstance(refused.exception, ConfigError)
    assert "cannot isolate it (unshare failed: Not permitted)" in str(refused.exception)
    assert not Path("run.log").exists()
    trusted = sluice(*words, "--trust-script")
    assert "without isolation: what it writes stays; replaced: python, python3," in trusted.stderr
    assert "not run: pip install -U something" in trusted.stderr
    assert "data.train_batchsize: unknown key" in f"{trusted.exception}{trusted.stdout}"


@isolated
def test_a_script_becomes_a_commented_configuration(script: str) -> None:
    made = sluice("init", "--from", script, "--json")
    assert made.exit_code == 0, made.output
    text = Path("run.yaml").read_text(encoding="utf-8")
    assert "has no effect" in text
    config = load_config(Path("run.yaml"), [])
    assert config.data.train_batch_size == 64
    assert list(config.trainer.logger) == ["console", "wandb"]
    assert json.loads(made.stdout)["settings"]["trainer.total_epochs"] == 15


@pytest.mark.parametrize(
    "line", ["data.train_files=$HOME/x", "trainer.total_epochs=15 $@", "ray x"]
)
def test_a_copied_line_of_a_script_is_refused_with_the_way_to_give_the_script(
    line: str, tmp_path: Path
) -> None:
    file = tmp_path / "launch.overrides"
    file.write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 1: .*give the script itself"):
        load_config(file, [])
