"""Check the configuration: its rules here, its certificates and tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from sluice.config.addresses import advertised_host, is_loopback
from sluice.config.problems import Problem, errors
from sluice.config.rules.checks import all_problems
from sluice.config.rules.security import SECURITY_KEY, exposed_secrets, run_security_problems
from sluice.doctor.finding import DoctorContext, Finding, fine, problem_of_text, warning
from sluice.security.certificates import SOON, ends_of_validity

_REFUSED = "the run refuses to start"


def check_configuration(context: DoctorContext) -> Iterator[Finding]:
    """Check for rules of `sluice config check` that keep sluice from running."""
    problems = errors(all_problems(context.config, context.settings, shape=context.shape))
    reported = [*context.wrong, *without_wrong_keys(problems, context.wrong)]
    yield from (problem_of_text(rule_problem.text, _REFUSED) for rule_problem in reported)
    if not reported:
        yield fine("no problems found")


def without_wrong_keys(problems: Sequence[Problem], wrong: Sequence[Problem]) -> list[Problem]:
    """Return the problems and notes that mention no wrong key: in place of its value is the
    default.
    """
    keys = [re.compile(rf"(?<![\w.]){re.escape(entry.key)}(?!\w)") for entry in wrong if entry.key]
    return [entry for entry in problems if not any(key.search(entry.text) for key in keys)]


def check_security(context: DoctorContext) -> Iterator[Finding]:
    """Check certificates as peers will see them, their dates, and who can read secrets."""
    security = context.config.sluice.security
    problems = run_security_problems(context.config)
    yield from (
        problem_of_text(defect.text, "services refuse to start, or refuse each other")
        for defect in problems
    )
    if security.tls == "off":
        is_remote = has_remote_peers(context)
        yield from tls_off_findings(has_tokens=bool(security.token_file), is_remote=is_remote)
    if problems:
        return
    for exposed in exposed_secrets(security):
        yield warning(exposed.statement, "anyone who has it can steer the run", exposed.advice)
    for name in ("cert_file", "ca_file"):
        path = getattr(security, name)
        if security.tls != "off" and path:
            ends = ends_of_validity(Path(path).read_bytes())
            yield from date_findings(f"{SECURITY_KEY}.{name}", ends, datetime.now(UTC))


def has_remote_peers(context: DoctorContext) -> bool:
    """Return whether services or trainer ranks of the run are meant to be on other hosts."""
    services = context.config.sluice
    endpoints = (
        service.endpoint for service in (services.trainer, services.reward, services.rollout)
    )
    hosts = {advertised_host(endpoint) for endpoint in endpoints}
    hosts.add(context.environment.get("MASTER_ADDR", "localhost"))
    return context.config.trainer.nnodes > 1 or not all(map(is_loopback, hosts))


def tls_off_findings(*, has_tokens: bool, is_remote: bool) -> Iterator[Finding]:
    """Yield a warning if services without TLS are reached from other hosts."""
    statement = f"{SECURITY_KEY}.tls = off"
    if not is_remote:
        yield fine(f"{statement}, and all services are on this host alone")
        return
    exposed = "tokens and data travel unencrypted" if has_tokens else "anyone may call"
    yield warning(
        f"{statement}, and services are reached from other hosts",
        f"{exposed}: anyone who reaches a port can steer the run and read its data",
        f"set {SECURITY_KEY}.tls=mtls (`sluice certs` makes the files), or keep the network "
        "private",
    )


def date_findings(key: str, ends: Sequence[datetime], now: datetime) -> Iterator[Finding]:
    """Yield certificates of a file that have expired or expire soon.

    Peers refuse an expired certificate that they need, which `run_security_problems` reports; here
    it is one of several in the file.
    """
    ending = [end for end in ends if end - now < SOON]
    for end in ending:
        yield warning(
            f"{key}: a certificate in it {'expired' if end <= now else 'expires'} on {_date(end)}",
            "after that date peers refuse it, and the certificates that it signed",
            "make others (`sluice certs --force`) and start the run again",
        )
    if not ending:
        yield fine(f"{key} holds until {_date(min(ends))}")


def _date(end: datetime) -> str:
    return f"{end:%Y-%m-%d %H:%M} UTC"
