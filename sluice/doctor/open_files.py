"""How many files and sockets a process may have open."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass

from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, warning

# Libraries, logs, data files, the ledger, pipes to scorers.
_OWN = 256
# A replica: two channels, a stream a group, its rank in a transfer group.
_EACH_REPLICA = 16


@dataclass(frozen=True, slots=True)
class OpenFilesFacts:
    """`soft`: what holds; `hard`: what a process may raise it to; -1: no limit."""

    soft: int
    hard: int
    replicas: int
    client_calls: int


def check_open_files(examined: Examined) -> Iterator[Finding]:
    """The limit of this shell, which the services inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits, services = examined.config.sluice.limits, examined.config.sluice
    calls = limits.max_submit_streams + limits.max_watchers
    return open_files_findings(OpenFilesFacts(soft, hard, services.rollout.replicas, calls))


def open_files_findings(facts: OpenFilesFacts) -> Iterator[Finding]:
    """Whether it is enough for the busiest service, with all clients that it admits."""
    needed = _OWN + _EACH_REPLICA * facts.replicas + facts.client_calls
    if facts.soft == -1 or facts.soft >= needed:
        limit = "no limit" if facts.soft == -1 else facts.soft
        yield fine(f"ulimit -n: {limit}; {needed} are enough")
        return
    can_raise = facts.hard == -1 or facts.hard >= needed
    yield warning(
        f"ulimit -n is {facts.soft}, and {needed} may be needed with {facts.replicas} replicas and "
        f"{facts.client_calls} calls of clients",
        "a service that has reached it accepts no connection and opens no file",
        f"ulimit -n {needed} in the shell that starts the run"
        if can_raise
        else f"raise the hard limit to {needed} (LimitNOFILE of systemd, ulimits of a container)",
    )
