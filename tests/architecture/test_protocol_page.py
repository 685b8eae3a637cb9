"""The protocol's page says what the code does."""

from __future__ import annotations

import re

from sluice.rpc.policy import CALL_POLICIES
from tests.support.source_tree import ROOT

ROW = re.compile(r"^\| `(\w+/\w+)` \| [^|]+ \| (\d+) \| (\d+) \| ([^|]+) \|$", re.MULTILINE)
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


def test_the_table_of_deadlines_is_the_one_in_the_code() -> None:
    written = {
        name: (float(deadline), int(tries)) for name, deadline, tries, _ in ROW.findall(PAGE)
    }
    assert written == {
        name: (policy.deadline_s, policy.attempts) for name, policy in CALL_POLICIES.items()
    }


def test_what_enters_a_collective_is_never_repeated() -> None:
    repeats = {name: rule.strip() for name, _, _, rule in ROW.findall(PAGE)}
    collective = {name for name, rule in repeats.items() if "collective" in rule}
    assert collective == {"WeightSyncService/JoinGroup", "WeightSyncService/StageUpdate"}
    assert all(CALL_POLICIES[name].attempts == 1 for name in collective)
