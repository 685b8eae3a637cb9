"""Runs whose length is given in epochs: they end with their data set."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.small_run import GROUPS, Assets, Record, run_to_end

NEVER_BEFORE_THE_END = 1_000_000
ROWS = 40


@pytest.fixture(scope="module")
def filtered(small_assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """One epoch that loses groups to the filter, planned for more steps than it can fill; one
    row is too long."""
    folder = tmp_path_factory.mktemp("epochs")
    rows = pq.read_table(small_assets.config.parent / "train.parquet").slice(0, ROWS)
    overlong = rows.slice(0, 1).to_pylist()
    overlong[0]["prompt"][0]["content"] += " and 1" * 200
    rows = pa.concat_tables([rows, pa.Table.from_pylist(overlong, schema=rows.schema)])
    pq.write_table(rows, folder / "short.parquet")
    return run_to_end(
        small_assets,
        folder / "run",
        [
            f"data.train_files={folder / 'short.parquet'}",
            "data.truncation=error",
            # One group at least is filtered.
            "reward.custom_reward_function.name=first_row_is_right",
            "trainer.total_training_steps=null",
            "trainer.total_epochs=1",
            f"trainer.save_freq={NEVER_BEFORE_THE_END}",
            f"trainer.test_freq={NEVER_BEFORE_THE_END}",
            "sluice.rollout.replicas=1",
        ],
    )


def test_a_filtered_run_ends_in_order_when_its_data_set_ends(filtered: Record) -> None:
    assert filtered.end.exit_code == 0, filtered.end.failures
    last = len(filtered.steps)
    assert 0 < last < ROWS // GROUPS
    log = filtered.log("trainer")
    assert f"the run ends at step {last}: the data set has ended after {last} steps" in log
    assert filtered.left_running == ()


def test_the_last_step_before_the_end_of_the_data_set_is_saved_and_validated(
    filtered: Record,
) -> None:
    last = len(filtered.steps)
    assert filtered.data(last)["step"] == last
    assert (filtered.run_dir / "validation" / f"{last}.jsonl").is_file()


def test_the_accounts_hold_every_prompt_of_the_epoch_and_the_groups_without_a_batch(
    filtered: Record,
) -> None:
    accounts = filtered.accounts
    ended = {n: c for n, c in accounts.items() if re.match("trained|filtered_|dropped_", n)}
    assert accounts["submitted"] == ROWS + 1 == sum(ended.values()) + accounts["pending"]
    assert accounts["trained"] == len(filtered.steps) * GROUPS
    assert 0 <= accounts["pending"] < GROUPS
    assert (accounts["prompts_lost"], accounts["data_exhausted"]) == (0, 1)


def test_an_overlong_row_costs_itself_alone(filtered: Record) -> None:
    assert filtered.accounts["dropped_failed"] == 1
    (reported,) = [line for line in filtered.log("reward").splitlines() if "left out" in line]
    assert f"short.parquet, row {ROWS}: prompt: " in reported
    assert "exceed data.max_prompt_length" in reported
