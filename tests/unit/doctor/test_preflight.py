"""Before the start all problems are found at once, each once; a slow check keeps no run waiting."""

from __future__ import annotations

import threading
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from sluice.cli.run.checked import check_run
from sluice.config.memory.shape import shape_of
from sluice.config.problems import Severity
from sluice.config.rules.checks import all_problems
from sluice.config.run import RunConfig
from sluice.data.prompt_files import PromptFiles
from sluice.data.prompt_rows import PromptRow
from sluice.doctor import examination as module
from sluice.doctor.configuration import check_configuration
from sluice.doctor.examination import CHECKS, Check, preflight
from sluice.doctor.finding import DoctorContext, Finding, open_first_rows, problem, warning
from sluice.doctor.machine import cores_finding
from sluice.doctor.prompts import overlong_findings, template_findings
from sluice.doctor.reward import check_reward
from sluice.doctor.trial import TrialAnswer
from sluice.errors import ConfigError
from tests.support.doctor_findings import only, run_of, write_model
from tests.support.prompt_parquet import prompt_rows, write_prompts

SHAPE = {
    "num_attention_heads": 4,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}
MODEL = "actor_rollout_ref.model.path"
INVARIANT = "sluice.rollout.batch_invariant"


def scripted(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    def examine(_: DoctorContext) -> tuple[Finding, ...]:
        return findings

    checks = tuple(Check(name, "", examine, before_start=True) for name in ("one", "two"))
    monkeypatch.setattr(module, "CHECKS", (*checks, Check("later", "", examine)))


def test_each_problem_is_reported_once_and_a_warning_is_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted(monkeypatch, problem("full", "it fails", "free some"), warning("slow", "far", "move"))
    broken, note = preflight(run_of("data.seed=3"))
    assert (broken.text, broken.severity) == ("full; free some", Severity.ERROR)
    assert (note.text, note.severity) == ("slow: far; move", Severity.NOTE)


def test_a_check_that_is_late_refuses_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hanging(_: DoctorContext) -> list[Finding]:
        released.wait(60)
        return []

    late = Check("slow", "a disk", hanging, deadline_s=0.1, before_start=True)
    monkeypatch.setattr(module, "CHECKS", (late,))
    (note,) = preflight(run_of("data.seed=3"))
    released.set()
    assert note.severity is Severity.NOTE
    assert "a disk: no answer within 0.1 s" in note.text


def test_a_run_on_other_hosts_is_not_checked_for_packages_and_devices_of_this_one() -> None:
    names = {one.name for one in CHECKS if one.before_start and one.of_host}
    assert names == {"extras", "gpus", "cores", "ports", "sandbox"}


def test_keys_files_packages_and_columns_are_one_message(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "empty.parquet").write_bytes(b"")
    settings = [
        f"{MODEL}={tmp_path}/model",
        f"data.train_files={tmp_path}/empty.parquet",
        "data.val_files=gone.parquet",
        "data.train_batchsize=3",
        "data.seed",
        "trainer.project_name=${gone}",
        "actor_rollout_ref.rollout.name=vllm",
        "trainer.logger=[console,swanlab]",
        "sluice.rollout.device=cpu",
        "trainer.device=cpu",
    ]
    with pytest.raises(ConfigError) as caught:
        check_run(None, settings, Console(file=StringIO()))
    text = str(caught.value)
    for part in (
        "data.train_batchsize: unknown key",
        "override 'data.seed': no value; write data.seed=VALUE",
        "trainer.project_name: reference ${gone}: gone: unknown key",
        "empty.parquet is empty (0 bytes)",
        "no file gone.parquet",
        "vllm is not installed; pip install 'sluice[vllm]'",
        "swanlab is not installed; pip install 'sluice[swanlab]'",
    ):
        assert text.count(part) == 1, text


def test_every_missing_file_is_named_once_with_the_contradictions(tmp_path: Path) -> None:
    names = ("model", "a.parquet", "b.parquet", "c.parquet", "score.py", "world.py", "at_step_3")
    model, math, code, held_out, score, world, step = (str(tmp_path / name) for name in names)
    settings = [
        f"{MODEL}={model}",
        "data.train_files=other.parquet",
        f"sluice.sources={{math:{{files:{math},share:0.5}},code:{{files:{code},share:0.5}}}}",
        "trainer.total_training_steps=5",
        f"data.val_files={held_out}",
        f"reward.custom_reward_function.path={score}",
        f"sluice.environment.path={world}",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={step}",
        "trainer.device=cpu",
        "sluice.rollout.device=cpu",
        "badword",
    ]
    with pytest.raises(ConfigError) as caught:
        check_run(None, settings, Console(file=StringIO()))
    lines = str(caught.value).splitlines()
    for text in (*names, "data.train_files = other.parquet with sluice.sources", "'badword'"):
        assert sum(text in line for line in lines) == 1, (text, lines)


def test_a_wrong_key_hides_rules_about_itself_alone() -> None:
    def broken(*wrong: str) -> str:
        run = run_of("trainer.val_only=true", "data.val_files=null", *wrong)
        return " ".join(one.what for one in check_configuration(run))

    assert "trainer.val_only = true with data.val_files = null" in broken()
    for wrong in ("badword", "trainer.val=3", "data.val=x"):
        assert "trainer.val_only = true with data.val_files = null" in broken(wrong), wrong
    assert "there is nothing to validate" not in broken("trainer.val_only=perhaps")


def test_rows_longer_than_the_models_context_are_an_error_that_names_both_keys() -> None:
    run = run_of("data.max_prompt_length=1024", "data.max_response_length=2048")
    shape = shape_of({**SHAPE, "max_position_embeddings": 512})
    broken = all_problems(run.config, run.settings, shape=shape, files=False)
    (found,) = [one for one in broken if one.rule == "context"]
    assert "data.max_response_length = 2048 with data.max_prompt_length = 1024" in found.text
    assert "context of 512 tokens" in found.text


@pytest.mark.parametrize(
    ("settings", "experts", "refused"),
    [
        (("sluice.asynchrony.max_staleness=0",), 8, True),
        (("sluice.asynchrony.max_staleness=0",), 0, False),
        (("sluice.asynchrony.max_staleness=0", f"{INVARIANT}=false"), 8, False),
        (("sluice.asynchrony.max_staleness=1",), 8, False),
        (("sluice.asynchrony.max_staleness=1", f"{INVARIANT}=true"), 8, True),
        ((f"{INVARIANT}=true", "actor_rollout_ref.rollout.name=vllm"), 8, False),
    ],
)
def test_a_mixture_of_experts_that_is_to_repeat_bit_for_bit_is_refused_with_the_key(
    settings: tuple[str, ...], experts: int, refused: bool
) -> None:
    run, shape = run_of(*settings), shape_of({**SHAPE, "num_experts": experts})
    broken = all_problems(run.config, run.settings, shape=shape, files=False)
    found = [one for one in broken if one.rule == "repeated-samples"]
    assert bool(found) is refused
    for one in found:
        assert "mixture of experts" in one.text
        assert one.overrides == (f"{INVARIANT}=false",)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 512),
        ({"rope_type": "default", "rope_theta": 1e6}, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
    ],
)
def test_scaled_positions_count(scaling: object, context: int) -> None:
    stated = {**SHAPE, "max_position_embeddings": 512, "rope_scaling": scaling}
    assert shape_of(stated).context == context
    assert shape_of(SHAPE).context is None


