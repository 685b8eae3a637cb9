"""A validation that outlasts steps: one of two replicas keeps its version, the other trains on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sluice.api.trainer.v1 import trainer_pb2
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.small_run import ENDLESS, Assets, LiveRun, Record, run_to_end

VALIDATED, STEPS_BESIDE, ROWS = 4, 3, 60

SCORER = """
import pathlib
import time
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    while data_source == "gated" and not pathlib.Path({gate!r}).exists():
        time.sleep(0.02)
    right = float(zlib.crc32(solution_str.encode()) & 1)
    return {{"score": right, "acc": right}}
"""


@dataclass
class Seen:
    """Replicas by state and version: while the validation ran, and after it."""

    beside: list[tuple[str, int]] = field(default_factory=list)
    policy_version: int = -1
    announced: list[tuple[int, int]] = field(default_factory=list)
    after: set[str] = field(default_factory=set)


async def hold_open(run: LiveRun, gate: Path, seen: Seen) -> None:
    """Keeps the validation of a version open for some steps, then lets it end."""
    await run.until_step(VALIDATED + STEPS_BESIDE)
    status = await run.status()
    seen.policy_version = status.policy_version
    seen.beside = sorted((r.state, r.replica.policy_version) for r in status.replicas)
    announced = await run.reward_status()
    seen.announced = sorted((r.policy_version, r.use) for r in announced.replicas)
    gate.touch()

    async def caught_up() -> bool:
        replicas = (await run.status()).replicas
        seen.after = {r.state for r in replicas}
        return (
            seen.after == {"serving"}
            and min(r.replica.policy_version for r in replicas) > VALIDATED
        )

    await run.until(caught_up, "all replicas serving a later version")
    await run.trainer.Stop(
        trainer_pb2.StopRequest(reason="seen enough", skip_validation=True), timeout=240
    )


@pytest.fixture(scope="module")
def held(small_assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Seen]:
    seen, folder = Seen(), tmp_path_factory.mktemp("held")
    gate, scorer = folder / "gate", folder / "scorer.py"
    scorer.write_text(SCORER.format(gate=str(gate)), encoding="utf-8")
    rows = [
        *prompt_rows(["0 + 1 = ?"], data_source="gated"),
        *prompt_rows([f"{number} + 1 = ?" for number in range(1, ROWS)]),
    ]
    record = run_to_end(
        small_assets,
        folder / "run",
        [
            *ENDLESS,
            f"data.val_files={write_prompts(folder / 'val.parquet', rows)}",
            f"reward.custom_reward_function.path={scorer}",
            "reward.scorer_pool.num_workers=2",
            "reward.scorer_pool.timeout_s=600",
            f"trainer.test_freq={VALIDATED}",
            "sluice.rollout.replicas=2",
            "sluice.trainer.min_replicas=2",
            "sluice.trainer.heartbeat_interval_s=0.2",
        ],
        lambda run: hold_open(run, gate, seen),
    )
    return record, seen


def test_later_versions_are_published_while_a_validation_runs(held: tuple[Record, Seen]) -> None:
    record, seen = held
    assert (record.end.exit_code, record.end.failures) == (0, ())
    assert seen.policy_version >= VALIDATED + STEPS_BESIDE
    text = (record.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    order = [(row["step"], "val/failed" in row) for row in rows]
    assert order.index((VALIDATED, True)) > order.index((VALIDATED + STEPS_BESIDE, False))


def test_one_replica_keeps_the_validated_version_and_then_catches_up(
    held: tuple[Record, Seen],
) -> None:
    seen = held[1]
    (held_state, held_version), (other_state, other_version) = seen.beside
    assert (held_state, held_version) == ("held", VALIDATED)
    assert other_state == "serving"
    assert other_version > VALIDATED
    assert seen.announced[0][0] == VALIDATED < seen.announced[1][0]
    assert seen.after == {"serving"}


def test_all_numbers_of_the_validation_are_of_its_version(held: tuple[Record, Seen]) -> None:
    record = held[0]
    text = (record.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    (row,) = (one for one in rows if "val/failed" in one and one["step"] == VALIDATED)
    assert row["val/failed"] == 0.0
    assert row["val-aux/num_prompts"] == ROWS
    assert row["val-aux/num_failed_samples"] == 0.0


def test_no_sample_is_too_old_and_none_is_lost(held: tuple[Record, Seen]) -> None:
    record = held[0]
    assert max(row["train/staleness_max"] for row in record.steps) <= 1
    assert record.accounts["prompts_lost"] == record.accounts["dropped_failed"] == 0
