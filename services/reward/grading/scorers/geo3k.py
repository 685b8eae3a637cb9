r"""The Geometry3K scorer: 0.9 for the answer and 0.1 for the form (verl's geo3k).

The right form is ``<think>...</think>`` and then a ``\boxed{}``. The result is one number, so the
metric ``acc`` includes the form, as in verl: a right answer in the wrong form has 0.9.

`same_value` compares answers in place of mathruler's grader, without SymPy. The
rules, in order: one LaTeX normal form; one plain text (case, units, ``$`` and ``%`` aside); a tuple
or interval agrees element by element; two plain fractions must be equal as written, once reduced;
an integer agrees with an integer only; all else is compared by value, at three points if there are
unknowns.
"""

from __future__ import annotations

import math
import re

from services.reward.grading.scorers import math_expression
from services.reward.grading.scorers.latex import (
    MalformedLatexError,
    braced_text,
    last_boxed,
    normal_form,
)

FORM_SHARE = 0.1
MAX_ANSWER_CHARS = 1000
RELATIVE_TOLERANCE = 1e-12
MAX_UNKNOWNS = 2
POINTS = ((0.7390851332, 1.3247179572), (2.2360679775, 0.5772156649), (1.6180339887, 3.3598856662))

_TEXT = re.compile(r"\\text\{(.*?)\}")
_UNIT_NAMES = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week"),
    *("month", "year", "foot", "feet", "inch", "yard"),
)
_UNITS = tuple(re.compile(rf"{name}(es)?(s)? *(\^[0-9]+)?") for name in _UNIT_NAMES)
_DEGREES = re.compile(r"\^ *\\circ|\\degrees?(?![A-Za-z])")
_SPACE = re.compile(r"\\[,:; ()\[\]]|\\$|\\q?quad(?![A-Za-z])|~")  # \\$: a backslash at the end
_EMPTY = re.compile(r"\{ *\}|(?<=\})\.$")  # what a unit leaves, and the full stop after a command
_FONT = re.compile(r"\\(text|math)(rm|bf|it)(?=\{)|\\(boldsymbol|bold|underline|boxed|fbox)(?=\{)")
_BARE_ROOT = re.compile(r"\\sqrt *([0-9])(?=[0-9])")  # TeX's argument is one digit
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(\D|$))")
_MIXED_NUMBER = re.compile(r"(?<=\d) +(?=\d)")
_FRACTION = re.compile(r"-?[0-9]+/0*[1-9][0-9]*")
_INTEGER = re.compile(r"(?:\+|(-?))0*([0-9]*?)(?<=[0-9])(?:\.0*)?")
_MIXED_FRACTION = re.compile(r"(?<=\d) *(?=\\[dt]?frac *\{ *\d+ *\} *\{ *\d+ *\})")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac *\{ *(\d+) *\} *\{ *(\d+) *\}")

_FORM_BEGINS = "<think>"
_FORM_REST = ("</think>", "\\boxed{", "}")


def compute_score(solution: str, ground_truth: str) -> float:
    """``0.9 * right + 0.1 * well formed``, in [0, 1]."""
    answer = last_boxed(solution)
    is_right = answer is not None and same_value(answer.strip(), ground_truth)
    return (1.0 - FORM_SHARE) * is_right + FORM_SHARE * has_form(solution)


def has_form(solution: str) -> bool:
    """Return whether the response begins with the thought and has the other parts in order.

    Take linear time; a regular expression with as many gaps may backtrack almost endlessly.
    """
    if not solution.startswith(_FORM_BEGINS):
        return False
    start = len(_FORM_BEGINS)
    for part in _FORM_REST:
        index = solution.find(part, start)
        if index < 0:
            return False
        start = index + len(part)
    return True


def same_value(answer: str, reference: str) -> bool:
    """Return whether `answer` is right. Never raise; an overlong answer must match literally."""
    if max(len(answer), len(reference)) > MAX_ANSWER_CHARS:
        return answer == reference
    if _spell_out(answer) == _spell_out(reference):
        return True
    plain_answer, plain_reference = _plain(answer), _plain(reference)
    if plain_answer == plain_reference:
        return True
    if not plain_answer or not plain_reference:
        return False
    return _same_elements(plain_answer, plain_reference)


def _spell_out(answer: str) -> str:
    inner = _TEXT.fullmatch(answer.strip())
    answer = inner[1].strip() if inner else answer.strip()
    try:
        return normal_form(answer.replace(r"\%", "").replace("%", ""))
    except MalformedLatexError:
        return answer


def _plain(answer: str) -> str:
    """Lower-case text without units and currency; mixed numbers as sums."""
    inner = _TEXT.fullmatch(answer)
    answer = _DEGREES.sub("", inner[1] if inner else answer)
    for unit in _UNITS:
        answer = unit.sub("", answer)
    answer = _FONT.sub("", _SPACE.sub(" ", _TEXT.sub(r"\1", answer)))
    for sign in ("\\$", "\\%", "$", "%", r"\!", r"\left", r"\right"):
        answer = answer.replace(sign, "")
    answer = _BARE_ROOT.sub(r"\\sqrt{\1}", answer.replace("{,}", ","))
    answer = _EMPTY.sub("", _THOUSANDS.sub("", answer).strip()).strip()
    while answer.startswith("{") and braced_text(answer, 0) == answer[1:-1]:
        answer = answer[1:-1].strip()
    answer = _MIXED_FRACTION.sub("+", _MIXED_NUMBER.sub("+", answer))
    answer = "".join(_LATEX_FRACTION.sub(r"\1/\2", answer).split()).lower()
    integer = _INTEGER.fullmatch(answer.replace("{", "").replace("}", ""))
    return (integer[1] or "") + (integer[2] or "0") if integer else answer


def _same_elements(answer: str, reference: str) -> bool:
    answer_elements, reference_elements = _elements(answer), _elements(reference)
    if len(answer_elements) != len(reference_elements):
        return False
    if len(reference_elements) > 1 and (answer[0], answer[-1]) != (reference[0], reference[-1]):
        return False
    return all(map(_same_element, answer_elements, reference_elements))


def _elements(text: str) -> list[str]:
    """Return the elements of ``(a,b)`` or ``[a,b)``; any other text is one element."""
    inner = text[1:-1]
    if inner and text[0] in "([" and text[-1] in ")]" and not set("()[]") & set(inner):
        return inner.split(",")
    return [text]


def _same_element(answer: str, reference: str) -> bool:
    if answer == reference:
        return True
    if _FRACTION.fullmatch(answer) and _FRACTION.fullmatch(reference):
        return False
    if bool(_INTEGER.fullmatch(answer)) != bool(_INTEGER.fullmatch(reference)):
        return False
    return _equal_in_value(answer, reference)


def _equal_in_value(answer: str, reference: str) -> bool:
    try:
        answer_tokens, reference_tokens = (
            math_expression.tokens(answer),
            math_expression.tokens(reference),
        )
        names = sorted(
            math_expression.unknowns(answer_tokens) | math_expression.unknowns(reference_tokens)
        )
        if len(names) > MAX_UNKNOWNS:
            return False
        points = [dict(zip(names, point, strict=False)) for point in POINTS]
        return all(
            math.isclose(
                math_expression.value(answer_tokens, point),
                math_expression.value(reference_tokens, point),
                rel_tol=RELATIVE_TOLERANCE,
            )
            for point in points
        )
    except math_expression.NotAnExpressionError:
        return False
