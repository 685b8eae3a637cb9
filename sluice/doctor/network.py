"""Check the network: the interfaces of collectives, and fixed ports."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from sluice.config.addresses import advertised_host, is_loopback
from sluice.device.ascend_environment import GLOO_INTERFACE_VARIABLE, HOST_INTERFACE_VARIABLE
from sluice.doctor.finding import Examined, Finding, fine, problem, warning
from sluice.errors import ConfigError
from sluice.rpc.ports import check_bindable

NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
# Gloo and TensorPipe take names; the others also prefixes, exact names (=) and exclusions (^).
_TAKE_NAMES = (GLOO_INTERFACE_VARIABLE, "TP_SOCKET_IFNAME")
_VARIABLES = (NCCL_VARIABLE, HOST_INTERFACE_VARIABLE, *_TAKE_NAMES)
_LOOPBACK = "lo"
_DOWN = ("down", "lowerlayerdown", "notpresent")
_NAME_IT = "name the one that the other hosts reach (`ip addr`)"


def check_network(examined: Examined) -> Iterator[Finding]:
    """Compare variables that name networks with the networks of this host."""
    is_remote = has_remote_peers(examined)
    yield from network_findings(networks_up(), examined.environment, is_remote=is_remote)


def networks_up(system: Path = Path("/sys/class/net")) -> list[str]:
    """Return the networks of this host without those that are down."""
    names = [name for _, name in socket.if_nameindex()]
    states = [system / name / "operstate" for name in names]
    return [
        name
        for name, state in zip(names, states, strict=True)
        if not (state.is_file() and state.read_text(encoding="ascii").strip() in _DOWN)
    ]


def network_findings(
    interfaces: Sequence[str], environment: Mapping[str, str], *, is_remote: bool
) -> Iterator[Finding]:
    """Yield wrong names of networks, and a missing name where a run needs one.

    Args:
        interfaces: the networks of this host that are up.
        environment: variables of the run.
        is_remote: whether the run has peers on other hosts.
    """
    given = {name: environment[name] for name in _VARIABLES if environment.get(name)}
    for name, value in given.items():
        found = chosen(name, value, interfaces)
        if not found:
            what = f"no such network is up, only {', '.join(interfaces)}"
        elif is_remote and found == [_LOOPBACK]:
            what = "this is the loopback, and the run has peers on other hosts"
        else:
            yield fine(f"{name}={value}: {', '.join(found)}")
            continue
        remedy = f"{_NAME_IT}, or leave it out where all processes are on one host"
        yield problem(f"{name}={value}: {what}", "collectives cannot be formed", remedy)
    others = [name for name in interfaces if name != _LOOPBACK]
    if not given and is_remote and len(others) > 1:
        yield warning(
            f"the host has several networks ({', '.join(others)}) and neither {NCCL_VARIABLE} nor "
            f"{GLOO_INTERFACE_VARIABLE} names one",
            "each host takes the first that it finds, which may differ from host to host",
            f"set both, the same way on every host: {_NAME_IT}",
        )
    elif not given:
        where = "other hosts" if is_remote else "this host alone"
        yield fine(f"no network is named; peers are on {where}; here: {', '.join(others)}")


def chosen(name: str, value: str, interfaces: Sequence[str]) -> list[str]:
    """Return the interfaces that a variable's value names, as its library reads it."""
    if name in _TAKE_NAMES:
        return [one for one in interfaces if one in value.split(",")]
    is_exact = value.removeprefix("^").startswith("=")
    parts = tuple(part for part in value.lstrip("^=").split(",") if part)
    matching = [one for one in interfaces if (one in parts if is_exact else one.startswith(parts))]
    if value.startswith("^"):
        return [one for one in interfaces if one not in matching]
    return matching


def has_remote_peers(examined: Examined) -> bool:
    """Return whether services or trainer ranks of the run are meant to be on other hosts."""
    services = examined.config.sluice
    endpoints = (one.endpoint for one in (services.trainer, services.reward, services.rollout))
    hosts = {advertised_host(endpoint) for endpoint in endpoints}
    hosts.add(examined.environment.get("MASTER_ADDR", "localhost"))
    return examined.config.trainer.nnodes > 1 or not all(map(is_loopback, hosts))


def check_ports(examined: Examined) -> Iterator[Finding]:
    """Bind each fixed port for a moment; nothing listens."""
    ports = list(fixed_ports(examined))
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


def fixed_ports(examined: Examined) -> Iterator[tuple[str, str, int]]:
    """Yield key, host and port of every endpoint's port that is set, and the dashboard's."""
    services = examined.config.sluice
    for kind in ("trainer", "reward", "rollout"):
        endpoint = getattr(services, kind).endpoint
        for name, port in msgspec.structs.asdict(endpoint).items():
            if name.endswith("port") and port:
                yield f"sluice.{kind}.endpoint.{name}", endpoint.host, port
    if services.dashboard.port:
        yield "sluice.dashboard.port", services.dashboard.host, services.dashboard.port
