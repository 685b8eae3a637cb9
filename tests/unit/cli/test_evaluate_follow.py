"""`sluice eval --follow`: every checkpoint once, in order, until the run has ended."""

from __future__ import annotations

import errno
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from sluice.cli.policy.evaluate_follow import EVALUATIONS_NAME, RetainedCheckpoints, follow_run
from sluice.cli.run.evaluation import EvaluationOrder, evaluation_config
from sluice.cli.run.evaluation_origin import claim_folder
from sluice.cli.run.up import Display
from sluice.errors import CheckpointError, ConfigError, DataError
from sluice.evaluation.results import Results, read_results
from sluice.service_contract import CONFIG_NAME
from tests.support.stored_evaluation import evaluation, graded

DISPLAY = Display(Console(quiet=True))


class Run:
    """A run that has ended, with a stand-in for its evaluations."""

    def __init__(self, folder: Path, val_files: str = "") -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.orders: list[EvaluationOrder] = []
        folder.mkdir()
        rows = val_files or folder / "held_out.parquet"
        ports = "trainer: {endpoint: {port: 7001}}, reward: {endpoint: {port: 7002}}"
        text = f"data: {{val_files: {rows}}}\nsluice: {{run_dir: {folder}, {ports}}}\n"
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")

    def save(self, step: int, *, with_weights: bool = False) -> Path:
        model = self.checkpoints / f"global_step_{step}" / "actor" / "huggingface"
        model.mkdir(parents=True)
        if with_weights:
            (model / "model.safetensors").write_text(str(step), encoding="utf-8")
        return model

    def follow(self, **changed: Any) -> list[str]:
        """Follow it; return the evaluated checkpoints."""
        order = EvaluationOrder(Path(), {}, self.folder / EVALUATIONS_NAME, **changed)
        follow_run(self.folder, order, DISPLAY, self.evaluate, look_every_s=0.001)
        return [one.model.name for one in self.orders]

    def evaluate(self, order: EvaluationOrder, _: Display) -> Results:
        self.orders.append(order)
        claim_folder(order.output, evaluation_config(replace(order, model=order.output / "model")))
        return read_results(evaluation(order.output, [graded(0, 1.0)]))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_checkpoints_are_evaluated_in_the_order_of_their_steps(run: Run) -> None:
    for step in (100, 20, 3):
        run.save(step)
    (run.checkpoints / ".global_step_120.partial" / "actor").mkdir(parents=True)
    (run.checkpoints / "global_step_4" / "critic").mkdir(parents=True)
    assert run.follow() == ["global_step_3", "global_step_20", "global_step_100"]
    (first, *_) = run.orders
    assert first.benchmarks == {"held_out": run.folder / "held_out.parquet"}
    assert first.config == run.folder / CONFIG_NAME
    assert first.output == run.folder / EVALUATIONS_NAME / "global_step_3"
    page = (run.folder / EVALUATIONS_NAME / "report.html").read_text(encoding="utf-8")
    assert page.index("global_step_3<") < page.index("global_step_20<")


def test_a_run_of_adapters_is_refused_before_any_evaluation(run: Run) -> None:
    with (run.folder / CONFIG_NAME).open("a", encoding="utf-8") as config:
        config.write("actor_rollout_ref: {model: {lora_rank: 8}}\n")
    run.save(1)
    with pytest.raises(ConfigError, match=r"trains adapters .* sluice merge global_step_N OUTPUT"):
        run.follow()
    assert run.orders == []


