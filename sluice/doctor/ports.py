"""Ports that the configuration fixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem
from sluice.doctor.port_holder import port_holder
from sluice.errors import ConfigError
from sluice.rpc.bound_socket import check_bindable


@dataclass(frozen=True, slots=True)
class PortFacts:
    """One fixed port.

    Attributes:
        key: that fixes it.
        host: interface to listen on.
        refusal: why nothing can listen there, with its remedy; empty if something can.
        holder: the process that has it, where that is known.
    """

    key: str
    host: str
    port: int
    refusal: str = ""
    holder: str | None = None


def check_ports(examined: Examined) -> Iterator[Finding]:
    """Binds each for a moment; nothing listens."""
    return port_findings(tuple(port_facts(examined)))


def port_facts(examined: Examined) -> Iterator[PortFacts]:
    """Every port of an endpoint that is set, and the live page's."""
    services = examined.config.sluice
    for kind, service in (
        ("trainer", services.trainer),
        ("reward", services.reward),
        ("rollout", services.rollout),
    ):
        for name, port in msgspec.structs.asdict(service.endpoint).items():
            if name.endswith("port") and port:
                yield _tried(f"sluice.{kind}.endpoint.{name}", service.endpoint.host, port)
    if services.dashboard.port:
        yield _tried("sluice.dashboard.port", services.dashboard.host, services.dashboard.port)


def port_findings(ports: tuple[PortFacts, ...]) -> Iterator[Finding]:
    """Those that are taken; that no two are alike is a rule of the configuration."""
    if not ports:
        yield fine("all ports are chosen when the run starts")
        return
    for one in ports:
        if one.refusal:
            what, _, remedy = one.refusal.partition("; ")
            held = f" ({one.holder})" if one.holder else ""
            why = "the service that is to listen there refuses to start"
            yield problem(f"{one.key} = {one.port}: {what}{held}", why, remedy)
    if not any(one.refusal for one in ports):
        yield fine(f"free: {', '.join(str(one.port) for one in ports)}")


def _tried(key: str, host: str, port: int) -> PortFacts:
    try:
        check_bindable(host, port)
    except ConfigError as error:
        return PortFacts(key, host, port, str(error), port_holder(port))
    return PortFacts(key, host, port)
