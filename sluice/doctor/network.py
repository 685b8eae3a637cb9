"""Check the network: where the run's peers are, and whether fixed ports are free."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.config.addresses import advertised_host, configured_ports, is_loopback
from sluice.doctor.finding import Examined, Finding, fine, problem
from sluice.errors import ConfigError
from sluice.rpc.ports import check_bindable


def has_remote_peers(examined: Examined) -> bool:
    """Return whether services or trainer ranks of the run are meant to be on other hosts."""
    services = examined.config.sluice
    endpoints = (one.endpoint for one in (services.trainer, services.reward, services.rollout))
    hosts = {advertised_host(endpoint) for endpoint in endpoints}
    hosts.add(examined.environment.get("MASTER_ADDR", "localhost"))
    return examined.config.trainer.nnodes > 1 or not all(map(is_loopback, hosts))


def check_ports(examined: Examined) -> Iterator[Finding]:
    """Bind each fixed port for a moment; nothing listens."""
    ports = list(configured_ports(examined.config.sluice))
    free = []
    for key, host, port in ports:
        try:
            check_bindable(host, port)
            free.append(str(port))
        except ConfigError as error:
            what, _, remedy = str(error).partition("; ")
            yield problem(
                f"{key} = {port}: {what}",
                "the service that listens there refuses to start",
                f"{remedy} (`ss -ltnp` lists processes)",
            )
    if len(free) == len(ports):
        yield fine(f"free: {', '.join(free)}" if ports else "the run chooses all ports")
