"""Check the configuration: its rules here, its reward function, its certificates and tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from sluice.config.problems import errors
from sluice.config.rules.checks import all_problems
from sluice.config.rules.files import MODEL_KEY
from sluice.config.rules.security import SECURITY_KEY, exposed_secrets, run_security_problems
from sluice.config.run import RunConfig
from sluice.doctor.finding import Examined, Finding, fine, problem, problem_of_sentence, warning
from sluice.doctor.network import has_remote_peers
from sluice.errors import SluiceError
from sluice.launch.plan import TIMEOUT_S, check_reward_function
from sluice.security.certificates import SOON, validities

# Other checks look at these files themselves.
_ELSEWHERE = (
    MODEL_KEY,
    "data.train_files",
    "data.val_files",
    "reward.custom_reward_function.path",
    "sluice.security",
)


def check_configuration(examined: Examined) -> Iterator[Finding]:
    """What sluice cannot run, with the keys, their values and a remedy."""
    broken = errors(all_problems(examined.config, examined.settings, shape=examined.shape))
    sentences = [one.text for one in broken]
    yield from configuration_findings(sentences)


def configuration_findings(sentences: list[str]) -> Iterator[Finding]:
    """One for each rule that is broken."""
    reported = [text for text in sentences if not text.startswith(_ELSEWHERE)]
    for text in reported:
        what, _, remedy = text.rpartition("; ")
        yield problem(what or text, "the run refuses to start", remedy if what else "correct it")
    if not reported:
        yield fine("no rule is broken")


REWARD_DEADLINE_S = TIMEOUT_S + 5.0


def check_reward(examined: Examined) -> Iterator[Finding]:
    """Loads it in a process of its own, under a scorer's limits."""
    reward = examined.config.reward
    function = reward.custom_reward_function
    if function.path is None:
        model = reward.reward_model
        by = (
            f"the model at {model.base_url}" if model.enable else "built-in scorers, by data source"
        )
        yield fine(f"graded by {by}")
        return
    try:
        check_reward_function(reward)
    except SluiceError as error:
        yield problem_of_sentence(str(error), "the run refuses to start")
    else:
        yield fine(f"{function.path} defines {function.name}, and can be loaded")


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
    sentences = tuple(one.text for one in run_security_problems(config))
    yield from security_findings(
        SecurityFacts(
            config.sluice.security.tls,
            config.sluice.security.token_file is not None,
            sentences,
            () if sentences else tuple(one.text for one in exposed_secrets(config.sluice.security)),
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
            yield from _bundle(f"{SECURITY_KEY}.{name}", ends, facts.now)
        else:
            yield from _date(f"{SECURITY_KEY}.{name}", max(ends), facts)
    if facts.tls == "off" and facts.has_remote_peers:
        exposed = "tokens and data travel unencrypted" if facts.has_tokens else "anyone may call"
        yield warning(
            f"{SECURITY_KEY}.tls = off, and services are reached from other hosts",
            f"{exposed}: whoever reaches a port can steer the run and read its data",
            f"set {SECURITY_KEY}.tls=mtls (`sluice certs` makes the files), or keep the "
            "network private",
        )
    elif facts.tls == "off" and not facts.sentences:
        yield fine(f"{SECURITY_KEY}.tls = off, and all services are on this host alone")


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
