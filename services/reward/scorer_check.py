"""Try the configured scorer before anything expensive starts.

``python -m services.reward.scorer_check`` reads a `ScorerTrial` from standard input, grades its
rows in scorer processes under their limits, and writes a `TrialAnswer` for each row to standard
output. It exits with 1 and the reason on standard error if the scorer cannot be loaded. Launchers
run it as a process, since they do not import services.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec

from services.reward.grading.pool import running_scorer_pool
from sluice.concurrency.answers import serve_answer
from sluice.concurrency.process import exit_status
from sluice.doctor.trial import ScorerTrial, TrialAnswer
from sluice.types import Scored


async def try_rows(trial: ScorerTrial) -> list[TrialAnswer]:
    """Grade the rows, or only the first ones if grading takes long; return the answers.

    Raises:
        ConfigError: the file, function or signature is wrong; the error names it and the Python
            error.
        DeadlineError: loading takes too long.
    """
    reward = trial.reward
    one_process = msgspec.structs.replace(reward.scorer_pool, num_workers=1)
    began_s, answers = time.monotonic(), list[TrialAnswer]()
    alone = msgspec.structs.replace(reward, scorer_pool=one_process)
    async with running_scorer_pool(alone, trial.sandbox) as pool:
        for row in trial.rows:
            if answers and time.monotonic() - began_s > trial.enough_s:
                break
            (outcome,) = await pool.score([row])
            if isinstance(outcome, Scored):
                answers.append(TrialAnswer(outcome.score, outcome.metrics, outcome.prediction))
            else:
                failure = f"{outcome.kind}: {outcome.detail}"
                answers.append(TrialAnswer(failure=failure, frames=outcome.frames))
    return answers


def main() -> None:
    """Write answers to standard output, and nothing else."""
    serve_answer(ScorerTrial, lambda trial: asyncio.run(try_rows(trial)))


if __name__ == "__main__":
    sys.exit(exit_status("sluice", main))
