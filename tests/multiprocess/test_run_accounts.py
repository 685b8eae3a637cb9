"""The accounts of whole runs: every token and second is somewhere, also when a replica dies."""

from __future__ import annotations

import signal
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from sluice.algorithm.accounting import RECEIVED
from sluice.api.common.v1 import common_pb2
from sluice.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from sluice.api.trainer.v1 import trainer_pb2
from tests.support.small_run import ENDLESS, Assets, LiveRun, Record, run_to_end

MOST = 0.01
SHARES = (
    "tokens_residual_share",
    "trainer_seconds_residual_share",
    "rollout_seconds_residual_share",
)
STEPS_WITHOUT_IT = 5
TAKEN_WITHIN_S = 1.0
"""Accounts that took longer are older ones: a peer did not answer the trainer in time."""
TWO_REPLICAS = (
    "sluice.rollout.replicas=2",
    "sluice.trainer.min_replicas=2",
    "sluice.asynchrony.max_staleness=2",
)


def sums(accounts: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Total and sum of the parts of each account."""
    totals = {"tokens/": "generated_tokens", "trainer_s/": "trainer_wall_s"}
    totals["rollout_s/"] = "rollout_wall_s"
    return {
        prefix: (
            accounts[total],
            sum(value for name, value in accounts.items() if name.startswith(prefix)),
        )
        for prefix, total in totals.items()
    }


def residual_shares(accounts: dict[str, float]) -> dict[str, float]:
    """By account, computed again."""
    return {prefix: abs(total - parts) / total for prefix, (total, parts) in sums(accounts).items()}


@pytest.fixture(scope="module")
def quiet(
    small_assets: Assets, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Record, trainer_pb2.GetStatusResponse]:
    """A run with validations and a checkpoint, and its status in between."""
    seen: list[trainer_pb2.GetStatusResponse] = []

    async def look(run: LiveRun) -> None:
        await run.until_step(1)
        seen.append(await run.status())

    overrides = [*TWO_REPLICAS, "trainer.total_training_steps=30", "trainer.test_freq=10"]
    folder = tmp_path_factory.mktemp("quiet") / "run"
    record = run_to_end(small_assets, folder, [*overrides, "trainer.save_freq=30"], look)
    assert record.end.exit_code == 0, record.end
    return record, seen[0]


Quiet = tuple[Record, trainer_pb2.GetStatusResponse]


def test_a_whole_runs_tokens_and_seconds_are_all_accounted_for(quiet: Quiet) -> None:
    accounts = quiet[0].accounts
    assert max(residual_shares(accounts).values()) < MOST
    for name, computed in zip(SHARES, residual_shares(accounts).values(), strict=True):
        assert accounts[name] == pytest.approx(computed, abs=1e-9)
    assert min(accounts[f"tokens/{name}"] for name in ("trained", "evaluation")) > 0
    assert {f"tokens/{name}" for name in (*RECEIVED, "under_way")} <= accounts.keys()


def test_tokens_that_trained_are_those_of_the_batches(quiet: Quiet) -> None:
    trained = sum(step["train/trained_tokens"] for step in quiet[0].steps)
    assert quiet[0].accounts["tokens/trained"] == trained


def test_the_trainers_seconds_hold_setting_up_and_shutting_down(quiet: Quiet) -> None:
    accounts = quiet[0].accounts
    for phase in ("starting", "training", "publishing", "saving", "finished"):
        assert accounts[f"trainer_s/{phase}"] > 0


def test_the_replicas_seconds_hold_all_their_states(quiet: Quiet) -> None:
    accounts = quiet[0].accounts
    for state in ("starting", "generating", "idle", "swapping"):
        assert accounts[f"rollout_s/{state}"] > 0


def test_every_step_has_the_accounts_of_its_moment(quiet: Quiet) -> None:
    steps = quiet[0].steps
    assert all(f"accounts/{name}" in step for step in steps for name in SHARES)
    generated = [step["accounts/generated_tokens"] for step in steps]
    assert all(earlier <= later for earlier, later in pairwise(generated))
    # No row shows the tokens of an earlier one: those of its own batch have been received.
    trained = accumulate(step["train/trained_tokens"] for step in steps)
    for step, trained_by_then in zip(steps, trained, strict=True):
        accounting = {n.removeprefix("accounts/"): value for n, value in step.items()}
        assert max(residual_shares(accounting).values()) < MOST
        if accounting["tokens_age_s"] < TAKEN_WITHIN_S:
            assert accounting["tokens/trained"] + accounting["tokens/pending"] >= trained_by_then
    assert min(step["accounts/tokens_age_s"] for step in steps) < TAKEN_WITHIN_S
    for name in SHARES:
        assert max(step[f"accounts/{name}"] for step in steps) < MOST


def test_a_status_call_shows_the_accounts_while_the_run_trains(quiet: Quiet) -> None:
    accounts = dict(quiet[1].accounts)
    assert set(SHARES) <= accounts.keys()
    assert max(accounts[name] for name in SHARES) < MOST
    assert accounts["tokens_age_s"] > 0
    assert 0 < accounts["generated_tokens"] < quiet[0].accounts["generated_tokens"]


def test_tokens_of_direct_clients_have_a_part_of_their_own(
    small_assets: Assets, tmp_path: Path
) -> None:
    """Those that a client gave up on while they were generated too."""
    others: list[Any] = []
    sampled: list[float] = []

    async def generate(run: LiveRun) -> None:
        await run.until_step(1)
        (replica, *_) = (await run.status()).replicas
        async with grpc.aio.insecure_channel(replica.replica.address) as channel:
            stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
            request = rollout_pb2.GenerateRequest(
                prompt=common_pb2.PromptInput(text="1 + 1 = ?"),
                sample_indexes=range(3),
                sampling=common_pb2.SamplingParams(max_tokens=5, ignore_eos=True),
            )
            async for answer in stub.Generate(request, timeout=240):
                others.extend(answer.rollouts)
            request.sampling.max_tokens = 50
            request.stream_mode = rollout_pb2.STREAM_MODE_TOKENS

            async def reported() -> rollout_pb2.GetStatusResponse:
                return await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=240)

            async def is_given_up_in_time() -> bool:
                call = stub.Generate(request, timeout=240)
                await call.read()
                await call.read()
                call.cancel()
                return bool((await reported()).direct_unsent_tokens)

            async def is_shown() -> bool:
                counters = await reported()
                sampled[:] = [counters.direct_sent_tokens + counters.direct_unsent_tokens]
                return (await run.status()).accounts["tokens/direct_clients"] == sampled[0]

            await run.until(is_given_up_in_time, "a call that was given up with tokens unsent")
            await run.until(is_shown, "tokens of direct clients in the live accounts")
        await run.trainer.Stop(trainer_pb2.StopRequest(reason="seen enough"), timeout=240)

    record = run_to_end(small_assets, tmp_path / "run", ENDLESS, generate)
    assert record.end.exit_code == 0, record.end
    assert len(others) == 3
    assert sampled[0] > 15
    assert record.accounts["tokens/direct_clients"] == sampled[0]
    assert record.accounts["tokens_residual"] == 0


def test_a_replica_that_is_killed_takes_few_tokens_out_of_the_accounts(
    small_assets: Assets, tmp_path: Path
) -> None:
    """It reported its counters when a step began; what it sent after that only one side knows."""

    async def kill(run: LiveRun) -> None:
        # By then it has sampled more than the bound below, which the first step's tokens set.
        await run.until_step(12)
        run.send("rollout-1", signal.SIGKILL)
        await run.until_step((await run.status()).step + STEPS_WITHOUT_IT)
        await run.trainer.Stop(trainer_pb2.StopRequest(reason="seen enough"), timeout=240)

    record = run_to_end(small_assets, tmp_path / "run", [*TWO_REPLICAS, *ENDLESS], kill)
    assert record.end.exit_code == 0, record.end
    accounts = record.accounts
    shares = residual_shares(accounts)
    assert max(shares["trainer_s/"], shares["rollout_s/"]) < MOST
    generated = [step["accounts/generated_tokens"] for step in record.steps]
    max_per_step = max(later - earlier for earlier, later in pairwise([0.0, *generated]))
    assert abs(accounts["tokens_residual"]) <= max_per_step
