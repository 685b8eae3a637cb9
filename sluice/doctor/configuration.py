"""The rules of the configuration itself, as `sluice config check --rules here` applies them."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.config.checks import violations
from sluice.config.file_checks import MODEL_KEY
from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem

# Other checks look at these files themselves.
_ELSEWHERE = (
    MODEL_KEY,
    "data.train_files:",
    "data.val_files:",
    "reward.custom_reward_function.path",
    "sluice.security",
)


def check_configuration(examined: Examined) -> Iterator[Finding]:
    """What sluice cannot run, with the keys, their values and a remedy."""
    broken = violations(examined.config, examined.settings, shape=examined.shape)
    sentences = [one.text for one in broken if one.here]
    yield from configuration_findings(sentences)


def configuration_findings(sentences: list[str]) -> Iterator[Finding]:
    """One for each rule that is broken."""
    reported = [text for text in sentences if not text.startswith(_ELSEWHERE)]
    for text in reported:
        what, _, remedy = text.rpartition("; ")
        yield problem(what or text, "the run refuses to start", remedy if what else "correct it")
    if not reported:
        yield fine("no rule is broken")
