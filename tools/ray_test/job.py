"""A run as a job of a cluster of two nodes, submitted as the documentation describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sluice.report.run_record import read_progress
from tools.commands import output_of
from tools.launched_run import SHORT_DEADLINES, prepare_run
from tools.phases import PhaseError, Phases
from tools.ray_test.cluster import HEAD, MarkedProcesses, SimulatedCluster, is_service
from tools.ray_test.scenario import FROM_NODES, PLACES, WORKERS

_STEPS, _SUCCEEDED = 2, "SUCCEEDED"
_GONE_S, _STATUS_S = 60.0, 60.0
_SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "ray" / "submit_job.sh"
_SUBMITTED = r"Job '(raysubmit_\w+)' submitted successfully"
# "Job 'x' succeeded", "Status for job 'x': RUNNING", as the status is one of an end or not.
_STATUS = r"[Jj]ob '{job}':? (\w+)"


def run_job(
    cluster: SimulatedCluster,
    processes: MarkedProcesses,
    phases: Phases,
    folder: Path,
    deadline_s: float,
) -> tuple[dict[str, object], list[str]]:
    """Start a cluster with a job server, let it train; return Ray's status, steps and problems.

    Args:
        cluster: nothing of it runs yet; the caller stops it.
        processes: with the test's mark.
        phases: take the seconds.
        folder: for the run's files; is made here.
        deadline_s: of the job.

    Raises:
        CommandError: a node could not be started, or the job failed or did not end in time.
        PhaseError: Ray does not report the job's result.
    """
    with phases.phase("job: cluster"):
        cluster.start_head(serves_jobs=True)
        cluster.start_worker(WORKERS[0])
    with phases.phase("job: model and data"):
        sent = _prepare(folder)
    settings = (
        *FROM_NODES,
        f"sluice.run_dir={folder / 'run'}",
        "sluice.rollout.replicas=1",
        f"trainer.total_training_steps={_STEPS}",
        # Relative: found in what is sent.
        "reward.custom_reward_function.path=scorer.py",
    )
    environment = {
        **cluster.environment,
        "RAY_API_SERVER_ADDRESS": f"http://{cluster.job_server}",
        "WORKING_DIR": str(sent),
        "RESOURCES": " ".join(PLACES),
    }
    with phases.phase("job: submitted, trained, succeeded"):
        status = _submit(settings, environment, deadline_s)
    steps = len(read_progress(folder / "run").steps)
    problems = []
    if (status, steps) != (_SUCCEEDED, _STEPS):
        problems.append(f"job: {status} at step {steps}, wanted {_SUCCEEDED} at {_STEPS}")
    if left := processes.left_after(_GONE_S, is_service):
        problems.append(f"job: services that are left: {left}")
    return {"status": status, "steps": steps}, problems


def _prepare(folder: Path) -> Path:
    """Return the folder to send: configuration and reward function, without model and data."""
    sent = folder / "sent"
    sent.mkdir(parents=True)
    _, file = prepare_run(folder, "tiny", [SHORT_DEADLINES], host=HEAD)
    for one in (file, folder / "scorer.py"):
        one.rename(sent / one.name)
    return sent


def _submit(settings: tuple[str, ...], environment: Mapping[str, str], deadline_s: float) -> str:
    """Run `deploy/ray/submit_job.sh`, which ends when the job does; return Ray's status."""
    output = output_of(
        *(str(_SCRIPT), "run.yaml", *settings), timeout_s=deadline_s, environment=environment
    )
    job = _found(_SUBMITTED, output)
    output = output_of("ray", "job", "status", job, timeout_s=_STATUS_S, environment=environment)
    return _found(_STATUS.format(job=job), output).upper()


def _found(pattern: str, output: str) -> str:
    match = re.search(pattern, output)
    if match is None:
        raise PhaseError(f"Ray printed no {pattern!r}:\n{output[-2000:]}")
    return match[1]
