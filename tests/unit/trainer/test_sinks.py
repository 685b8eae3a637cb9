"""Metric sinks, and the run's record on disk."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from services.trainer.metrics import sinks as sinks_module
from services.trainer.metrics.sinks import (
    BackgroundSink,
    ConsoleSink,
    Example,
    JsonlSink,
    MetricSink,
    ProgressSink,
    Reporter,
    SinkTarget,
    ValidationReport,
    check_sinks,
    choose_examples,
    open_sinks,
)
from sluice.errors import ConfigError, DeadlineError
from sluice.telemetry import metric_names


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    sink = JsonlSink(SinkTarget(tmp_path / "deep"))
    sink.write(3, {"b": 2.0, "a": 1.5})
    text = (tmp_path / "deep" / "metrics.jsonl").read_text(encoding="utf-8")
    assert text == '{"step": 3, "a": 1.5, "b": 2.0}\n'
    sink.close()


def test_what_is_no_number_is_null_so_that_every_reader_can_parse_it(tmp_path: Path) -> None:
    sink = JsonlSink(SinkTarget(tmp_path))
    sink.write(1, {"nan": float("nan"), "inf": float("-inf"), "one": 1.0})
    sink.close()
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    found = json.loads(text, parse_constant=pytest.fail)
    assert found == {"step": 1, "nan": None, "inf": None, "one": 1.0}


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = JsonlSink(SinkTarget(tmp_path))
        sink.write(step, {})
        sink.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_the_console_gets_one_line_a_step_in_verls_form(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        ConsoleSink().write(12, {"b/two": 2.0, "a/one": 1.23456789})
    assert [record.message for record in caplog.records] == ["step:12 - a/one:1.23457 - b/two:2"]


def test_a_log_without_verls_lines_has_a_short_one_for_each_step_and_validation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = ProgressSink(total_steps=20)
    with caplog.at_level(logging.INFO):
        sink.write(1, {metric_names.REWARD: 0.5, metric_names.STEP_S: 2.0})
        sink.write(1, {"val-core/jars/acc/mean@4": 0.25})
        sink.write(1, {"timing_s/testing": 1.0})
    assert [record.message for record in caplog.records] == [
        "step  1/20  reward 0.500  2.0 s/step  ETA 38 s",
        "validation after step 1: accuracy 0.250",
    ]


async def test_sinks_are_opened_once_each_below_the_run_folder(tmp_path: Path) -> None:
    sinks = await open_sinks(["jsonl", "console", "jsonl"], SinkTarget(tmp_path))
    assert len(sinks) == 2
    for sink in sinks:
        sink.write(1, {"m": 1.0})
        sink.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "m": 1.0}]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "swanlab", "trackio"])
async def test_a_missing_package_is_an_error_that_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks_module, "find_spec", lambda _: None)
    extra = "train" if name == "tensorboard" else name
    with pytest.raises(ConfigError, match=rf"trainer\.logger: .*pip install 'sluice\[{extra}\]'"):
        check_sinks(["console", name])
    with pytest.raises(ConfigError, match=r"trainer\.logger"):
        await open_sinks([name], SinkTarget(tmp_path))
    check_sinks(["console", "jsonl"])


def test_a_folder_that_a_vendor_left_behind_is_not_taken_for_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb" / "offline-run").mkdir(parents=True)
    with pytest.raises(ConfigError, match="wandb needs the package wandb"):
        check_sinks(["wandb"])


def test_an_unknown_logger_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'vemlp_wandb' is unknown; choose from console, jsonl"):
        check_sinks(["vemlp_wandb"])


def test_a_torn_line_never_runs_into_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st', encoding="utf-8")
    sink = JsonlSink(SinkTarget(tmp_path))
    sink.write(2, {})
    sink.close()
    found = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert found == ['{"step": 1}', '{"st', '{"step": 2}']


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
async def test_a_full_disk_is_one_warning_and_not_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    (sink,) = await open_sinks(["jsonl"], SinkTarget(tmp_path))
    for step in range(3):
        sink.write(step, {"m": 1.0})
    sink.close()
    first, last = [record.message for record in caplog.records]
    assert "No space left" in first
    assert last == "logger jsonl: 3 writes failed"


def test_the_same_prompts_are_shown_at_every_validation() -> None:
    first = [Example(f"prompt {i}", "a", "", 0.0) for i in range(20)]
    later = [Example(f"prompt {i}", "b", "", 1.0) for i in reversed(range(20))]
    shown = [one.prompt for one in choose_examples(first, 5)]
    assert len(set(shown)) == 5
    assert shown == [one.prompt for one in choose_examples(later, 5)]
    assert shown != [f"prompt {i}" for i in range(5)]
    assert len(choose_examples(first, 50)) == 20
    assert choose_examples(first, 0) == []


class Kept:
    """A sink that keeps its writes."""

    def __init__(self) -> None:
        self.written: list[tuple[int, Mapping[str, float]]] = []
        self.is_closed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.written.append((step, metrics))

    def write_generations(self, step: int, generations: object) -> None:
        """Do nothing."""

    def close(self) -> None:
        self.is_closed = True


def test_a_sink_that_fails_warns_once_counts_and_is_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Kept):
        def write(self, step: int, metrics: Mapping[str, float]) -> None:
            raise ConnectionError("network gone")

    sink = BackgroundSink("wandb", Failing)
    for step in range(4):
        sink.write(step, {})
    sink.close()
    first, last = [record.message for record in caplog.records]
    assert "logger wandb failed" in first
    assert "network gone" in first
    assert last == "logger wandb: 4 writes failed"


def test_a_slow_sink_never_holds_up_the_loop_and_gets_all_in_order() -> None:
    released, kept = threading.Event(), Kept()

    class Slow(Kept):
        def write(self, step: int, metrics: Mapping[str, float]) -> None:
            assert released.wait(30)
            kept.write(step, metrics)

    slow = Slow()
    sink = BackgroundSink("wandb", lambda: slow)
    for step in range(50):
        sink.write(step, {"m": float(step)})
    assert kept.written == []
    released.set()
    sink.close()
    assert kept.written == [(step, {"m": float(step)}) for step in range(50)]
    assert slow.is_closed


def test_what_a_hanging_sink_leaves_is_dropped_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    released = threading.Event()

    class Hanging(Kept):
        def write(self, step: int, metrics: Mapping[str, float]) -> None:
            released.wait(30)

    sink = BackgroundSink("wandb", Hanging, close_timeout_s=0.05)
    for step in range(300):
        sink.write(step, {})
    sink.close()
    assert any("did not finish within" in record.message for record in caplog.records)
    lost = re.search(r"(\d+) writes never reached logger wandb", caplog.text)
    assert lost is not None
    assert int(lost[1]) >= 299
    released.set()


async def test_every_sink_gets_every_step_and_is_closed(tmp_path: Path) -> None:
    sinks = [Kept(), Kept()]
    record = Reporter(sinks, tmp_path)
    record.step(1, {"m": 1.0})
    await record.close()
    assert all(sink.written == [(1, {"m": 1.0})] and sink.is_closed for sink in sinks)


async def test_loggers_that_hang_are_closed_at_once_and_beside_the_loop(tmp_path: Path) -> None:
    all_closing, loop_runs = threading.Barrier(3), threading.Event()

    class Hanging(Kept):
        def close(self) -> None:
            all_closing.wait(30)
            assert loop_runs.wait(30)
            self.is_closed = True

    async def run_loop() -> None:
        await asyncio.to_thread(all_closing.wait, 30)
        loop_runs.set()

    sinks = [Hanging(), Hanging()]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Reporter(sinks, tmp_path).close())
        tasks.create_task(run_loop())
    assert [sink.is_closed for sink in sinks] == [True, True]


def remote(monkeypatch: pytest.MonkeyPatch, opening: Callable[[SinkTarget], MetricSink]) -> None:
    """Make wandb a logger that `opening` opens."""
    monkeypatch.setattr(sinks_module, "_is_installed", lambda _: True)
    module = ModuleType("wandb_sink")
    vars(module)["WandbSink"] = opening
    monkeypatch.setitem(sys.modules, "services.trainer.metrics.wandb_sink", module)


async def test_a_server_that_does_not_answer_when_it_is_opened_ends_the_start_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def hang(target: SinkTarget) -> MetricSink:
        released.wait(30)
        return Kept()

    remote(monkeypatch, hang)
    with pytest.raises(DeadlineError, match=r"logger wandb: .*remove wandb from trainer\.logger"):
        await open_sinks(["jsonl", "wandb"], SinkTarget(tmp_path), open_timeout_s=0.05)
    released.set()


async def test_a_server_that_refuses_ends_the_start_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(target: SinkTarget) -> MetricSink:
        raise PermissionError("no key")

    remote(monkeypatch, refuse)
    with pytest.raises(ConfigError, match=r"wandb cannot be opened .*no key.*remove wandb"):
        await open_sinks(["wandb"], SinkTarget(tmp_path))


async def test_a_logger_is_opened_fed_and_closed_in_one_thread_that_is_not_the_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Noting(Kept):
        def __init__(self, target: SinkTarget) -> None:
            super().__init__()
            seen.append(threading.get_ident())

        def write(self, step: int, metrics: Mapping[str, float]) -> None:
            seen.append(threading.get_ident())

        def close(self) -> None:
            seen.append(threading.get_ident())

    remote(monkeypatch, Noting)
    (sink,) = await open_sinks(["wandb"], SinkTarget(tmp_path))
    sink.write(1, {})
    sink.close()
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert seen[0] != threading.get_ident()


def test_a_record_that_cannot_be_written_is_one_warning_and_not_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "validation").write_text("in the way", encoding="utf-8")
    (tmp_path / "accounts.json").mkdir()
    sink = Kept()
    record = Reporter([sink], tmp_path)
    for step in (1, 2):
        record.validation(step, ValidationReport({"m": 0.5}, (), 1), 1.0)
    record.accounts({"submitted": 3.0})
    assert [step for step, _ in sink.written] == [1, 2]
    (reported,) = caplog.records
    assert "1.jsonl is not written; the run continues" in reported.message


def test_a_validation_leaves_its_numbers_and_its_examples(tmp_path: Path) -> None:
    sink = Kept()
    examples = (Example("1 + 1 = ?", "2 ✓", "2", 1.0), Example("1 + 2 = ?", "2", "3", -1.0))
    evaluation = ValidationReport({"val-core/s/acc/mean@1": 0.5}, examples, 17)
    Reporter([sink], tmp_path).validation(4, evaluation, 2.5)
    assert sink.written == [
        (
            4,
            {
                "val-core/s/acc/mean@1": 0.5,
                "timing_s/testing": 2.5,
                "val/failed": 0.0,
                "val/generated_tokens": 17.0,
            },
        )
    ]
    assert lines(tmp_path / "validation" / "4.jsonl") == [
        {"input": "1 + 1 = ?", "output": "2 ✓", "gts": "2", "score": 1.0, "step": 4},
        {"input": "1 + 2 = ?", "output": "2", "gts": "3", "score": -1.0, "step": 4},
    ]


def test_a_failed_validation_leaves_a_row_that_says_so(tmp_path: Path) -> None:
    sink = Kept()
    Reporter([sink], tmp_path).validation_failed(4, 2.5)
    assert sink.written == [(4, {"val/failed": 1.0, "timing_s/testing": 2.5})]
    assert not (tmp_path / "validation").exists()


def test_the_accounts_are_one_json_object(tmp_path: Path) -> None:
    Reporter([], tmp_path).accounts({"submitted": 3.0, "trained": 2.0})
    text = (tmp_path / "accounts.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"submitted": 3.0, "trained": 2.0}


def test_accounts_that_find_the_disk_full_leave_the_former_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = Reporter([], tmp_path)
    record.accounts({"submitted": 3.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
    try:
        record.accounts({"submitted": 3.0, "trainer_s/finished": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "accounts.json is not written; the run continues" in caplog.text
    text = (tmp_path / "accounts.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"submitted": 3.0}


async def test_a_logger_gets_the_settings_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[SinkTarget] = []

    def open_one(_: str, target: SinkTarget) -> MetricSink:
        opened.append(target)
        return JsonlSink(target)

    monkeypatch.setattr(sinks_module, "_open", open_one)
    kwargs = "reward.custom_reward_function.reward_kwargs"
    settings = {
        f"{kwargs}.api_key": "sk-1",
        f"{kwargs}.judges": [{"url": "a", "api_key": "sk-2"}],
        "data.seed": 1,
    }
    for sink in await open_sinks(["jsonl"], SinkTarget(tmp_path, settings=settings)):
        sink.close()
    judges = [{"url": "a", "api_key": "(hidden)"}]
    assert list(opened[0].settings.values()) == ["(hidden)", judges, 1]
