"""TLS files and tokens of the run: there, matching, not about to expire, and secret."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from sluice.config.run import RunConfig
from sluice.config.security_checks import KEY, exposed_secrets, run_security_problems
from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem, problem_of_sentence, warning
from sluice.doctor.network_interfaces import has_remote_peers
from sluice.security.certificate_dates import SOON, validities

_DAY = "%Y-%m-%d %H:%M UTC"


@dataclass(frozen=True, slots=True)
class SecurityFacts:
    """What secures the run.

    Attributes:
        tls: as configured.
        has_tokens: whether callers need one.
        sentences: what keeps it from being secured so, each with its remedy.
        exposed: secrets that others on this machine can read, likewise.
        ends: by field, when certificates end: of a chain (`cert_file`) the first, of CAs each.
        now: to compare with.
        has_remote_peers: whether services are on other hosts.
    """

    tls: str
    has_tokens: bool
    sentences: tuple[str, ...] = ()
    exposed: tuple[str, ...] = ()
    ends: Mapping[str, tuple[datetime, ...]] = field(default_factory=dict)
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    has_remote_peers: bool = False


def check_certificates(examined: Examined) -> Iterator[Finding]:
    """As peers will see them, by a handshake in memory; and their dates."""
    config = examined.config
    sentences = tuple(run_security_problems(config))
    yield from security_findings(
        SecurityFacts(
            config.sluice.security.tls,
            config.sluice.security.token_file is not None,
            sentences,
            () if sentences else tuple(exposed_secrets(config.sluice.security)),
            dict(_ends(config)),
            has_remote_peers=has_remote_peers(examined),
        )
    )


def security_findings(facts: SecurityFacts) -> Iterator[Finding]:
    """What peers would refuse, now or soon, and what is open to others."""
    for sentence in facts.sentences:
        yield problem_of_sentence(sentence, "services refuse to start, or refuse each other")
    for sentence in facts.exposed:
        what, _, remedy = sentence.rpartition("; ")
        yield warning(what, "whoever has it can steer the run and read its data", remedy)
    for name, ends in facts.ends.items():
        if facts.now < max(ends) and len(ends) > 1:
            yield from _bundle(f"{KEY}.{name}", ends, facts.now)
        else:
            yield from _date(f"{KEY}.{name}", max(ends), facts)
    if facts.tls == "off" and facts.has_remote_peers:
        exposed = "tokens and data travel unencrypted" if facts.has_tokens else "anyone may call"
        yield warning(
            f"{KEY}.tls = off, and services are reached from other hosts",
            f"{exposed}: whoever reaches a port can steer the run and read its data",
            f"set {KEY}.tls=mtls (`sluice certs` makes the files), or keep the network private",
        )
    elif facts.tls == "off" and not facts.sentences:
        yield fine(f"{KEY}.tls = off, and all services are on this host alone")


def _date(key: str, end: datetime, facts: SecurityFacts) -> Iterator[Finding]:
    day = end.strftime(_DAY)
    renew = "make others (`sluice certs --force`) and start the run again"
    if end <= facts.now and facts.sentences:
        return  # the handshake has told it
    if end <= facts.now:
        yield problem(f"{key} expired on {day}", "peers refuse the connection", renew)
    elif end - facts.now < SOON:
        days = (end - facts.now).days
        yield warning(
            f"{key} expires on {day}, in {days} days",
            "no connection is made after that, also in a run that goes on",
            renew,
        )
    else:
        yield fine(f"{key} holds until {day}")


def _bundle(key: str, ends: Sequence[datetime], now: datetime) -> Iterator[Finding]:
    """Of several CAs one that ends harms none of the others; the handshake says if it was ours."""
    first = min(ends)
    if first - now >= SOON:
        yield fine(f"{key} holds until {first.strftime(_DAY)}, all {len(ends)} certificates of it")
        return
    for number, end in enumerate(ends, start=1):
        if end - now >= SOON:
            continue
        has, refuse = ("expired", "refuse") if end <= now else ("expires", "then refuse")
        yield warning(
            f"{key}: certificate {number} of {len(ends)} in it {has} on {end.strftime(_DAY)}",
            f"peers {refuse} whoever still shows a certificate that it signed",
            "replace the certificates that it signed, then take it out",
        )


def _ends(config: RunConfig) -> Iterator[tuple[str, tuple[datetime, ...]]]:
    security = config.sluice.security
    for name, path in (("cert_file", security.cert_file), ("ca_file", security.ca_file)):
        if security.tls == "off" or not path:
            continue
        try:
            ends = tuple(one.ends for one in validities(Path(path).read_bytes()))
        except (OSError, ValueError):
            continue  # told by `run_security_problems`
        if ends:
            yield name, ends if name == "ca_file" else (min(ends),)