def test_a_checkpoint_that_appears_meanwhile_is_evaluated_too(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_looks = 0

    async def active(_: Path) -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 3:
            run.save(40)  # its last act
        return num_looks < 3

    monkeypatch.setattr("sluice.cli.policy.evaluate_follow.is_active", active)
    run.save(20)
    assert run.follow() == ["global_step_20", "global_step_40"]


def test_what_was_evaluated_before_is_not_evaluated_again(run: Run) -> None:
    run.save(1)
    run.follow()
    run.save(2)
    assert run.follow() == ["global_step_1", "global_step_2"]


@pytest.mark.parametrize("changed", [{"samples_per_prompt": 4}, {"overrides": ["data.seed=7"]}])
def test_evaluations_with_other_settings_are_not_passed_over(
    run: Run, changed: dict[str, Any]
) -> None:
    run.save(1)
    run.follow()
    run.save(2)
    with pytest.raises(ConfigError, match="global_step_1: holds responses of another evaluation"):
        run.follow(**changed)
    assert len(run.orders) == 1


def test_evaluations_of_other_benchmarks_are_not_passed_over(run: Run) -> None:
    run.save(1)
    run.follow()
    order = EvaluationOrder(Path(), {"b": Path("b.parquet")}, run.folder / EVALUATIONS_NAME)
    with pytest.raises(ConfigError, match=r"sluice\.evaluation\.benchmarks = \['held_out'\]"):
        follow_run(run.folder, order, DISPLAY, run.evaluate, look_every_s=0.001)


def test_all_validation_files_are_evaluated_where_they_have_one_name(tmp_path: Path) -> None:
    files = {f"{one}-test": tmp_path / one / "test.parquet" for one in ("gsm8k", "math")}
    run = Run(tmp_path / "run", f"[{', '.join(map(str, files.values()))}]")
    run.save(1)
    run.follow()
    assert run.orders[0].benchmarks == files


def test_what_a_kill_left_of_an_evaluation_that_has_ended_is_finished_by_the_next_start(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    run.save(1, with_weights=True)
    with monkeypatch.context() as killed:
        killed.setattr("sluice.cli.policy.evaluate_follow.write_results", die)
        with pytest.raises(typer.Exit):
            run.follow()
    folder = run.folder / EVALUATIONS_NAME
    assert (folder / "global_step_1" / "model").exists()
    assert run.follow() == ["model"]
    assert not (folder / "global_step_1" / "model").exists()
    assert read_results(folder / "global_step_1").model == str(run.checkpoints / "global_step_1")
    assert (folder / "report.html").is_file()


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_left_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = run.evaluate

    def evaluate(order: EvaluationOrder, display: Display) -> Results:
        if order.model.name == "global_step_1":
            shutil.rmtree(order.model)
            raise CheckpointError("no model")
        return usual(order, display)

    monkeypatch.setattr(run, "evaluate", evaluate)
    run.save(1)
    run.save(2)
    assert run.follow() == ["global_step_2"]


def test_a_checkpoint_that_the_run_deletes_before_its_turn_is_evaluated_all_the_same(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, weights = run.evaluate, list[str]()

    def evaluate(order: EvaluationOrder, display: Display) -> Results:
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # all of them, at the first one
        weights.append((order.model / "model.safetensors").read_text(encoding="utf-8"))
        return usual(order, display)

    monkeypatch.setattr(run, "evaluate", evaluate)
    run.save(1, with_weights=True)
    run.save(2, with_weights=True)
    run.follow()
    assert weights == ["1", "2"]
    results = read_results(run.folder / EVALUATIONS_NAME / "global_step_2")
    assert results.model == str(run.checkpoints / "global_step_2")
    assert not list(run.folder.glob("evaluations/*/model")), "kept longer than needed"


def test_a_checkpoint_is_kept_while_another_one_is_evaluated(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = run.evaluate
    kept = run.folder / EVALUATIONS_NAME / "global_step_2" / "model" / "model.safetensors"

    def evaluate(order: EvaluationOrder, display: Display) -> Results:
        if order.output.name == "global_step_1":
            model = run.save(2, with_weights=True)
            until_s = time.monotonic() + 30
            while not kept.exists():
                assert time.monotonic() < until_s, "not kept"
                time.sleep(0.001)
            shutil.rmtree(model.parent.parent)
        return usual(order, display)

    monkeypatch.setattr(run, "evaluate", evaluate)
    run.save(1)
    run.follow()
    assert [one.output.name for one in run.orders] == ["global_step_1", "global_step_2"]


def test_a_kept_model_takes_no_space_where_files_can_be_linked(run: Run) -> None:
    model = run.save(1, with_weights=True)
    RetainedCheckpoints(run.checkpoints, run.folder / "out").retain_new()
    kept = run.folder / "out" / "global_step_1" / "model"
    assert (kept / "model.safetensors").samefile(model / "model.safetensors")


def test_a_model_is_copied_to_another_file_system(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    model = run.save(1, with_weights=True)
    kept = RetainedCheckpoints(run.checkpoints, run.folder / "out")
    kept.retain_new()
    assert (kept.model(1) / "model.safetensors").read_text(encoding="utf-8") == "1"
    assert kept.model(1) != model


def test_an_evaluation_that_fails_ends_with_its_exit_code(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Results:
        raise typer.Exit(3)

    monkeypatch.setattr(run, "evaluate", fail)
    run.save(1)
    with pytest.raises(typer.Exit) as ended:
        run.follow()
    assert ended.value.exit_code == 3


def test_a_run_that_ended_without_a_checkpoint_is_an_error_with_the_key(run: Run) -> None:
    with pytest.raises(DataError, match=r"set trainer\.save_freq"):
        run.follow()
