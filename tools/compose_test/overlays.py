"""A secured run with its page and Prometheus: overlays on top of compose.yaml, in containers."""

from __future__ import annotations

import http.client
import shutil
import ssl
import tempfile
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from tools.commands import output_of, succeeds
from tools.compose_test.project import TAG, Project
from tools.compose_test.scenario import RUN, Scenario
from tools.observability_test.prometheus_server import PrometheusServer
from tools.phases import PhaseError, Phases, until

PROMETHEUS_STAND_IN = f"sluice-prometheus:{TAG}"
_PROMETHEUS = "prometheus"
_REPLICAS = 2
_MEMBERS = 2 + _REPLICAS
_ANSWER_S, _BUILD_S = 60.0, 300.0
# Without TLS, without a certificate, without a token, with all of it.
_WANTED, _PAGE_WANTED = ("UNAVAILABLE", "UNAVAILABLE", "UNAUTHENTICATED", "answered"), (401, 200)
_PAGE_DATA = "/api/overview"
_DOCKERFILE = """FROM {base}
COPY prometheus /usr/local/bin/prometheus
RUN mkdir /prometheus && chown 65534 /prometheus
USER 65534
ENTRYPOINT ["prometheus"]
"""


class OverlayRun:
    """Drives a project with compose's overlays secure, dashboard and observability.

    Grafana, the collector and Jaeger have no stand-in and are not started; Prometheus has one where
    this machine has the program.

    Args:
        project: built, with the overlays and both ports in its variables.
        phases: take the seconds.
        scenario: of the project; waits for its steps.
        page_port: of the live page, on this host's loopback interface.
        prometheus_port: the same; None: no Prometheus.
    """

    def __init__(
        self,
        project: Project,
        phases: Phases,
        scenario: Scenario,
        *,
        page_port: int,
        prometheus_port: int | None,
    ) -> None:
        self._project, self._phases, self._scenario = project, phases, scenario
        self._page_port, self._prometheus_port = page_port, prometheus_port
        self.answers: tuple[str, ...] = ()
        self.page_answers: tuple[int, ...] = ()
        self.targets: dict[str, float] | None = None

    def run(self) -> None:
        """Train a step, call as a stranger, and read what Prometheus sees.

        Raises:
            CommandError, PhaseError: something did not come about.
        """
        tools = () if self._prometheus_port is None else (_PROMETHEUS,)
        self._scenario.start(_REPLICAS, "trainer", "reward", "rollout", *tools)
        with self._phases.phase("overlays: strangers are refused"):
            self.answers = self._strangers_answers()
        with self._phases.phase("overlays: the page asks for a token"):
            self.page_answers = self._page_answers()
        if self._prometheus_port is not None:
            with self._phases.phase("overlays: Prometheus scrapes all"):
                self._scrape(PrometheusServer(self._prometheus_port))

    def problems(self) -> list[str]:
        """Return what is not as it has to be."""
        found = []
        if self.answers != _WANTED:
            found.append(f"a stranger got {self.answers}, wanted: {_WANTED}")
        if self.page_answers != _PAGE_WANTED:
            found.append(f"the page answered {self.page_answers}, wanted: {_PAGE_WANTED}")
        return found

    def _strangers_answers(self) -> tuple[str, ...]:
        """Return the reward service's answers to a container of the same network."""
        script = (Path(__file__).parent / "stranger.py").read_text(encoding="utf-8")
        name = self._project.name
        volume = f"{name}_run:/runs:ro"
        # fmt: off
        text = output_of(
            "docker", "run", "--rm", "--network", f"{name}_core", "--volume", volume,
            "--entrypoint", "python", f"sluice-reward:{TAG}",
            "-c", script, "reward:7002", f"{RUN}/certs", timeout_s=_ANSWER_S,
        )
        # fmt: on
        return tuple(text.split())

    def _page_answers(self) -> tuple[int, ...]:
        """Return the HTTP status of the page's data without a token, and with a client's."""
        certificates = f"{RUN}/certs"
        context = ssl.create_default_context(
            cadata=self._project.read("trainer", f"{certificates}/ca.pem")
        )
        token = self._project.read("trainer", f"{certificates}/client.token").split()[-1]
        seen: list[int] = []

        def add_answer(headers: dict[str, str]) -> bool:
            """Call again while nothing answers: the page's process may still be starting."""
            # By the name that is in every certificate of `sluice certs`.
            page = http.client.HTTPSConnection(
                "localhost", self._page_port, context=context, timeout=_ANSWER_S
            )
            with closing(page), suppress(OSError, http.client.HTTPException):
                page.request("GET", _PAGE_DATA, headers=headers)
                seen.append(page.getresponse().status)
                return True
            return False

        for headers in ({}, {"Authorization": f"Bearer {token}"}):
            until("an answer of the page", partial(add_answer, headers), timeout_s=_ANSWER_S)
        return tuple(seen)

    def _scrape(self, server: PrometheusServer) -> None:
        def all_are_up() -> bool:
            if not server.is_ready():
                return False
            try:
                seen = server.query('up{job="sluice"}')
            except OSError:
                return False
            self.targets = {
                f"{labels['service']} {labels['instance']}": value for labels, value in seen
            }
            return len(seen) == _MEMBERS and all(value == 1 for _, value in seen)

        try:
            until("every target up", all_are_up, timeout_s=2 * _ANSWER_S, interval_s=2)
        except PhaseError as error:
            raise PhaseError(f"{error}; Prometheus sees {self.targets}") from error


def prometheus_stand_in(base: str) -> bool:
    """Make an image of this machine's own Prometheus; return whether it has one."""
    program = shutil.which(_PROMETHEUS)
    if program is None:
        return False
    with tempfile.TemporaryDirectory(prefix="sluice-prometheus-") as scratch:
        folder = Path(scratch)
        (folder / "Dockerfile").write_text(_DOCKERFILE.format(base=base), encoding="utf-8")
        shutil.copy(program, folder / _PROMETHEUS)
        output_of("docker", "build", "-t", PROMETHEUS_STAND_IN, scratch, timeout_s=_BUILD_S)
    return True


def remove_stand_in() -> None:
    """Remove its image."""
    succeeds("docker", "image", "rm", PROMETHEUS_STAND_IN, timeout_s=_ANSWER_S)
