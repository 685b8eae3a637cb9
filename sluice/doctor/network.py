"""Check the network: interfaces of collectives, fixed ports, and this machine's clock against
its peers'.
"""

from __future__ import annotations

import ctypes
import http.client
import ipaddress
import os
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

import msgspec

from sluice.config.addresses import advertised_host
from sluice.device.ascend_environment import (
    GLOO_INTERFACE_VARIABLE,
    HOST_ADDRESS_VARIABLE,
    HOST_INTERFACE_VARIABLE,
)
from sluice.doctor.files import nearest_folder
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


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """Networks, and what chooses among them.

    Attributes:
        interfaces: by name.
        environment: of the processes.
        has_remote_peers: whether some of the run's processes are on other hosts.
        has_address: whether the address in HCCL_IF_IP is one of this host's.
    """

    interfaces: Mapping[str, Interface]
    environment: Mapping[str, str]
    has_remote_peers: bool
    has_address: bool = True


def check_network(examined: Examined) -> Iterator[Finding]:
    """Collectives find their peers by one of the host's networks."""
    environment = examined.environment
    return network_findings(
        NetworkFacts(
            interfaces_of_host(),
            environment,
            has_remote_peers(examined),
            is_own_address(environment.get(HOST_ADDRESS_VARIABLE, "")),
        )
    )


def network_findings(facts: NetworkFacts) -> Iterator[Finding]:
    """What is named wrongly, or not named where it should be."""
    given = [name for name in _VARIABLES if facts.environment.get(name)]
    for name in given:
        yield _variable(facts, name, facts.environment[name])
    address = facts.environment.get(HOST_ADDRESS_VARIABLE)
    if address and not facts.has_address:
        yield problem(
            f"{HOST_ADDRESS_VARIABLE}={address} is no address of this host",
            "HCCL cannot listen there",
            "set it to this host's own address, on every host to another one",
        )
    up = [n for n, one in facts.interfaces.items() if one.is_up and not one.is_loopback]
    if not given and facts.has_remote_peers and len(up) > 1:
        yield warning(
            f"the host has several networks ({', '.join(up)}) and neither {NCCL_VARIABLE} nor "
            f"{GLOO_INTERFACE_VARIABLE} names one",
            "each host takes the first that it likes, and that may be another one on each",
            f"set both, the same way on every host: {_NAME_IT}",
        )
    elif not given:
        where = "other hosts" if facts.has_remote_peers else "this host alone"
        yield fine(f"no network is named; peers are on {where}; up: {', '.join(up) or 'none'}")


def chosen(name: str, value: str, interfaces: Mapping[str, Interface]) -> list[str]:
    """The interfaces that a variable's value stands for."""
    parts = [part for part in value.lstrip("^=").split(",") if part]
    if name in _TAKE_NAMES:
        return [one for one in interfaces if one in value.split(",")]
    is_exact = value.removeprefix("^").startswith("=")
    matching = [
        one
        for one in interfaces
        if any(one == part if is_exact else one.startswith(part) for part in parts)
    ]
    if value.startswith("^"):
        return [one for one in interfaces if one not in matching]
    return matching


def _variable(facts: NetworkFacts, name: str, value: str) -> Finding:
    found = chosen(name, value, facts.interfaces)
    up = [one for one in found if facts.interfaces[one].is_up]
    if not found:
        return problem(
            f"{name}={value}: there is no such network, only {', '.join(facts.interfaces)}",
            "collectives cannot be formed",
            f"{_NAME_IT}, or leave it out where all processes are on one host",
        )
    if not up:
        return problem(
            f"{name}={value}: {', '.join(found)} is down",
            "collectives cannot be formed",
            f"bring it up (`ip link set {found[0]} up`), or {_NAME_IT}",
        )
    if facts.has_remote_peers and all(facts.interfaces[one].is_loopback for one in up):
        return problem(
            f"{name}={value} is the loopback, and the run has peers on other hosts",
            "they would be told to connect to themselves",
            _NAME_IT,
        )
    return fine(f"{name}={value}: {', '.join(up)}")


def interfaces_of_host(system: Path = _SYSTEM) -> dict[str, Interface]:
    """Those of this host; what the system does not tell counts as up."""
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
    """Whether services or trainer ranks of the run are meant to be elsewhere."""
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


def is_own_address(address: str) -> bool:
    """Whether a socket can be bound to it here; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


_PROCESSES = Path("/proc")
_LISTENS = "0A"


def port_holder(port: int, processes: Path = _PROCESSES) -> str | None:
    """Name and number of a process that listens on it; ``None`` if it is not to be found."""
    sockets = set(_sockets(port, processes))
    if not sockets:
        return None
    for folder in processes.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if any(os.readlink(file) in sockets for file in (folder / "fd").iterdir()):
                name = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"{name}, process {folder.name}"
    return None


def _sockets(port: int, processes: Path) -> Iterator[str]:
    """As /proc names them among the files of a process."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (processes / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    yield f"socket:[{rest[5]}]"


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


# A file server keeps times to the second at worst, HTTP says no more than seconds.
LARGEST_SKEW_S, LARGEST_WITH_TLS_S = 2.0, 60.0
_TIMEOUT_S = 4.0
_REMOTE = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "weka", "9p", "fuse", "virtio")
_MOUNTS = Path("/proc/self/mounts")
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of sys/timex.h
_WHY = "log lines and traces of several hosts no longer tell what came first"


class NoHttpError(Exception):
    """An address where nobody speaks HTTP; says what came instead."""


