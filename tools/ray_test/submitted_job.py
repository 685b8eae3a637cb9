"""A run that is submitted to a cluster's job server, as the documentation describes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.commands import output_of
from tools.compose_test.run_record import read_metrics
from tools.phases import PhaseError

_SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "ray" / "submit_job.sh"
_SUBMITTED = r"Job '(raysubmit_\w+)' submitted successfully"
# "Job 'x' succeeded", "Status for job 'x': RUNNING", as the status is one of an end or not.
_STATUS = r"[Jj]ob '{job}':? (\w+)"
_ASK_S = 60.0


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The job's result: Ray's word for it, and the steps that it trained."""

    status: str
    steps: int


async def submit_and_wait(
    folder: Path,
    settings: Sequence[str],
    places: Sequence[str],
    environment: Mapping[str, str],
    deadline_s: float,
) -> JobOutcome:
    """Submit a configuration by `deploy/ray/submit_job.sh`, which ends when the job does.

    Args:
        folder: is sent to the cluster; holds ``run.yaml``.
        settings: ``key=value``, on top of it, with an absolute ``sluice.run_dir``.
        places: resources of each service.
        environment: with the job server's address, Ray's token, and a PATH to Ray's commands.
        deadline_s: most seconds until the job has ended.

    Raises:
        CommandError: it failed, or did not end in time.
        PhaseError: Ray does not tell what became of it.
    """
    said = await asyncio.to_thread(
        output_of,
        *(str(_SCRIPT), "run.yaml", *settings),
        timeout_s=deadline_s,
        environment={**environment, "WORKING_DIR": str(folder), "RESOURCES": " ".join(places)},
    )
    job = _found(_SUBMITTED, said)
    reported = await asyncio.to_thread(
        output_of, "ray", "job", "status", job, timeout_s=_ASK_S, environment=environment
    )
    return JobOutcome(_found(_STATUS.format(job=job), reported).upper(), _steps(settings))


def _steps(settings: Sequence[str]) -> int:
    (run_dir,) = (word.partition("=")[2] for word in settings if word.startswith("sluice.run_dir="))
    return read_metrics(Path(run_dir) / "metrics.jsonl").step


def _found(pattern: str, said: str) -> str:
    match = re.search(pattern, said)
    if match is None:
        raise PhaseError(f"Ray printed no {pattern!r}:\n{said[-2000:]}")
    return match[1]
