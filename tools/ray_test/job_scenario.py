"""A run as a job of a cluster of two nodes, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.chaos.preparation import SIZES, prepare_run
from tools.phases import Phases
from tools.ray_test.marked_processes import MarkedProcesses
from tools.ray_test.scenario import NODE, PLACES, WORKERS, is_service
from tools.ray_test.simulated_cluster import HEAD, SimulatedCluster
from tools.ray_test.submitted_job import submit_and_wait
from tools.ray_test.training import FROM_NODES

STEPS = 2
_GONE_S, _SEED = 60.0, 0
SUCCEEDED = "SUCCEEDED"


@dataclass(frozen=True, slots=True)
class JobReading:
    """What was seen: Ray's word for the job, steps trained, services that it left."""

    status: str
    steps: int
    left: dict[int, str]

    def problems(self) -> list[str]:
        """Return what is not as it has to be."""
        found = []
        if (self.status, self.steps) != (SUCCEEDED, STEPS):
            found.append(f"job: {self.status} at step {self.steps}, wanted {SUCCEEDED} at {STEPS}")
        if self.left:
            found.append(f"job: services that are left: {self.left}")
        return found


async def run_job(
    cluster: SimulatedCluster,
    processes: MarkedProcesses,
    phases: Phases,
    folder: Path,
    deadline_s: float,
) -> JobReading:
    """Start a cluster with a job server, let it train and check what is left.

    Args:
        cluster: nothing of it runs yet; the caller stops it.
        processes: with the test's mark.
        phases: take the seconds.
        folder: for the run's files; is made here.
        deadline_s: of the job.

    Raises:
        CommandError: a node could not be started, or the job failed or did not end in time.
        PhaseError: Ray does not tell what became of it.
    """
    with phases.phase("job: cluster"):
        cluster.start_head({**NODE, "CPU": 8.0, "head": 4.0}, serves_jobs=True)
        cluster.start_worker(WORKERS[0], NODE)
    with phases.phase("job: model and data"):
        sent = _prepare(folder)
    settings = (
        *FROM_NODES,
        f"sluice.run_dir={folder / 'run'}",
        "sluice.rollout.replicas=1",
        f"trainer.total_training_steps={STEPS}",
        # Relative: found in what is sent.
        "reward.custom_reward_function.path=scorer.py",
    )
    environment = {
        **cluster.environment,
        "RAY_API_SERVER_ADDRESS": f"http://{cluster.job_server}",
    }
    with phases.phase("job: submitted, trained, succeeded"):
        done = await submit_and_wait(sent, settings, PLACES, environment, deadline_s)
    return JobReading(done.status, done.steps, processes.left_after(_GONE_S, is_service))


def _prepare(folder: Path) -> Path:
    """Return the folder to send: configuration and reward function, without model and data."""
    folder.mkdir()
    _, file = prepare_run(folder, SIZES["tiny"], seed=_SEED, host=HEAD)
    sent = folder / "sent"
    sent.mkdir()
    for one in (file, folder / "scorer.py"):
        one.rename(sent / one.name)
    return sent
