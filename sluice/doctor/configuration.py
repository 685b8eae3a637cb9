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
from sluice.security.certificates import SOON, ends_of_validity

# Other checks look at these files themselves.
_ELSEWHERE = (
    MODEL_KEY,
    "data.train_files",
    "data.val_files",
    "reward.custom_reward_function.path",
    "sluice.security",
)
REWARD_DEADLINE_S = TIMEOUT_S + 5.0
_DAY = "%Y-%m-%d %H:%M UTC"


def check_configuration(examined: Examined) -> Iterator[Finding]:
    """Check what sluice cannot run: the keys, their values and a remedy."""
    broken = errors(all_problems(examined.config, examined.settings, shape=examined.shape))
    return configuration_findings([one.text for one in broken])


def configuration_findings(sentences: list[str]) -> Iterator[Finding]:
    """Yield a problem for each broken rule that no other check reports."""
    reported = [text for text in sentences if not text.startswith(_ELSEWHERE)]
    for text in reported:
        yield problem_of_sentence(text, "the run refuses to start")
    if not reported:
        yield fine("no rule is broken")


def check_reward(examined: Examined) -> Iterator[Finding]:
    """Load the reward function in a process of its own, under a scorer's limits."""
    reward = examined.config.reward
    function, model = reward.custom_reward_function, reward.reward_model
    if function.path is None and model.enable:
        yield fine(f"graded by the model at {model.base_url}")
        return
    if function.path is None:
        yield fine("graded by built-in scorers, by data source")
        return
    try:
        check_reward_function(reward)
    except SluiceError as error:
        yield problem_of_sentence(str(error), "the run refuses to start")
    else:
        yield fine(f"{function.path} defines {function.name}, and can be loaded")


@dataclass(frozen=True, slots=True)
class SecurityFacts:
    """What secures the run.

    Attributes:
        tls: as configured.
        has_tokens: whether callers need one.
        sentences: what keeps the run from being secured, each with its remedy.
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
    """Check certificates as peers will see them, and their dates; check who can read secrets."""
    config = examined.config
    sentences = tuple(one.text for one in run_security_problems(config))
    return security_findings(
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
    """Yield what peers would refuse, now or soon, and what is open to others."""
    for sentence in facts.sentences:
        yield problem_of_sentence(sentence, "services refuse to start, or refuse each other")
    for sentence in facts.exposed:
        what, _, remedy = sentence.rpartition("; ")
        yield warning(what, "anyone who has it can steer the run and read its data", remedy)
    for name, ends in facts.ends.items():
        yield from _date_findings(f"{SECURITY_KEY}.{name}", ends, facts)
    if facts.tls == "off" and facts.has_remote_peers:
        exposed = "tokens and data travel unencrypted" if facts.has_tokens else "anyone may call"
        yield warning(
            f"{SECURITY_KEY}.tls = off, and services are reached from other hosts",
            f"{exposed}: anyone who reaches a port can steer the run and read its data",
            f"set {SECURITY_KEY}.tls=mtls (`sluice certs` makes the files), or keep the "
            "network private",
        )
    elif facts.tls == "off" and not facts.sentences:
        yield fine(f"{SECURITY_KEY}.tls = off, and all services are on this host alone")


def _date_findings(key: str, ends: Sequence[datetime], facts: SecurityFacts) -> Iterator[Finding]:
    """Yield expired and soon expiring certificates; of several CAs one that ends harms no other."""
    last, renew = max(ends), "make others (`sluice certs --force`) and start the run again"
    if last <= facts.now:
        if not facts.sentences:  # else the trial handshake has reported it
            yield problem(
                f"{key} expired on {last.strftime(_DAY)}", "peers refuse the connection", renew
            )
        return
    if len(ends) == 1 and last - facts.now < SOON:
        what = f"{key} expires on {last.strftime(_DAY)}, in {(last - facts.now).days} days"
        yield warning(what, "peers then refuse new connections, and the run stops", renew)
        return
    ending = [end for end in ends if end - facts.now < SOON]
    for end in ending:
        has = "expired" if end <= facts.now else "expires"
        yield warning(
            f"{key}: certificate {list(ends).index(end) + 1} of {len(ends)} in it {has} on "
            f"{end.strftime(_DAY)}",
            "peers refuse the certificates that it signed once it has expired",
            "replace the certificates that it signed, then take it out",
        )
    if not ending:
        yield fine(f"{key} holds until {min(ends).strftime(_DAY)}")


def _ends(config: RunConfig) -> Iterator[tuple[str, tuple[datetime, ...]]]:
    security = config.sluice.security
    for name, path in (("cert_file", security.cert_file), ("ca_file", security.ca_file)):
        if security.tls == "off" or not path:
            continue
        try:
            ends = tuple(ends_of_validity(Path(path).read_bytes()))
        except (OSError, ValueError, SluiceError):
            continue  # `run_security_problems` reports it
        if ends:
            yield name, ends if name == "ca_file" else (min(ends),)
