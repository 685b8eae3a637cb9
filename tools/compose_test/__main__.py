"""Run the loop in containers on this machine; `make compose-test`.

The last line printed is one JSON object: `phases` (seconds by name), `target_reached`, `scaled`
(replica counts that served a step, in order), `killed_and_recovered`, `prompts_lost`,
`page_answers` (by a secured run's dashboard, HTTP status without and with a token) and more. Exit
code 0: all is as it has to be; or there is no Docker engine and SLUICE_SKIP_WITHOUT_DOCKER=1 allows
that. Needs Python and Docker, and no package.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tools.commands import CommandError, NoProgramError, free_port
from tools.compose_test.engine import engine
from tools.compose_test.images import build, check_reward_image, remove_images
from tools.compose_test.overlays import SERVICES, WANTED_ANSWERS, page_answers
from tools.compose_test.project import TAG, Project
from tools.compose_test.scenario import Scenario
from tools.phases import PhaseError, Phases, conclude, conclude_without, say, tool_parser

ROOT = Path(__file__).resolve().parents[2]
_FAILURES = (CommandError, PhaseError)
# Of the range for benchmarks, so that it is no network that a machine is in; and not the one of a
# test before, which may have been killed and left it.
_SUBNET, _OVERLAYS_SUBNET = (f"198.{net}.{os.getpid() % 256}.0/24" for net in (18, 19))
_LEARNING_RATE = 4e-4
_COUNTS, _KILLED = (3, 1, 4), ("rollout", "reward", "trainer")


def main(arguments: Sequence[str]) -> int:
    """Run the test; return the exit code."""
    options = _parse(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has them ignored
        signal.signal(number, signal.default_int_handler)  # containers are taken down all the same
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-compose-")))
        phases = Phases()
        try:
            with phases.phase("engine"):
                say(f"engine: {stack.enter_context(engine(scratch / 'dockerd.log'))}")
        except NoProgramError as error:
            return conclude_without(error, "SLUICE_SKIP_WITHOUT_DOCKER", {})
        return _test(options, phases, scratch)


def _test(options: argparse.Namespace, phases: Phases, scratch: Path) -> int:
    settings = (
        f"trainer.total_training_steps={options.steps}",
        "trainer.save_freq=3",
        # The quickstart's own rate ends with hardly a mixed group left after 60 steps.
        f"actor_rollout_ref.actor.optim.lr={_LEARNING_RATE:g}",
    )
    variables = {"SLUICE_SETTINGS": " ".join(settings), "SLUICE_TAG": TAG}
    problems: list[str] = []
    report: dict[str, object] = {"phases": phases.seconds}
    try:
        name = f"sluice-test-{os.getpid()}"
        project = Project(ROOT, name, variables, [_network(scratch / "main.yaml", _SUBNET)])
        build(project, phases)
        check_reward_image()
        scenario = Scenario(project, phases, options.patience)
        try:
            with _taken_down(project, phases, keep=options.keep):
                _drive(scenario)
        finally:
            report |= scenario.outcome.report()
        problems += scenario.outcome.problems()
        network = _network(scratch / "overlays.yaml", _OVERLAYS_SUBNET)
        report["page_answers"] = answers = _run_overlays(phases, variables, network, options)
        if answers != WANTED_ANSWERS:
            problems.append(f"the page answered {answers}, wanted: {WANTED_ANSWERS}")
    except _FAILURES as error:
        problems.append(str(error))
    finally:
        if not options.keep:
            remove_images()
    return conclude(report, problems)


def _network(file: Path, subnet: str) -> Path:
    """Write an overlay with the project's network."""
    file.write_text(
        f"networks: {{core: {{ipam: {{config: [{{subnet: {subnet}}}]}}}}}}\n", encoding="utf-8"
    )
    return file


@contextmanager
def _taken_down(project: Project, phases: Phases, *, keep: bool) -> Iterator[None]:
    """Take the containers down after the block, and show their last lines if it failed."""
    try:
        yield
    except _FAILURES:
        for service in ("trainer", "reward", "rollout"):
            say(project.run("logs", "--no-color", "--tail=12", service))
        raise
    finally:
        if not keep:
            with phases.phase(f"{project.name}: down"):
                project.down()


def _run_overlays(
    phases: Phases, variables: dict[str, str], network: Path, options: argparse.Namespace
) -> tuple[int, ...]:
    """Train a step with the overlays; return what the page answers."""
    port = free_port()
    files = [ROOT / f"compose.{name}.yaml" for name in ("secure", "dashboard", "observability")]
    name = f"sluice-overlays-{os.getpid()}"
    variables = variables | {"SLUICE_DASHBOARD_PORT": str(port)}
    project = Project(ROOT, name, variables, [*files, network])
    with _taken_down(project, phases, keep=options.keep):
        Scenario(project, phases, options.patience, "overlays: ").start(2, *SERVICES)
        with phases.phase("overlays: the page requires a token"):
            return page_answers(project, port)


def _drive(scenario: Scenario) -> None:
    first, *others = _COUNTS
    scenario.start(first)
    for count in others:
        scenario.scale(count)
    for service in _KILLED:
        scenario.kill(service, _COUNTS[-1])
    scenario.finish()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = tool_parser(__doc__, "python -m tools.compose_test --steps 80")
    parser.add_argument("--steps", type=int, default=80, help="of training")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for each wait")
    parser.add_argument("--keep", action="store_true", help="leave containers and images")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
