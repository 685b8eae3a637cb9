"""Question answering by exact match after normalisation (Search-R1; verl's searchR1 sources).

The answer is the content of the last ``<answer>...</answer>``. The comparison ignores case,
punctuation, the articles a, an, the, and repeated spaces.
"""

from __future__ import annotations

import re
import string

from sluice.data.scoring import accepted_answers

MAX_TAGS = 10
SPAM_SHARE = 0.25

_OPENING, _CLOSING = "<answer>", "</answer>"
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compute_score(solution: str, ground_truth: str) -> float:
    """Return 1 if right, 0.25 if right with more than ten answer tags (guessing), else 0.

    Args:
        ground_truth: one answer; or, as JSON, a list of them or ``{"target": ...}`` with either.
    """
    tagged = last_tagged(solution)
    if tagged is None:
        return 0.0
    answer = normalize(tagged)
    if all(answer != normalize(target) for target in accepted_answers(ground_truth)):
        return 0.0
    num_tags = max(solution.count(_OPENING), solution.count(_CLOSING))
    return SPAM_SHARE if num_tags > MAX_TAGS else 1.0


def last_tagged(text: str) -> str | None:
    """Return the content of the last answer tag; a tag extends to the next closing tag.

    Take linear time even if thousands of tags are opened and none is closed.
    """
    tagged, start = None, 0
    while (opening := text.find(_OPENING, start)) >= 0:
        opening += len(_OPENING)
        start = text.find(_CLOSING, opening)
        if start < 0:
            break
        tagged = text[opening:start]
    return tagged


def normalize(text: str) -> str:
    """Return `text` in lower case without punctuation, articles and surplus spaces."""
    without_punctuation = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", without_punctuation).split())