def test_more_trainer_ranks_than_cores_are_a_warning() -> None:
    found = only([cores_finding(8, 2)], "warning")
    assert "8 trainer ranks share 2 CPU core(s)" in found.what
    only([cores_finding(2, 2)], "ok")


@pytest.mark.parametrize(
    ("settings", "fate"),
    [
        ((), "dropped with a warning (data.truncation = error)"),
        (("data.truncation=left",), "they lose tokens (data.truncation = left)"),
        (("data.filter_overlong_prompts=true",), "left out (data.filter_overlong_prompts)"),
    ],
)
def test_overlong_rows_are_counted_with_what_happens_to_them(
    settings: tuple[str, ...], fate: str
) -> None:
    data = run_of("data.max_prompt_length=64", *settings).config.data
    tokens = {"a.parquet, row 0": 10, "a.parquet, row 3": 45016}
    found = only(overlong_findings(data, "data.train_files", tokens), "warning")
    assert "1 of the first 2 rows exceed data.max_prompt_length = 64" in found.what
    assert "a.parquet, row 3, 45016 tokens" in found.what
    assert fate in found.why


def test_only_overlong_rows_are_a_problem_where_they_are_not_cut() -> None:
    tokens = {"row 0": 70, "row 1": 80}
    data = run_of("data.max_prompt_length=64").config.data
    assert "70 tokens" in only(overlong_findings(data, "k", tokens), "problem").what
    cut = run_of("data.max_prompt_length=64", "data.truncation=left").config.data
    only(overlong_findings(cut, "k", tokens), "warning")


def test_the_checks_of_data_and_reward_read_a_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counting(config: RunConfig, key: str) -> tuple[PromptFiles, list[PromptRow]]:
        read.append(key)
        return open_first_rows(config, key)

    monkeypatch.setattr("sluice.doctor.finding.open_first_rows", counting)
    monkeypatch.setattr(
        "sluice.doctor.reward.try_responses",
        lambda _, pairs, enough_s: ([TrialAnswer(1.0)] * len(pairs), ""),
    )
    file = write_prompts(tmp_path / "train.parquet", prompt_rows(["a", "b"]))
    examined = run_of(f"data.train_files={file}")
    preflight(examined, lambda check: check.name in {"data", "reward"})
    assert read == ["data.train_files"]


def test_a_metric_that_no_response_has_is_found_where_tools_are_used_and_scorers_grade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sluice.doctor.reward.try_responses",
        lambda _, pairs, enough_s: ([TrialAnswer(1.0, {"acc": 1.0})] * len(pairs), ""),
    )
    own = (
        f"data.train_files={write_prompts(tmp_path / 'train.parquet', prompt_rows(['a']))}",
        "reward.custom_reward_function.path=score.py",
        "algorithm.filter_groups={enable: true, metric: accuracy}",
    )
    turns = "actor_rollout_ref.rollout.multi_turn"
    found = list(check_reward(run_of(*own, f"{turns}.enable=true", f"{turns}.tool_config_path=t")))
    assert "the scorer returned no 'accuracy'" in only(found[1:], "problem").what
    found = list(check_reward(run_of(*own, "sluice.environment.path=world.py")))
    assert [one.severity for one in found] == ["ok"]  # which may return it


def test_rows_that_the_template_refuses_are_a_problem_if_it_refuses_all(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "train.parquet", prompt_rows(["a", "b"]))
    _, rows = open_first_rows(run_of(f"data.train_files={file}").config, "data.train_files")
    refused = "messages: the chat template refused them: roles must alternate"
    found = only(template_findings([(rows[0], 5), (rows[1], refused)]), "warning")
    assert "row 1: messages: the chat template refused them" in found.what
    only(template_findings([(row, refused) for row in rows]), "problem")
    assert list(template_findings([(row, 5) for row in rows])) == []
