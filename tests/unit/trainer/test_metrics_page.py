"""Every metric that is emitted stands in the metrics page, once."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.rollout.engines.threaded_engine import EngineState
from services.trainer.learner.ranks.parallel import SingleProcess
from services.trainer.learner.worker import Learner
from services.trainer.loop.run_state import RunPhase
from services.trainer.metrics.step_metrics import (
    FleetInterval,
    RunScale,
    StepTimes,
    account_metrics,
    balance_metrics,
    rank_cut,
    step_metrics,
)
from services.trainer.telemetry import memory_metrics
from sluice.algorithm.accounting import RECEIVED, ReplicaCounters, run_accounts
from sluice.algorithm.validation_metrics import ValidationPrompt, validation_metrics
from sluice.device.cpu import CpuDevice
from sluice.types import Scored
from tests.support.source_tree import ROOT
from tests.support.tiny_policy import make_batch, make_config, save_model

PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
SECTIONS = (
    "accounts|actor|adpo|critic|gdpo|global_seqlen|perf|prompt_length|response|response_length|"
    "response_length_non_aborted|reward|rollout|rollout_corr|sampling|timing_per_token_ms|timing_s|"
    "train|trainer|training|val|val-aux|val-core|weights"
)
NAME = re.compile(rf"(?:{SECTIONS})/[\w@/-]+")
# What the code puts together from parts that end here.
PREFIXES = ("critic/score", "critic/rewards", "critic/advantages", "critic/returns")
EMITTING = ("sluice/algorithm", "services/trainer", "services/reward")


def expanded(template: str) -> Iterator[str]:
    parts = re.split(r"\{([^}]*)\}", template)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ("".join(chosen) for chosen in itertools.product(*choices))


def documented() -> list[str]:
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    templates = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    return [name for template in templates for name in expanded(template)]


PATTERNS = [re.compile(re.sub(r"<\w+>", ".+", re.escape(name))) for name in documented()]


def is_documented(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in PATTERNS)


def literals(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_name_stands_in_the_page_twice() -> None:
    assert [name for name, count in Counter(documented()).items() if count > 1] == []


def test_every_name_of_a_step_is_in_the_page(tmp_path: Path) -> None:
    config, batch = make_config(save_model(tmp_path)), make_batch()
    learner = Learner(config, SingleProcess(), total_steps=10).train_step(batch, 1)
    emitted = step_metrics(
        1,
        batch,
        {
            **learner,
            **balance_metrics(batch, 1, rank_cut(config, 1)),
            **memory_metrics(CpuDevice().torch_device),
        },
        StepTimes(1.0, 2.0, 0.5, 0.25, 4.0),
        FleetInterval(400, 6.0, 2),
        scale=RunScale(ranks=1, dataset_rows=8),
        stall_s=0.1,
    )
    assert len(emitted) > 60
    assert [name for name in emitted if not is_documented(name)] == []


def test_every_name_of_the_accounts_is_in_the_page() -> None:
    fleet = ReplicaCounters(
        generated_tokens=8,
        unsent_tokens=4,
        running_tokens=2,
        wall_seconds=1.0,
        seconds_by_state=dict.fromkeys(map(str, EngineState), 0.25),
    )
    phases = dict.fromkeys(map(str, RunPhase), 1.0)
    accounting = run_accounts(fleet, dict.fromkeys(RECEIVED, 1.0), phases, 9.0)
    emitted = account_metrics(accounting.as_mapping())
    assert len(emitted) == len(RECEIVED) + 2 + len(RunPhase) + len(EngineState) + 3 * 3 + 2
    assert [name for name in emitted if not is_documented(name)] == []


def test_every_name_of_a_validation_is_in_the_page() -> None:
    scores = tuple(Scored(float(i), float(i), {"acc": i}, str(i)) for i in (0, 1, 1, 0))
    found = validation_metrics([ValidationPrompt("math_dapo", scores)])
    assert found
    assert [name for name in found if not is_documented(name)] == []


@pytest.mark.parametrize("folder", EMITTING)
def test_every_name_written_in_the_code_is_in_the_page(folder: str) -> None:
    written = {text for file in (ROOT / folder).rglob("*.py") for text in literals(file)} - set(
        PREFIXES
    )
    names = {text for text in written if NAME.fullmatch(text) and not text.endswith("/")}
    assert names
    assert sorted(name for name in names if not is_documented(name)) == []
