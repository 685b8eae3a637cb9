"""A scorer that forges its notes of progress fails its own samples, in time, and breaks nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.reward.grading.messages import ScorerInput
from sluice.config.schema.reward import CustomRewardFunctionConfig, ScorerPoolConfig
from sluice.types import Failed, FailureKind
from tests.support.scorer_pools import running_scorer_pool

LIMITS = ScorerPoolConfig(num_workers=1, timeout_s=1.0)
FORGER = """
import os, struct, sys, time

NOTES = {"item": (99, 0.0), "negative": (-7, 0.0), "future": (1, 1e300), "nan": (1, float("nan"))}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str not in NOTES:
        return 1.0
    os.pwrite(int(sys.argv[2]), struct.pack("<qd", *NOTES[solution_str]), 0)
    if ground_truth == "dies":
        os._exit(3)
    time.sleep(1000)
"""
ENDS = {"dies": FailureKind.SCORER_CRASH, "hangs": FailureKind.SCORER_TIMEOUT}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("note", ["item", "negative", "future", "nan"])
async def test_forged_progress_fails_the_sample_and_leaves_the_pool_at_work(
    tmp_path: Path, note: str, end: str
) -> None:
    path = tmp_path / "forger.py"
    path.write_text(FORGER)
    async with running_scorer_pool(LIMITS, CustomRewardFunctionConfig(path=str(path))) as pool:
        asked = [ScorerInput("mine", "a", end), ScorerInput("mine", note, end)]
        outcomes = await pool.score(asked)
        (after,) = await pool.score([ScorerInput("mine", "b", end)])
    assert isinstance(outcomes[1], Failed)
    assert outcomes[1].kind is ENDS[end]
    assert not isinstance(after, Failed)
