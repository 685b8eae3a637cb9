"""What the demo's clients saw, as figures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Answered", "ClientRecord", "Judgement", "fairness", "jain", "judge", "percentiles"]

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt's answer as its client tells it.

    Attributes:
        prompt: its number.
        seconds: from asking first to the last token, refusals and waits between included.
        first_s: to the first token.
        tokens: of the response.
        retries: times it was asked for again.
        at_s: when it was complete, by the clock of the demo.
    """

    prompt: int
    seconds: float
    first_s: float
    tokens: int
    retries: int
    at_s: float


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """What became of one client's prompts.

    Attributes:
        name: unique.
        language: it is written in.
        answered: in the order they were told.
        failed: reasons by prompt number.
        under_way: prompts that a vanished client had got tokens of, and no end.
        vanished: it was killed.
    """

    name: str
    language: str
    answered: Sequence[Answered]
    failed: Mapping[int, str]
    under_way: frozenset[int] = frozenset()
    vanished: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether each prompt was answered once."""

    lost: int
    failed: int
    twice: int


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """p50, p90, p99 and the largest, in seconds; nearest rank. Empty without values."""
    values = sorted(seconds)
    if not values:
        return {}
    ranks = {f"p{p}": values[-(-p * len(values) // 100) - 1] for p in _PERCENTILES}
    return {name: round(value, 3) for name, value in (ranks | {"max": values[-1]}).items()}


def jain(rates: Sequence[float]) -> float:
    """Jain's index (sum x)^2 / (n sum x^2): 1 if all are equal, 1/n if one has everything.

    Jain, Chiu, Hawe, "A Quantitative Measure of Fairness", 1984. 0 without rates above 0.
    """
    squares = sum(rate * rate for rate in rates)
    return sum(rates) ** 2 / (len(rates) * squares) if squares else 0.0


def fairness(records: Sequence[ClientRecord]) -> dict[str, float]:
    """Of the tokens that clients got while all of them still had prompts.

    Clients that vanished, and those that took their prompts over, do not count. `jain` as above,
    `min_over_max` of the least and the best served, and `share_LANGUAGE` of the mean.
    """
    staying = [record for record in records if not record.vanished and record.answered]
    if not staying:
        return {}
    until_s = min(record.answered[-1].at_s for record in staying)
    tokens = {
        record.name: float(sum(one.tokens for one in record.answered if one.at_s <= until_s))
        for record in staying
    }
    mean = sum(tokens.values()) / len(tokens)
    by_language = {
        f"share_{language}": _mean(
            [tokens[record.name] / mean for record in staying if record.language == language]
        )
        for language in sorted({record.language for record in staying})
    }
    return {
        "jain": round(jain(list(tokens.values())), 4),
        "min_over_max": round(min(tokens.values()) / max(tokens.values()), 3),
        **{name: round(share, 3) for name, share in by_language.items()},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def judge(num_prompts: int, records: Iterable[ClientRecord]) -> Judgement:
    """Looks for the answer of each prompt. Prompts are numbered from 0."""
    found = list(records)
    answers = Counter(one.prompt for record in found for one in record.answered)
    failed = {prompt for record in found for prompt in record.failed} - answers.keys()
    lost = set(range(num_prompts)) - answers.keys() - failed
    twice = sum(count - 1 for count in answers.values())
    return Judgement(len(lost), len(failed), twice)
