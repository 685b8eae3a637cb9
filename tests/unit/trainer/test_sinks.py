"""Where metrics go, and the run's record."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.trainer.metrics.reporter import Reporter
from services.trainer.metrics.sinks import (
    ConsoleSink,
    JsonlSink,
    TensorBoardSink,
    open_sinks,
)
from services.trainer.reward_client import Evaluation, Example
from sluice.errors import ConfigError


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "deep" / "metrics.jsonl")
    sink.write(3, {"b": 2.0, "a": 1.5})
    text = (tmp_path / "deep" / "metrics.jsonl").read_text(encoding="utf-8")
    assert text == '{"step": 3, "a": 1.5, "b": 2.0}\n'
    sink.close()


def test_what_is_no_number_is_null_so_that_every_reader_can_parse_it(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"nan": float("nan"), "inf": float("-inf"), "one": 1.0})
    sink.close()
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    found = json.loads(text, parse_constant=pytest.fail)
    assert found == {"step": 1, "nan": None, "inf": None, "one": 1.0}


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = JsonlSink(tmp_path / "metrics.jsonl")
        sink.write(step, {})
        sink.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_the_console_gets_one_line_a_step_in_verls_form(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        ConsoleSink().write(12, {"b/two": 2.0, "a/one": 1.23456789})
    assert [record.message for record in caplog.records] == ["step:12 - a/one:1.23457 - b/two:2"]


def test_sinks_are_opened_once_each_below_the_run_folder(tmp_path: Path) -> None:
    sinks = open_sinks(["jsonl", "console", "jsonl"], tmp_path)
    assert [type(sink) for sink in sinks] == [JsonlSink, ConsoleSink]
    for sink in sinks:
        sink.close()
    assert (tmp_path / "metrics.jsonl").exists()


def test_a_missing_tensorboard_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"trainer\.logger: .* install sluice\[train\]"):
        TensorBoardSink(tmp_path)


class Kept:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.written: list[tuple[int, Mapping[str, float]]] = []
        self.is_closed = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.written.append((step, metrics))

    def close(self) -> None:
        self.is_closed = True


def test_every_sink_gets_every_step_and_is_closed(tmp_path: Path) -> None:
    sinks = [Kept(), Kept()]
    record = Reporter(sinks, tmp_path)
    record.step(1, {"m": 1.0})
    record.close()
    assert all(sink.written == [(1, {"m": 1.0})] and sink.is_closed for sink in sinks)


def test_a_validation_leaves_its_numbers_and_its_examples(tmp_path: Path) -> None:
    sink = Kept()
    examples = (Example("1 + 1 = ?", "2 ✓", "2", 1.0), Example("1 + 2 = ?", "2", "3", -1.0))
    evaluation = Evaluation({"val-core/s/acc/mean@1": 0.5}, examples, 17)
    Reporter([sink], tmp_path).evaluation(4, evaluation, 2.5)
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
    Reporter([sink], tmp_path).evaluation_failed(4, 2.5)
    assert sink.written == [(4, {"val/failed": 1.0, "timing_s/testing": 2.5})]
    assert not (tmp_path / "validation").exists()


def test_the_accounts_are_one_json_object(tmp_path: Path) -> None:
    Reporter([], tmp_path).accounts({"submitted": 3.0, "trained": 2.0})
    text = (tmp_path / "accounts.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"submitted": 3.0, "trained": 2.0}
