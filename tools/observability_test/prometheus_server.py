"""A Prometheus with this repository's configuration, in seconds instead of minutes."""

from __future__ import annotations

import json
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.commands import free_port, started
from tools.phases import PhaseError, until

_START_S, _END_S, _ANSWER_S = 30.0, 20.0, 20.0
_INTERVAL = re.compile(
    r"\b(scrape_interval|evaluation_interval|refresh_interval|scrape_timeout): \d+s"
)
_FOR = re.compile(r"\bfor: (\d+)m\b")
_SECONDS_FOR_A_MINUTE = 4


def hurried_copy(source: Path, folder: Path, targets: Path) -> Path:
    """Copy the configuration with all intervals of 1 s and `targets` linked in.

    Alerts wait 4 s for each minute, so that one that is to come later than another still does.

    Returns:
        its ``prometheus.yml``.
    """
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("targets"))
    config, alerts = folder / "prometheus.yml", folder / "alerts.yml"
    config.write_text(_INTERVAL.sub(r"\1: 1s", config.read_text("utf-8")), "utf-8")
    alerts.write_text(_FOR.sub(_hurried, alerts.read_text("utf-8")), "utf-8")
    (folder / "targets").symlink_to(targets, target_is_directory=True)
    return config


def _hurried(minutes: re.Match[str]) -> str:
    return f"for: {int(minutes[1]) * _SECONDS_FOR_A_MINUTE}s"


class PrometheusServer:
    """A running Prometheus.

    Args:
        port: of its interface, on loopback.
    """

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        """Return whether it answers."""
        try:
            with urllib.request.urlopen(f"{self._base}/-/ready", timeout=_ANSWER_S) as answer:  # noqa: S310  HTTP
                return bool(answer.status == 200)
        except OSError:
            return False

    def query(self, expression: str) -> list[tuple[Mapping[str, str], float]]:
        """Return labels and values of an instant query.

        Raises:
            PhaseError: the expression is refused.
        """
        result = self._ask("query", {"query": expression})["result"]
        if isinstance(result, list) and result and not isinstance(result[0], dict):
            return [({}, float(result[1]))]  # a scalar
        return [(one["metric"], float(one["value"][1])) for one in result]

    def value(self, expression: str) -> float | None:
        """Return the first value of an instant query; ``None``: there is none."""
        found = self.query(expression)
        return found[0][1] if found else None

    def names(self) -> set[str]:
        """Return every metric that it has."""
        return set(self._ask("label/__name__/values", {}))

    def _ask(self, path: str, parameters: Mapping[str, str]) -> Any:  # noqa: ANN401  JSON
        url = f"{self._base}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:  # noqa: S310  HTTP
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            raise PhaseError(f"Prometheus refuses {dict(parameters)}: {text}") from error


@contextmanager
def prometheus_server(config: Path, folder: Path) -> Iterator[PrometheusServer]:
    """Run while the block does.

    Args:
        config: its ``prometheus.yml``.
        folder: for its data and its log.
    """
    port, log = free_port(), folder / "prometheus.log"
    command = (
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    server = PrometheusServer(port)
    with started(command, log, ends_within_s=_END_S) as process:
        until(
            "Prometheus",
            lambda: server.is_ready() or process.poll() is not None,
            timeout_s=_START_S,
        )
        if process.poll() is not None:
            raise PhaseError(f"Prometheus did not start:\n{log.read_text('utf-8')[-2000:]}")
        yield server
