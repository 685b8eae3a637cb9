"""Which recorded groups a simulation can be fitted to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.simulator.fit import fit_run
from benchmarks.simulator.group_records import GroupRecord, read_groups
from sluice.errors import DataError
from tests.unit.simulate.simulations import recorded_group

STEP = '{"step":%d,"training/global_step":%d,"timing_s/step":1,"rollout/replicas":1}\n'


def line(
    prompt: str,
    begin: float,
    *,
    instance_id: str = "x",
    end: str = "trained",
    step: int | None = None,
    seconds: float = 1.0,
) -> GroupRecord:
    """A group of two samples of 100 tokens that ended a second after these were there."""
    return recorded_group(
        prompt_id=prompt,
        key=prompt,
        end=end,
        right=int(end == "trained"),
        scored=2,
        tokens=[100, 100],
        started_s=begin,
        generated_s=begin + seconds,
        ended_s=begin + seconds + 1.0,
        replicas=["r"],
        step=step,
        instance_id=instance_id,
    )


def written(folder: Path, *records: GroupRecord) -> Path:
    file = folder / "groups.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    steps = "".join(STEP % (step, step) for step in (1, 2))
    (folder / "metrics.jsonl").write_text(steps, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    "records",
    [
        (line("a", 0.0, instance_id="x"), line("b", 1.0, instance_id="y")),
        (line("a", 0.0, step=2), line("b", 1.0, step=1)),
    ],
    ids=["the reward service", "the trainer"],
)
def test_the_record_of_a_run_that_was_restarted_is_refused(
    tmp_path: Path, records: tuple[GroupRecord, ...]
) -> None:
    with pytest.raises(DataError, match="without a restart"):
        read_groups(written(tmp_path, *records))


def test_groups_that_failed_take_time_and_do_not_come_again(tmp_path: Path) -> None:
    # a is slower than c since b, which failed, ran beside it.
    a, c = line("a", 0.0, seconds=1.5), line("c", 10.0)
    failed = line("b", 0.0, end="dropped_failed", seconds=1.5)
    written(tmp_path, a, failed, c)
    fitted = fit_run(tmp_path, slots=8, slack=1.0)
    assert [group.prompt_id for group in fitted.groups] == ["a", "c"]
    assert fitted.fleet.per_sequence_s == pytest.approx(0.0025)
    written(tmp_path, failed)
    with pytest.raises(DataError, match="no group was kept or filtered"):
        fit_run(tmp_path, slots=8, slack=1.0)