@dataclass(frozen=True, slots=True)
class Skew:
    """How far a peer's clock is ahead of this one, seconds; negative: behind."""

    peer: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ClockFacts:
    """This machine's clock.

    Attributes:
        is_kept: whether the kernel says that a time service keeps it; ``None`` if it does not say.
        skews: against each clock that answered.
        has_remote_peers: whether the run has processes on other hosts.
        uses_tls: certificates have dates.
        speaks_no_http: what is wrong with the address of a reward model, or with its answer.
    """

    is_kept: bool | None
    skews: tuple[Skew, ...]
    has_remote_peers: bool
    uses_tls: bool
    speaks_no_http: str = ""


def check_clock(examined: Examined) -> Iterator[Finding]:
    """Asks nobody on other networks than the run's own."""
    return clock_findings(clock_facts(examined, has_remote_peers=has_remote_peers(examined)))


def clock_findings(facts: ClockFacts) -> Iterator[Finding]:
    """Skews that matter, and a clock that nobody keeps although others are compared with it."""
    for one in facts.skews:
        yield _skew(one, uses_tls=facts.uses_tls)
    if facts.speaks_no_http:
        yield warning(
            f"the reward model's clock cannot be asked for: {facts.speaks_no_http}",
            "scores are asked for over HTTP, too",
            "look at reward.reward_model.base_url, and at what listens there",
        )
    if facts.is_kept is False and facts.has_remote_peers:
        yield warning(
            "the kernel says that no time service keeps this clock",
            f"it drifts: {_WHY}",
            "start chrony or systemd-timesyncd (on the host, where this is a container)",
        )
    elif not facts.skews:
        kept = {None: "not known to be", True: "", False: "not"}[facts.is_kept]
        with_whom = "none that it could be compared with" if facts.has_remote_peers else "no peer"
        yield fine(f"this clock is {kept} kept by a time service; {with_whom}".replace("  ", " "))


def _skew(skew: Skew, *, uses_tls: bool) -> Finding:
    direction = "ahead" if skew.seconds > 0 else "behind"
    what = f"the clock of {skew.peer} is {abs(skew.seconds):.1f} s {direction}"
    if abs(skew.seconds) <= LARGEST_SKEW_S:
        return fine(f"{what}, as far as its seconds tell")
    keep = "keep both by one time service (chrony, systemd-timesyncd)"
    if uses_tls and abs(skew.seconds) > LARGEST_WITH_TLS_S:
        return problem(what, "certificates may be refused as not yet valid, or as expired", keep)
    return warning(what, _WHY, keep)


def clock_facts(examined: Examined, *, has_remote_peers: bool) -> ClockFacts:
    """Those that can be had without an account anywhere; services themselves tell no time."""
    config = examined.config
    model = config.reward.reward_model
    skews = [folder_skew(Path(config.sluice.run_dir))] if examined.has_run else []
    speaks_no_http = ""
    if model.enable and model.base_url:
        try:
            skews.append(http_skew(model.base_url))
        except NoHttpError as error:
            speaks_no_http = str(error)
    return ClockFacts(
        is_kept(),
        tuple(one for one in skews if one is not None),
        has_remote_peers,
        uses_tls=config.sluice.security.tls != "off",
        speaks_no_http=speaks_no_http,
    )


def is_kept() -> bool | None:
    """What the kernel knows of its clock (adjtimex)."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        # struct timex begins with modes, offset, freq, maxerror, esterror, status.
        timex = (ctypes.c_long * 64)()
        if library.adjtimex(ctypes.byref(timex)) < 0:
            return None
        status = ctypes.cast(ctypes.byref(timex, 5 * ctypes.sizeof(ctypes.c_long)), _INT)[0]
    except (OSError, AttributeError):
        return None
    return not status & _UNSYNCHRONISED


_INT = ctypes.POINTER(ctypes.c_int)


def folder_skew(folder: Path, mounts: Path = _MOUNTS) -> Skew | None:
    """Of the file server behind a folder, by a file that is made there and deleted."""
    there = nearest_folder(folder)
    kind = mount_kind(there, mounts)
    if not kind.startswith(_REMOTE):
        return None
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=there, prefix=".sluice-clock-") as file:
        before = time.time()
        file.write(b".")
        file.flush()
        os.fsync(file.fileno())
        middle = (before + time.time()) / 2
        return Skew(
            f"the file server of {there} ({kind})", os.fstat(file.fileno()).st_mtime - middle
        )
    return None


def mount_kind(folder: Path, mounts: Path = _MOUNTS) -> str:
    """The type of the file system that a folder, or what it links to, is on; empty if not known."""
    found = ("", "")
    with suppress(OSError, RuntimeError):  # links that lead in a circle
        folder = folder.resolve()
        for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
            _, point, kind, *_ = line.split()
            if folder.is_relative_to(point) and len(point) >= len(found[0]):
                found = point, kind
    return found[1]


def http_skew(address: str) -> Skew | None:
    """Of a server, by the Date of any answer, also of a refusal; ``None`` if there is none.

    Raises:
        NoHttpError: the address is none, or what answers there is no HTTP server.
    """
    if not address.startswith(("http://", "https://")):
        return None
    before = time.time()
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - see above
            said = answer.headers.get("Date")
    except urllib.error.HTTPError as refusal:
        said = refusal.headers.get("Date")
    except OSError:
        return None
    except (http.client.HTTPException, ValueError) as error:
        raise NoHttpError(f"{address}: {type(error).__name__}: {error}") from error
    middle = (before + time.time()) / 2
    with suppress(ValueError, TypeError):
        # The second that the header names has begun half a second ago on average.
        return Skew(address, parsedate_to_datetime(said).timestamp() + 0.5 - middle)
    return None
