"""The table of metrics has a row for every name that is emitted or read, and no other."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from services.reward.records.statistics import SAMPLE_OUTCOMES, TokenUse
from services.rollout.engines.threaded_engine import EngineState
from services.trainer.fleet.publisher import PublishReport
from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from services.trainer.loop.run_state import RunPhase
from services.trainer.metrics.step_metrics import (
    FleetInterval,
    StepTimes,
    account_metrics,
    host_memory_metrics,
    step_metrics,
)
from sluice.algorithm.accounting import (
    RECEIVED,
    ReplicaCounters,
    run_accounts,
    with_tokens_before_restart,
)
from sluice.algorithm.validation_metrics import ValidationPrompt, validation_metrics
from sluice.telemetry.metric_names import instruments
from sluice.types import EpisodeEnd, FailureKind, Scored
from tests.support.metric_rows import NAMES, ROWS, expanded, without_row
from tests.support.source_tree import ROOT, python_files, syntax_tree
from tests.support.tiny_policy import make_batch, make_config, save_model

SECTIONS = "|".join(sorted({re.escape(name.partition("/")[0]) for name in NAMES}))
EXPORTED = {one.name for section in instruments().values() for one in section}
READERS = ("sluice", "services", "benchmarks", "tools")
PRODUCERS = ("services", "sluice/algorithm")
OTHER_PATHS = {
    *("actor/huggingface", "actor/lora_adapter", "actor/optimizer*"),
    *("actor/perf/max_memory_*_gb", "reward/trace_key"),
    *("rollout/maxUnavailable", "trainer/backoffLimit", "trainer/ranks"),
    "trainer/resources/requests/memory",
}
"""Paths of folders, verl's keys and values of the chart."""
HOLE = "\0"


