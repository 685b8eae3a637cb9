"""What a scorer returned, as a number or a refusal. A failure never becomes a number."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from itertools import islice

from services.reward.scorer_messages import ScorerAnswer, ScorerNumber, ScorerRefusal

SCORE_KEY = "score"
ACCURACY_KEY = "acc"
PREDICTION_KEY = "pred"
MAX_KEYS = 64
MAX_KEY_CHARS = 128
MAX_PREDICTION_CHARS = 1000
MAX_DETAIL_CHARS = 500

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 150


def answer_of(returned: object) -> ScorerAnswer:
    """Interpret a scorer's return value as verl does (verl-semantics §3.3, §3.4).

    A mapping gives its ``score``; its further numbers become metrics and ``pred`` the prediction,
    of which the first 1000 characters are kept. A number is the score and the accuracy. Of any
    other sequence the first element counts. Missing, non-numeric, NaN or infinite scores are
    refused, and so are NaN or infinite metrics and mappings of more than 64 keys.
    """
    if isinstance(returned, Mapping):
        return _of_mapping(returned)
    value = returned[0] if isinstance(returned, list | tuple) and returned else returned
    score = _number(value)
    if score is None or not math.isfinite(score):
        return refusal(
            f"the scorer returned {_shown(returned)}, which is no finite number; return a number, "
            "or a dict with 'score'"
        )
    return ScorerNumber(score, {ACCURACY_KEY: score})


def refusal(detail: str) -> ScorerRefusal:
    """Why there is no number, in at most 500 characters."""
    return ScorerRefusal(_sendable(detail[:MAX_DETAIL_CHARS]))


def _of_mapping(returned: Mapping[object, object]) -> ScorerAnswer:
    problem = _shape_problem(returned)
    if problem is not None:
        return refusal(problem)
    numbers = {_sendable(str(key)): _number(value) for key, value in returned.items()}
    metrics = {key: value for key, value in numbers.items() if value is not None}
    metrics.pop(PREDICTION_KEY, None)
    score = metrics.pop(SCORE_KEY, None)
    if score is None or not math.isfinite(score):
        return refusal(
            f"the scorer's 'score' is {_shown(returned[SCORE_KEY])}, which is no finite number"
        )
    for key, value in metrics.items():
        if not math.isfinite(value):
            return refusal(f"the scorer's metric '{key}' is {value}, which is not finite")
    return ScorerNumber(score, metrics, _prediction(returned.get(PREDICTION_KEY)))


def _shape_problem(returned: Mapping[object, object]) -> str | None:
    if len(returned) > MAX_KEYS:
        return f"the scorer returned {len(returned)} keys; at most {MAX_KEYS} are taken"
    too_long = [key for key in returned if len(str(key)) > MAX_KEY_CHARS]
    if too_long:
        return (
            f"the scorer returned a key of {len(str(too_long[0]))} characters; at most "
            f"{MAX_KEY_CHARS} are taken"
        )
    if SCORE_KEY not in returned:
        shown = ", ".join(sorted(map(str, islice(returned, 8))))
        return f"the scorer returned a dict without 'score' (keys: {shown})"
    return None


def _prediction(value: object) -> str | None:
    return None if value is None else _sendable(str(value)[:MAX_PREDICTION_CHARS])


def _sendable(text: str) -> str:
    """`text` as UTF-8 can hold it: half a surrogate pair would end the process that sends it."""
    return text.encode(errors="replace").decode()


def _shown(value: object) -> str:
    """A short form that is also short work: a million elements are not spelled out first."""
    return _SHORT.repr(value)


def _number(value: object) -> float | None:
    """`value` as a float; ``None`` if it is no number. Text is never a number."""
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)  # type: ignore[arg-type]  # has __float__, of any library's scalars
    except (TypeError, ValueError, OverflowError):
        return None
