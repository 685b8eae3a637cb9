"""What a scorer returned, as a number or a refusal. A failure never becomes a number."""

from __future__ import annotations

import math
from collections.abc import Mapping

from services.reward.scorer_messages import ScorerAnswer, ScorerNumber, ScorerRefusal

SCORE_KEY = "score"
ACCURACY_KEY = "acc"
PREDICTION_KEY = "pred"


def answer_of(returned: object) -> ScorerAnswer:
    """Interpret a scorer's return value as verl does (verl-semantics §3.3, §3.4).

    A mapping gives its ``score``; its further numbers become metrics and ``pred`` the prediction.
    A number is the score and the accuracy. Of any other sequence the first element counts.
    Missing, non-numeric, NaN or infinite scores are refused, and so are NaN or infinite metrics.
    """
    if isinstance(returned, Mapping):
        return _of_mapping(returned)
    value = returned[0] if isinstance(returned, list | tuple) and returned else returned
    score = _number(value)
    if score is None or not math.isfinite(score):
        return ScorerRefusal(f"the scorer returned {returned!r:.200}, which is no finite number")
    return ScorerNumber(score, {ACCURACY_KEY: score})


def _of_mapping(returned: Mapping[object, object]) -> ScorerAnswer:
    if SCORE_KEY not in returned:
        return ScorerRefusal(
            f"the scorer returned keys {sorted(map(str, returned))} but no 'score'"
        )
    numbers = {str(key): _number(value) for key, value in returned.items()}
    finite = {key: value for key, value in numbers.items() if value is not None}
    score = finite.pop(SCORE_KEY, None)
    if score is None or not math.isfinite(score):
        return ScorerRefusal(
            f"the scorer's 'score' is {returned[SCORE_KEY]!r:.200}, which is no finite number"
        )
    for key, value in finite.items():
        if not math.isfinite(value):
            return ScorerRefusal(f"the scorer's metric '{key}' is {value}, which is not finite")
    prediction = returned.get(PREDICTION_KEY)
    finite.pop(PREDICTION_KEY, None)
    return ScorerNumber(score, finite, None if prediction is None else str(prediction))


def _number(value: object) -> float | None:
    """`value` as a float; ``None`` if it is no number. Text is never a number."""
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)  # type: ignore[arg-type]  # has __float__, of any library's scalars
    except (TypeError, ValueError, OverflowError):
        return None
