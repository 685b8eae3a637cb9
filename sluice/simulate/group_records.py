"""Groups as a run recorded them: `groups.jsonl`, one object a group that ended."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sluice.errors import DataError

GROUPS_NAME = "groups.jsonl"
FILTERED_PREFIX, TRAINED = "filtered", "trained"


class GroupRecord(msgspec.Struct, frozen=True):
    """How one group ended.

    Args:
        prompt_id: unique in the run.
        key: names the prompt across visits.
        end: as `PromptEnd` has it.
        right: right samples.
        scored: graded samples.
        tokens: response length of each sample.
        version: announced when it started.
        oldest_version: of its oldest token.
        started_s: when it was admitted, a wait for a replica before its first token included;
            seconds of one clock for all times.
        generated_s: when its last sample ended.
        ended_s: when it was judged, or left the kept ones.
        replicas: who generated it.
        probes: samples drawn first; 0: all at once.
        probability: that it was drawn.
    """

    prompt_id: str
    key: str
    end: str
    right: int
    scored: int
    tokens: list[int]
    version: int | None = None
    oldest_version: int | None = None
    started_s: float | None = None
    generated_s: float | None = None
    ended_s: float | None = None
    replicas: list[str] = []
    probes: int = 0
    probability: float = 1.0


def read_groups(file: Path) -> list[GroupRecord]:
    """Reads the groups that were generated whole, in the order of their end.

    Raises:
        DataError: the file is missing, a line is no such object, or it is of a run whose strategy
            left samples or prompts out: what these would have been is in no line.
    """
    if not file.is_file():
        raise DataError(
            f"{file}: missing; the twin is fitted from the groups that the reward service records"
        )
    decoder = msgspec.json.Decoder(GroupRecord)
    found = []
    # What follows the last newline is being written.
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            record = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise DataError(
                f"{file}, line {number}: no group ({error}); remove the line"
            ) from error
        _check_all_drawn(record, f"{file}, line {number}")
        if record.scored > 0 and record.tokens and record.generated_s is not None:
            found.append(record)
    if not found:
        raise DataError(f"{file}: no group was generated whole; let the run go on for some steps")
    return found


def _check_all_drawn(record: GroupRecord, where: str) -> None:
    """A line tells of probes, or of a choice among prompts, wherever its strategy has them."""
    if record.probes > 0:
        why = (
            f"its group began with {record.probes} samples (probes: {record.probes}), and of those "
            "that ended there the rest is not known"
        )
    elif record.probability < 1.0:
        why = (
            f"its prompt was drawn with probability {record.probability:g}, and prompts that were "
            "passed by have no line"
        )
    else:
        return
    raise DataError(
        f"{where}: {why}; so this run can neither be simulated again nor say what another strategy "
        "would have done. Record a run with sluice.sampling.strategy stream or rounds"
    )