def literal_part(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else HOLE


@cache
def texts(*folders: str, having: str = "") -> frozenset[str]:
    """String literals of files `having` a pattern; an f-string with `HOLE` for what it inserts."""
    found = set[str]()
    for file in python_files(*folders):
        if re.search(having, file.read_text(encoding="utf-8")):
            inner = set[ast.AST]()
            for node in ast.walk(syntax_tree(file)):
                if isinstance(node, ast.JoinedStr):
                    inner.update(node.values)
                    found.add("".join(map(literal_part, node.values)))
                elif isinstance(node, ast.Constant) and node not in inner:
                    found |= {node.value} if isinstance(node.value, str) else set()
    return frozenset(found)


def read_names(shape: str) -> set[str]:
    """Texts of this shape in code that emits or reads metrics, but for paths in charts' values."""
    written = texts(*READERS, having=rf"[\"'](?:{SECTIONS})/")
    return {text for text in written if re.fullmatch(shape, text)} - OTHER_PATHS


def is_start_of_a_name(text: str) -> bool:
    """Whether code may put a name together from this text and more."""
    start = text if text.endswith("/") else f"{text}/"
    return any(name.startswith(start) for name, row in NAMES.items() if not row.absent)


def test_no_name_has_two_rows() -> None:
    every = [name for row in ROWS for name in expanded(row.name)]
    assert [name for name, count in Counter(every).items() if count > 1] == []


def test_every_name_in_the_code_has_a_row() -> None:
    names = read_names(rf"(?:{SECTIONS})/[\w@/-]*")
    assert len(names) > 100
    assert [name for name in without_row(names) if not is_start_of_a_name(name)] == []
    shape = rf"sluice_(?:{'|'.join({name.split('_')[1] for name in EXPORTED})})_\w+"
    exported = {text for text in texts(*PRODUCERS, "sluice/rpc") if re.fullmatch(shape, text)}
    assert sorted(exported - EXPORTED) == []


def test_every_f_string_of_a_name_has_a_row() -> None:
    found = read_names(rf"(?:{SECTIONS})/[\w@/-]*{HOLE}[\w@/{HOLE}-]*")
    patterns = {text: ".+".join(map(re.escape, text.split(HOLE))) for text in found}
    assert len(patterns) > 10
    live = "\n".join(name for name, row in NAMES.items() if not row.absent)
    assert [t for t, p in patterns.items() if not re.search(f"^{p}$", live, re.MULTILINE)] == []


def test_something_emits_every_row() -> None:
    """A name is a literal, or an f-string whose insertions are texts of the code themselves.

    The accounts, scores of validations and metrics of sources have tests of their own.
    """
    code = texts(*PRODUCERS) | set(FailureKind) | set(EpisodeEnd)
    templates = [
        re.compile("(.+)".join(map(re.escape, text.split(HOLE))))
        for text in code
        if HOLE in text and re.search(r"\w", text) and not re.search(r"\s", text)
    ]

    @cache
    def is_made(text: str) -> bool:
        if text in code or f"{text}/" in code or re.fullmatch(r"<\w+>", text):
            return True
        for template in templates:
            found = template.fullmatch(text)
            if found and all(is_made(part) for part in found.groups()):
                return True
        return False

    dead = {name for name, row in NAMES.items() if not row.absent and not is_made(name)}
    tested = "accounts/|val-(core|aux)/<|(reward/)?sources/<"
    assert sorted(name for name in dead if not re.match(tested, name)) == []
    assert sorted(name for name, row in NAMES.items() if row.absent and name in code) == []


def test_something_exports_every_metric_of_prometheus() -> None:
    code = texts("services", "sluice/rpc")
    mirrored = {one.name for section in instruments().values() for one in section if one.row}
    assert sorted(EXPORTED - mirrored - code) == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_every_name_in_the_docs_has_a_row(page: Path) -> None:
    span = re.compile(rf"`((?:{SECTIONS})/[\w@/{{}},<>*-]+)`")
    every = "\n".join(NAMES)
    for written in set(span.findall(page.read_text(encoding="utf-8"))) - OTHER_PATHS:
        for name in expanded(written):
            pattern = re.sub(r"<\w+>", ".+", re.escape(name)).replace(r"\*", ".*")
            is_known = re.search(f"^{pattern}$", every, re.MULTILINE) or not without_row([name])
            assert is_known, written


def test_every_name_of_a_step_has_a_row(tmp_path: Path) -> None:
    config, batch = make_config(save_model(tmp_path)), make_batch()
    learner = Learner(config, ParallelContext(), total_steps=10).train_step(batch, 1)
    emitted = step_metrics(
        1,
        batch,
        {
            **learner,
            **host_memory_metrics(),
            **PublishReport(2, 1, 0.5, 0.1, 10, 100).metrics,
        },
        StepTimes(1.0, 2.0, 0.5, 0.25, 4.0),
        FleetInterval(400, 6.0, 2, prompt_tokens=8, reused_tokens=4, replica_busy_s=(4.0, 2.0)),
        ranks=1,
        dataset_rows=8,
    )
    assert len(emitted) > 60
    assert without_row(emitted) == []


def test_the_rows_of_the_accounts_are_those_that_are_emitted() -> None:
    fleet = ReplicaCounters(
        generated_tokens=8,
        unsent_tokens=4,
        running_tokens=2,
        wall_seconds=1.0,
        seconds_by_state=dict.fromkeys(map(str, EngineState), 0.25),
    )
    phases = dict.fromkeys(map(str, RunPhase), 1.0)
    accounts = run_accounts(fleet, dict.fromkeys(RECEIVED, 1.0), phases, 9.0)
    assert accounts.tokens is not None
    tokens = with_tokens_before_restart(accounts.tokens, 3.0)
    emitted = account_metrics(replace(accounts, tokens=tokens).as_mapping())
    assert without_row(emitted) == []
    rows = {name for name in NAMES if name.startswith("accounts/") and "<" not in name}
    assert rows <= set(emitted)


def test_every_name_of_a_validation_has_a_row() -> None:
    scores = tuple(Scored(float(i), float(i), {"acc": i}, str(i)) for i in (0, 1, 1, 0))
    found = validation_metrics([ValidationPrompt("math_dapo", scores)])
    assert found
    assert without_row(found) == []


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("train/tokens/", set(TokenUse)),
        ("reward/tokens/", {*TokenUse, "received", "pending"}),
        ("train/outcomes/", set(SAMPLE_OUTCOMES)),
        ("reward/outcomes/", set(SAMPLE_OUTCOMES)),
    ],
)
def test_a_family_by_use_or_outcome_has_a_row_for_each(family: str, values: set[str]) -> None:
    rows = {name.removeprefix(family) for name in NAMES if name.startswith(family)}
    assert rows == values


def test_a_family_of_names_is_expanded_and_checked() -> None:
    assert list(expanded("a/{b,c}/<x>")) == ["a/b/<x>", "a/c/<x>"]
    assert without_row(["train/groups_stale", "train/groups_lost"]) == ["train/groups_lost"]
