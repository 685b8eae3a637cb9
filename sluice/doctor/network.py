"""Check the network: the interfaces of collectives, and fixed ports."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sluice.config.addresses import advertised_host
from sluice.device.ascend_environment import (
    GLOO_INTERFACE_VARIABLE,
    HOST_INTERFACE_VARIABLE,
)
from sluice.doctor.finding import Examined, Finding, fine, problem, warning
from sluice.errors import ConfigError
from sluice.rpc.ports import check_bindable

NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
# Gloo and TensorPipe take names; the others also prefixes, exact names (=) and exclusions (^).
_TAKE_NAMES = (GLOO_INTERFACE_VARIABLE, "TP_SOCKET_IFNAME")
_VARIABLES = (NCCL_VARIABLE, HOST_INTERFACE_VARIABLE, *_TAKE_NAMES)
_SYSTEM = Path("/sys/class/net")
_IS_UP, _IS_LOOPBACK = 0x1, 0x8  # IFF_UP, IFF_LOOPBACK of net/if.h
_DOWN = ("down", "lowerlayerdown", "notpresent")
_NAME_IT = "name the one that the other hosts reach (`ip addr`)"


@dataclass(frozen=True, slots=True)
class Interface:
    """A network of this host."""

    is_up: bool
    is_loopback: bool


def check_network(examined: Examined) -> Iterator[Finding]:
    """Compare variables that name networks with the networks of this host."""
    return network_findings(
        interfaces_of_host(), examined.environment, has_remote_peers=has_remote_peers(examined)
    )


def network_findings(
    interfaces: Mapping[str, Interface], environment: Mapping[str, str], *, has_remote_peers: bool
) -> Iterator[Finding]:
    """Yield names of networks that are wrong, or missing where a run needs one."""
    given = [name for name in _VARIABLES if environment.get(name)]
    for name in given:
        yield _variable(interfaces, name, environment[name], has_remote_peers=has_remote_peers)
    up = [n for n, one in interfaces.items() if one.is_up and not one.is_loopback]
    if not given and has_remote_peers and len(up) > 1:
        yield warning(
            f"the host has several networks ({', '.join(up)}) and neither {NCCL_VARIABLE} nor "
            f"{GLOO_INTERFACE_VARIABLE} names one",
            "each host takes the first that it finds, which may differ from host to host",
            f"set both, the same way on every host: {_NAME_IT}",
        )
    elif not given:
        where = "other hosts" if has_remote_peers else "this host alone"
        yield fine(f"no network is named; peers are on {where}; up: {', '.join(up) or 'none'}")


def chosen(name: str, value: str, interfaces: Mapping[str, Interface]) -> list[str]:
    """Return the interfaces that a variable's value stands for, as its library reads it."""
    if name in _TAKE_NAMES:
        return [one for one in interfaces if one in value.split(",")]
    is_exact = value.removeprefix("^").startswith("=")
    parts = [part for part in value.lstrip("^=").split(",") if part]
    matching = [
        one
        for one in interfaces
        if any(one == part if is_exact else one.startswith(part) for part in parts)
    ]
    if value.startswith("^"):
        return [one for one in interfaces if one not in matching]
    return matching


def _variable(
    interfaces: Mapping[str, Interface], name: str, value: str, *, has_remote_peers: bool
) -> Finding:
    found = chosen(name, value, interfaces)
    up = [one for one in found if interfaces[one].is_up]
    consequence, remedy = "collectives cannot be formed", _NAME_IT
    if not found:
        what = f"there is no such network, only {', '.join(interfaces)}"
        remedy = f"{_NAME_IT}, or leave it out where all processes are on one host"
    elif not up:
        what = f"{', '.join(found)} is down"
        remedy = f"bring it up (`ip link set {found[0]} up`), or {_NAME_IT}"
    elif has_remote_peers and all(interfaces[one].is_loopback for one in up):
        what = "this is the loopback, and the run has peers on other hosts"
        consequence = "they would connect to themselves"
    else:
        return fine(f"{name}={value}: {', '.join(up)}")
    return problem(f"{name}={value}: {what}", consequence, remedy)


def interfaces_of_host(system: Path = _SYSTEM) -> dict[str, Interface]:
    """Return those of this host; one whose state is unknown counts as up."""
    return {name: _interface(system / name) for _, name in socket.if_nameindex()}


def _interface(folder: Path) -> Interface:
    try:
        flags = int((folder / "flags").read_text(encoding="ascii"), 16)
        state = (folder / "operstate").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return Interface(is_up=True, is_loopback=folder.name in {"lo", "lo0"})
    is_up = bool(flags & _IS_UP) and state not in _DOWN
    return Interface(is_up, is_loopback=bool(flags & _IS_LOOPBACK))


def has_remote_peers(examined: Examined) -> bool:
    """Return whether services or trainer ranks of the run are meant to be on other hosts."""
    services = examined.config.sluice
    endpoints = (one.endpoint for one in (services.trainer, services.reward, services.rollout))
    hosts = [advertised_host(endpoint) for endpoint in endpoints]
    hosts.append(examined.environment.get("MASTER_ADDR", "localhost"))
    return examined.config.trainer.nnodes > 1 or not all(map(_is_this_host, hosts))


def _is_this_host(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_ports(examined: Examined) -> Iterator[Finding]:
    """Bind each fixed port for a moment; nothing listens."""
    ports = list(fixed_ports(examined))
    refused = False
    for key, host, port in ports:
        try:
            check_bindable(host, port)
        except ConfigError as error:
            refused = True
            what, _, remedy = str(error).partition("; ")
            why = "the service that is to listen there refuses to start"
            yield problem(f"{key} = {port}: {what}", why, f"{remedy} (`ss -ltnp` lists processes)")
    if not ports:
        yield fine("all ports are chosen when the run starts")
    elif not refused:
        yield fine(f"free: {', '.join(str(port) for _, _, port in ports)}")


def fixed_ports(examined: Examined) -> Iterator[tuple[str, str, int]]:
    """Yield key, host and port of every endpoint's port that is set, and the live page's."""
    services = examined.config.sluice
    for kind, service in (
        ("trainer", services.trainer),
        ("reward", services.reward),
        ("rollout", services.rollout),
    ):
        for name, port in msgspec.structs.asdict(service.endpoint).items():
            if name.endswith("port") and port:
                yield f"sluice.{kind}.endpoint.{name}", service.endpoint.host, port
    if services.dashboard.port:
        yield "sluice.dashboard.port", services.dashboard.host, services.dashboard.port
