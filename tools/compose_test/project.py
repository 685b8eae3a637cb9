"""A project of Compose, through either of its two clients."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.commands import CommandError, output_of, succeeds

_SHORT_S = 120.0
TAG = "compose-test"  # of the images


@dataclass(frozen=True, slots=True)
class ContainerState:
    """A container's state in the engine. `pid` is 0 while it does not run."""

    service: str
    status: str
    health: str
    exit_code: int
    pid: int
    restarts: int

    @property
    def is_healthy(self) -> bool:
        """Whether it runs and its health check passes."""
        return self.status == "running" and self.health == "healthy"


def _client() -> tuple[str, ...]:
    """Return the words that a command of Compose begins with.

    Raises:
        CommandError: there is no client.
    """
    for words in (("docker", "compose"), ("docker-compose",)):
        if succeeds(*words, "version", timeout_s=_SHORT_S):
            return words
    raise CommandError("neither `docker compose` nor docker-compose is installed")


class Project:
    """One project with its files and variables.

    Args:
        folder: of compose.yaml.
        name: the project's.
        variables: for the files.
        overlays: further files, on top of compose.yaml.
    """

    def __init__(
        self, folder: Path, name: str, variables: dict[str, str], overlays: Sequence[Path] = ()
    ) -> None:
        self.folder, self.name = folder, name
        self._client = _client()
        files = [str(folder / "compose.yaml"), *map(str, overlays)]
        self._files = [word for file in files for word in ("-f", file)]
        self._environment = {
            **variables,
            "COMPOSE_PROJECT_NAME": name,
            # docker-compose 1.29 builds with the older builder by default.
            "COMPOSE_DOCKER_CLI_BUILD": "1",
        }
        if _has_buildkit():
            self._environment["DOCKER_BUILDKIT"] = "1"

    def run(self, *arguments: str, timeout_s: float = _SHORT_S) -> str:
        """Run a command of Compose and return what it prints."""
        return output_of(
            *self._client,
            *self._files,
            *arguments,
            timeout_s=timeout_s,
            environment=self._environment,
            folder=self.folder,
        )

    def containers(self, service: str | None = None) -> dict[str, ContainerState]:
        """Return state by id of all containers of a service, or of all services."""
        of_project = f"label=com.docker.compose.project={self.name}"
        listed = output_of("docker", "ps", "-aq", "--filter", of_project, timeout_s=_SHORT_S)
        if not (ids := listed.split()):
            return {}
        try:
            found = json.loads(output_of("docker", "inspect", *ids, timeout_s=_SHORT_S))
        except CommandError:  # one of them was removed meanwhile
            return self.containers(service)
        states = {str(one["Id"]): _state(one) for one in found}
        return {i: s for i, s in states.items() if service in (None, s.service)}

    def kill(self, container: str) -> None:
        """Send SIGKILL to the container's first process, as its death: `docker kill` is a stop."""
        pid = self.containers()[container].pid
        if sys.platform.startswith("linux") and os.geteuid() == 0 and Path(f"/proc/{pid}").is_dir():
            os.kill(pid, signal.SIGKILL)
            return
        # Without the right to do that: all processes but the first, which follows them.
        succeeds("docker", "exec", container, "sh", "-c", "kill -9 -1", timeout_s=_SHORT_S)

    def copy_out(self, path: str, target: Path) -> bool:
        """Copy a file of the run's volume, through the trainer; return whether it was there."""
        trainer = next(iter(self.containers("trainer")), "")
        source = f"{trainer}:{path}"
        return bool(trainer) and succeeds("docker", "cp", source, str(target), timeout_s=_SHORT_S)

    def read(self, service: str, path: str) -> str:
        """Return a text file as the first container of a service sees it."""
        container = next(iter(self.containers(service)), "")
        return output_of("docker", "exec", container, "cat", path, timeout_s=_SHORT_S)

    def down(self) -> None:
        """Take containers, network and volumes down."""
        self.run("down", "-v", "--remove-orphans", "--timeout", "40", timeout_s=300)


def _state(found: dict[str, Any]) -> ContainerState:
    state, labels = found["State"], found["Config"]["Labels"] or {}
    return ContainerState(
        service=labels.get("com.docker.compose.service", ""),
        status=state["Status"],
        health=(state.get("Health") or {}).get("Status", "none"),
        exit_code=state["ExitCode"],
        pid=state["Pid"],
        restarts=found["RestartCount"],
    )


def _has_buildkit() -> bool:
    """Return whether BuildKit is there; clients since 23 need a plugin, older ones have it."""
    if succeeds("docker", "buildx", "version", timeout_s=_SHORT_S):
        return True
    version = output_of("docker", "version", "--format", "{{.Client.Version}}", timeout_s=_SHORT_S)
    return int(version.split(".")[0]) < 23
