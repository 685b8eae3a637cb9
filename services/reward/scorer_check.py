"""Try what grades responses, before anything expensive starts.

``python -m services.reward.scorer_check`` reads a `ScorerTrial` from standard input, grades its
rows in scorer processes under their limits, and writes a `TrialAnswer` for each row to standard
output. It ends with 1 and the reason on standard error if the scorer cannot be loaded. Launchers,
which do not import services, start it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence

import msgspec

from services.reward.grading.messages import ScorerInput
from services.reward.grading.pool import running_scorer_pool
from sluice.concurrency.process import exit_status
from sluice.config.schema.reward import RewardConfig
from sluice.types import Scored

# A row after this is not graded any more.
ENOUGH_S = 20.0


class ScorerTrial(msgspec.Struct, frozen=True):
    """The configured grading, and what to try it on; without rows it is only loaded."""

    reward: RewardConfig
    rows: list[ScorerInput] = []


class TrialAnswer(msgspec.Struct, frozen=True):
    """The outcome of a row: the score, or why there is none, with the last frames."""

    score: float | None = None
    failure: str = ""
    frames: tuple[str, ...] = ()


async def tried(reward: RewardConfig, rows: Sequence[ScorerInput]) -> list[TrialAnswer]:
    """Return what becomes of the rows, or of the first of them if grading takes long.

    Raises:
        ConfigError: file, function or signature are wrong; names them and the Python error.
        DeadlineError: loading takes too long.
    """
    one_process = msgspec.structs.replace(reward.scorer_pool, num_workers=1)
    began_s, answers = time.monotonic(), list[TrialAnswer]()
    async with running_scorer_pool(
        one_process, reward.custom_reward_function, reward.scorer_routes
    ) as pool:
        for row in rows:
            if answers and time.monotonic() - began_s > ENOUGH_S:
                break
            (outcome,) = await pool.score([row])
            if isinstance(outcome, Scored):
                answers.append(TrialAnswer(outcome.score))
            else:
                failure = f"{outcome.kind}: {outcome.detail}"
                answers.append(TrialAnswer(None, failure, outcome.frames))
    return answers


def main() -> None:
    """Answer on standard output; nothing else gets there."""
    trial = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ScorerTrial)
    answer = os.dup(1)
    os.dup2(2, 1)  # scorers print
    content = msgspec.msgpack.encode(asyncio.run(tried(trial.reward, trial.rows)))
    with os.fdopen(answer, "wb") as stream:
        stream.write(content)


if __name__ == "__main__":
    sys.exit(exit_status("sluice", main))
