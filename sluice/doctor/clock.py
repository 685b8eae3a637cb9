"""This machine's clock against those that it meets: time service, file server, reward model."""

from __future__ import annotations

import ctypes
import http.client
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from sluice.doctor.disk_space import nearest_folder
from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem, warning
from sluice.doctor.network_interfaces import has_remote_peers

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
