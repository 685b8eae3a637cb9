"""What the benchmark of evaluations reads and compares."""

from __future__ import annotations

import json
import math
from pathlib import Path

from benchmarks.evaluation.collapse import _validations
from benchmarks.evaluation.stored import differing, largest_difference


def test_prompts_that_one_side_lacks_differ() -> None:
    assert differing({1: ["a"], 2: ["b"]}, {1: ["a"], 2: ["b"]}) == 0
    assert differing({1: ["a"], 2: ["b"]}, {1: ["c"], 3: ["b"]}) == 3


def test_no_common_metric_is_no_agreement() -> None:
    assert largest_difference({"a": 1.0, "b": 2.0}, {"a": 1.5, "c": 9.0}) == 0.5
    assert math.isnan(largest_difference({"a": 1.0}, {"b": 1.0}))


def test_a_validation_after_a_rollback_is_known_by_the_rows_before_it(tmp_path: Path) -> None:
    name = "val-core/math_dapo/acc/mean@8"
    rows = [
        {"step": 5, name: 0.9},
        {"step": 10, name: 0.1, "guards/rollbacks": 0},
        {"step": 12, "guards/rollbacks": 1},
        {"step": 15, name: 0.8, "guards/rollbacks": 1},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert _validations(tmp_path) == [(5, 0.9, 0), (10, 0.1, 0), (15, 0.8, 1)]
