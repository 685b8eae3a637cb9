"""The GSM8K scorer: is the final number the reference number? (verl/utils/reward_score/gsm8k.py)

``strict`` requires the data set's form ``#### 72``; ``flexible`` takes the last number. The
comparison is textual: ``72.0`` and ``72`` differ.
"""

from __future__ import annotations

import re
from typing import Literal

SCORED_CHARACTERS = 300

Method = Literal["strict", "flexible"]

_MARKED_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def compute_score(solution: str, ground_truth: str, *, method: Method = "strict") -> float:
    """Return 1 if right, else 0.

    Args:
        solution: the response's text; only its last 300 characters count.
        ground_truth: digits, without thousands separators.
    """
    return float(final_number(solution[-SCORED_CHARACTERS:], method) == ground_truth)


def final_number(text: str, method: Method) -> str | None:
    """Return the last number as text; ``None`` if there is none.

    Only ``strict`` removes thousands separators, as in verl.
    """
    if method == "strict":
        marked = _MARKED_NUMBER.findall(text)
        return marked[-1].replace(",", "") if marked else None
    numbers = _NUMBER.findall(text)
    return next((number for number in reversed(numbers) if number != "."), None)
