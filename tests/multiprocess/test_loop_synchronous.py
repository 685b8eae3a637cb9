"""Synchronous runs: they repeat bit for bit, on one rank or two, in one piece or resumed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.small_run import ENDLESS, GROUPS, Assets, LiveRun, Record, run_to_end

STEPS, RESUMED_FROM = 4, 2
SYNCHRONOUS = (
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={RESUMED_FROM}",
    "trainer.test_freq=2",
    "trainer.val_before_train=true",
    "sluice.asynchrony.max_staleness=0",
    "sluice.rollout.replicas=1",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
)
MEASURED = ("timing", "perf/", "trainer/", "rollout/", "weights/", "train/scorer", "accounts/")
_EVALUATED = "train/tokens/evaluation"


@pytest.fixture(scope="module")
def unbroken(small_assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The run that the others are compared with."""
    return run_to_end(small_assets, tmp_path_factory.mktemp("unbroken") / "run", SYNCHRONOUS)


@pytest.fixture(scope="module")
def again(small_assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The same once more."""
    return run_to_end(small_assets, tmp_path_factory.mktemp("again") / "run", SYNCHRONOUS)


def rows(record: Record) -> list[dict[str, Any]]:
    """All metrics, in order, but for those that a clock or the operating system decides."""
    text = (record.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(MEASURED)}
        for line in text.splitlines()
    ]


def weights(record: Record, step: int) -> dict[str, torch.Tensor]:
    (file,) = record.checkpoint(step).glob("actor/**/model.safetensors")
    return load_file(file)


def assert_same_bits(ours: Record, theirs: Record, step: int) -> None:
    expected, found = weights(theirs, step), weights(ours, step)
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert different == []


def test_the_run_reaches_its_last_step_and_every_sample_is_on_policy(unbroken: Record) -> None:
    assert unbroken.end.exit_code == 0, unbroken.end.failures
    assert unbroken.left_running == ()
    assert [row["training/global_step"] for row in unbroken.steps] == [1, 2, 3, 4]
    assert {row["train/staleness_max"] for row in unbroken.steps} == {0.0}
    accounts = unbroken.accounts
    assert accounts["trained"] == STEPS * GROUPS
    assert accounts["submitted"] == sum(
        count
        for name, count in accounts.items()
        if name.startswith(("trained", "filtered_", "dropped_", "pending"))
    )


def test_validation_runs_before_training_in_between_and_at_the_end(unbroken: Record) -> None:
    validated = [row["step"] for row in rows(unbroken) if "val/generated_tokens" in row]
    assert validated == [0, 2, 4]
    for step in validated:
        file = unbroken.run_dir / "validation" / f"{step}.jsonl"
        examples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        assert {example["step"] for example in examples} == {step}
        assert set(examples[0]) == {"input", "output", "gts", "score", "step"}


def test_a_repeated_run_gives_the_same_weights_bit_for_bit(unbroken: Record, again: Record) -> None:
    for step in (RESUMED_FROM, STEPS):
        assert_same_bits(again, unbroken, step)


def test_a_repeated_run_gives_the_same_metrics(unbroken: Record, again: Record) -> None:
    pairs = zip(rows(again), rows(unbroken), strict=True)
    differing = {
        name
        for ours, theirs in pairs
        for name in ours.keys() | theirs.keys()
        if ours.get(name) != theirs.get(name)
    }
    # A validation may end just before or just after the next batch is full.
    assert differing <= {_EVALUATED}
    assert sum(row.get(_EVALUATED, 0) for row in rows(again)) == sum(
        row.get(_EVALUATED, 0) for row in rows(unbroken)
    )
    assert len(rows(again)[0]) > 3


def test_weights_change_from_step_to_step(unbroken: Record) -> None:
    """Or the comparisons above would say nothing."""
    before, after = weights(unbroken, RESUMED_FROM), weights(unbroken, STEPS)
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_two_ranks_give_the_same_losses_as_one(
    unbroken: Record, small_assets: Assets, tmp_path: Path
) -> None:
    record = run_to_end(small_assets, tmp_path / "run", [*SYNCHRONOUS, "trainer.n_gpus_per_node=2"])
    assert record.end.exit_code == 0, record.end.failures
    assert record.left_running == ()
    for ours, theirs in zip(record.steps, unbroken.steps, strict=True):
        for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "critic/rewards/mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name


def test_a_resumed_run_continues_as_if_it_had_never_stopped(
    unbroken: Record, small_assets: Assets, tmp_path: Path
) -> None:
    checkpoint = unbroken.checkpoint(RESUMED_FROM)
    record = run_to_end(
        small_assets,
        tmp_path / "run",
        [
            *SYNCHRONOUS,
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={checkpoint}",
            "trainer.val_before_train=false",
        ],
    )
    assert record.end.exit_code == 0, record.end.failures
    assert "resumed from step 2" in record.log("trainer")
    assert [row["training/global_step"] for row in record.steps] == [3, 4]
    # The cursor moved: what was trained before is not sampled again.
    before, after = unbroken.data(RESUMED_FROM)["progress"], record.data(STEPS)["progress"]
    ended = [at["low_water"] + len(at["ended_above"]) for at in (before, after)]
    assert ended[1] - ended[0] >= (STEPS - RESUMED_FROM) * GROUPS
    assert after == unbroken.data(STEPS)["progress"]
    assert record.accounts["trained"] == (STEPS - RESUMED_FROM) * GROUPS
    assert_same_bits(record, unbroken, STEPS)


def test_a_trainer_that_is_asked_to_end_leaves_whole_checkpoints_and_says_so(
    small_assets: Assets, tmp_path: Path
) -> None:
    async def end_it(run: LiveRun) -> None:
        await run.until_step(2)
        run.send("trainer", signal.SIGTERM)

    record = run_to_end(
        small_assets,
        tmp_path / "run",
        [*ENDLESS, "trainer.save_freq=1"],
        end_it,
    )
    assert record.end.exit_code == 1
    (failure,) = record.end.failures
    assert failure.startswith("trainer ended with SIGTERM")
    assert "a signal ends the run before its last step; the last checkpoint stands" in failure
    assert record.left_running == ()
    folder = record.run_dir / "checkpoints"
    newest = int((folder / "latest_checkpointed_iteration.txt").read_text(encoding="ascii"))
    assert newest >= 2
    for file, size in record.data(newest)["files"].items():
        assert (record.checkpoint(newest) / file).stat().st_size == size
    assert [entry.name for entry in folder.iterdir() if entry.name.endswith(".partial")] == []
