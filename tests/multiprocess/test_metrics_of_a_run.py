"""What Prometheus finds in the processes of a whole run, and what they leave behind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import pytest

from sluice.api.trainer.v1 import trainer_pb2
from sluice.report.run_record import read_progress
from sluice.telemetry.metric_names import instruments
from sluice.telemetry.metrics import FOLDER
from tests.support.metric_rows import NAMES, without_row
from tests.support.scraped import PROCESS_NAMES, Page, fetch, names, parsed, targets, value
from tests.support.small_run import Assets, LiveRun, Record, run_to_end

pytest.importorskip("prometheus_client")

ON = tuple(f"sluice.{kind}.endpoint.metrics_port=0" for kind in ("trainer", "reward", "rollout"))
# Only where there is a reference or TLS, or something went wrong.
NOT_ALWAYS = {
    "sluice_trainer_reference_kl_nats",
    "sluice_rpc_errors_total",
    "sluice_quota_refusals_total",
    "sluice_certificate_end_seconds",
}
PROCESSES = {
    "trainer": "trainer",
    "reward": "reward",
    "rollout-0": "rollout",
    "rollout-1": "rollout",
}


@dataclass
class Seen:
    """Pages by process, early and late."""

    early: dict[str, Page] = field(default_factory=dict)
    late: dict[str, Page] = field(default_factory=dict)


def trained(page: Page) -> float:
    return page.get(("sluice_tokens_total", (("fate", "trained"),)), 0.0)


def sampled(page: Page) -> float:
    """Tokens by the replicas' latest heartbeats, which come after the tokens."""
    return sum(v for (name, _), v in page.items() if name == "sluice_fleet_replica_tokens_total")


def generated(page: Page) -> float:
    return page.get(("sluice_replica_generated_tokens_total", ()), 0.0)


async def scrape(run: LiveRun, into: dict[str, Page]) -> bool:
    """Read all pages; false if a busy process did not answer in its time."""
    for name, address in targets(run.run_dir).items():
        try:
            into[name] = parsed(await asyncio.to_thread(fetch, address))
        except (OSError, HTTPException):
            return False
    return True


async def something_is_trained(run: LiveRun, seen: Seen) -> bool:
    if not await scrape(run, seen.early):
        return False
    page = seen.early["trainer"]
    return trained(page) > 0 and sampled(page) > 0


async def all_is_known(run: LiveRun, seen: Seen) -> bool:
    if not await scrape(run, seen.late):
        return False
    if "sluice_rollout_demand_replicas" not in names(seen.late["reward"]):
        return False
    if trained(seen.late["trainer"]) <= trained(seen.early["trainer"]):
        return False  # the accounts are taken now and then
    if not all(generated(seen.late.get(name, {})) for name in ("rollout-0", "rollout-1")):
        return False  # a replica that was late to start has had no request yet
    serving = value(seen.late["trainer"], "sluice_fleet_replicas", state="serving")
    return serving == value(seen.late["reward"], "sluice_reward_replicas") == 2


@pytest.fixture(scope="module")
def observed(small_assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Seen]:
    seen = Seen()

    async def look(run: LiveRun) -> None:
        await run.until_step(2)
        await run.until(lambda: something_is_trained(run, seen), "tokens that were trained")
        await run.until_step(5)
        await run.until(lambda: all_is_known(run, seen), "demand, and tokens of both replicas")
        await run.trainer.Stop(trainer_pb2.StopRequest(reason="seen enough"), timeout=240)

    settings = (
        "trainer.total_training_steps=1000000",
        "trainer.val_before_train=true",
        "sluice.rollout.replicas=2",
    )
    run_dir = tmp_path_factory.mktemp("observed") / "run"
    return run_to_end(small_assets, run_dir, (*ON, *settings), look), seen


def test_every_process_tells_all_that_is_declared_for_it(
    observed: tuple[Record, Seen],
) -> None:
    record, seen = observed
    assert record.end.exit_code == 0, record.end.failures
    assert set(seen.late) == set(PROCESSES)
    for name, kind in PROCESSES.items():
        declared = {
            s for i in (*instruments()[kind], *instruments()["every process"]) for s in i.series
        }
        found = names(seen.late[name])
        assert declared - NOT_ALWAYS <= found, name
        assert found <= declared | set(PROCESS_NAMES), name


def test_metrics_jsonl_has_the_names_that_the_table_promises(
    observed: tuple[Record, Seen],
) -> None:
    run = read_progress(observed[0].run_dir)
    emitted = {name for row in (*run.steps, *run.validations) for name in row} - {"step"}
    assert without_row(emitted) == []
    always = {
        name
        for name, row in NAMES.items()
        if row.emitted == "every step" and not row.absent and "<" not in name
    }
    assert sorted(always - set(run.steps[-1])) == []


def test_counters_rise_and_agree_between_the_processes(observed: tuple[Record, Seen]) -> None:
    record, seen = observed
    early, late = seen.early["trainer"], seen.late["trainer"]
    assert trained(late) > trained(early) > 0
    assert trained(late) <= record.accounts["tokens/trained"]
    assert value(late, "sluice_trainer_steps_total") >= 5
    for page in (early, late):
        assert 0 < sampled(page) <= value(page, "sluice_fleet_tokens_total")
    fleet = value(late, "sluice_fleet_replicas", state="serving")
    assert fleet == value(seen.late["reward"], "sluice_reward_replicas") == 2


def test_phases_add_up_to_the_wall_clock(observed: tuple[Record, Seen]) -> None:
    page = observed[1].late["trainer"]
    phases = sum(v for (name, _), v in page.items() if name == "sluice_trainer_seconds_total")
    wall_s = value(page, "sluice_trainer_wall_seconds_total")
    assert phases == pytest.approx(wall_s, rel=0.05, abs=0.5)


def test_what_a_validation_found_is_in_the_metrics(observed: tuple[Record, Seen]) -> None:
    page = observed[1].late["trainer"]
    scores = [dict(labels) for name, labels in page if name == "sluice_trainer_validation_score"]
    assert {(one["variable"], one["statistic"]) for one in scores} >= {("acc", "mean@1")}


def test_targets_are_gone_after_an_ordered_end(observed: tuple[Record, Seen]) -> None:
    assert list((observed[0].run_dir / FOLDER).iterdir()) == []


def test_without_a_port_a_run_writes_no_targets(small_assets: Assets, tmp_path: Path) -> None:
    record = run_to_end(small_assets, tmp_path / "run", ("trainer.total_training_steps=1",))
    assert record.end.exit_code == 0
    assert not (record.run_dir / FOLDER).exists()
