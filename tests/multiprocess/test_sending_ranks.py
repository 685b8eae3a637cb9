"""Trainer ranks that send their own shards: what each sends, and what one costs that fails.

A trainer rank that dies or stalls in any phase of an update is named within the deadlines, and the
trainer ends.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.support.patience import LONG_S, in_time
from tests.support.steered_process import ANSWER_S
from tests.support.tiny_policy import save_model
from tests.support.trainer_ranks import end, trainer

_SHARDED = {"fsdp_config": {"dtype": "float32"}}

# The phase of rank 1, the number of the call in it, and the version that fails. Each version has a
# header and a trailer; the second one is encoded as changes.
_PHASES = {
    "before the groups form": ("form", 1, 1),
    "in front of a version": ("send", 1, 1),
    "behind its buckets": ("send", 2, 1),
    "while it compares versions": ("encode_update", 1, 2),
    "in front of the changes": ("send", 3, 2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("sending") / "model", "qwen3")


def test_each_rank_sends_its_half_and_no_other_bytes(model: Path) -> None:
    with trainer(model, 2, **_SHARDED) as ranks:
        published = ranks[0].command("publish 1")
        end(ranks)
    assert sum(published["ranks"]) == published["sent"] == published["all"]
    assert all(0.4 < sent / published["all"] < 0.6 for sent in published["ranks"])


def test_of_two_copies_only_the_first_sends(model: Path) -> None:
    layout = {"fsdp_config": {"dtype": "float32", "fsdp_size": 2}}
    with trainer(model, 4, **layout) as ranks:
        published = ranks[0].command("publish 1")
        end(ranks)
    assert len(published["ranks"]) == 2
    assert sum(published["ranks"]) == published["all"]


def test_ranks_that_hold_everything_leave_sending_to_rank_0(model: Path) -> None:
    layout = {"fsdp_config": {"dtype": "float32", "fsdp_size": 1}}
    with trainer(model, 2, **layout) as ranks:
        published = ranks[0].command("publish 1")
        end(ranks)
    assert published["ranks"] == [published["all"]]


# A rank that is killed ends its connections, one that is stopped takes a deadline.
@pytest.mark.parametrize(
    ("phase", "number"),
    [
        *((phase, signal.SIGKILL) for phase in _PHASES),
        ("before the groups form", signal.SIGSTOP),
        ("while it compares versions", signal.SIGSTOP),
    ],
)
def test_a_rank_that_fails_to_send_is_named_and_ends_the_trainer(
    phase: str, number: signal.Signals, model: Path
) -> None:
    step, call, version = _PHASES[phase]

    def attempt(sends_within_s: float) -> None:
        fault = {"fails_to_send": (step, call, int(number)), "sends_within_s": sends_within_s}
        with trainer(model, 2, sends=fault, **_SHARDED) as ranks:
            for earlier in range(1, version):
                assert ranks[0].command(f"publish {earlier}")["sent"]
            said = ranks[0].command(f"publish {version}")
            assert ranks[0].process.wait(ANSWER_S) == 3
        named = r"(WeightSyncError: weight sync with|DeadlineError:) trainer rank 1\b"
        assert re.match(named, said), said

    if number is signal.SIGSTOP:
        in_time(attempt)
    else:
        attempt(LONG_S)
