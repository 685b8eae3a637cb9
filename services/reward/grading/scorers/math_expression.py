"""Evaluate small mathematical expressions in LaTeX or plain notation.

It reads numbers, ``+ - * / ^``, brackets, implicit products, ``\frac``, ``\\sqrt``, ``\\pi`` and
single letters, which are unknowns. Nothing is executed, and length and nesting are bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

MAX_CHARACTERS = 200
MAX_DEPTH = 20

_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|\\?sqrt|\\frac|\\pi|pi(?![A-Za-z])|[A-Za-z]|[-+*/^()\[\]{}]")
_SIGNS = (
    (r"\left", ""),
    (r"\right", ""),
    (r"\dfrac", r"\frac"),
    (r"\tfrac", r"\frac"),
    (r"\cdot", "*"),
    (r"\times", "*"),
    (r"\div", "/"),
    ("\u221a", "sqrt"),
    ("\u03c0", r"\pi "),
    ("**", "^"),
)
_PRODUCT_ENDS = frozenset("+-*/)]}")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class NotAnExpressionError(ValueError):
    """The text is not an expression that this module reads."""


def tokens(text: str) -> list[str]:
    """Return the expression's symbols.

    Raises:
        NotAnExpressionError: it is empty or too long, or holds something else.
    """
    for old, new in _SIGNS:
        text = text.replace(old, new)
    if len(text) > MAX_CHARACTERS:
        raise NotAnExpressionError(f"more than {MAX_CHARACTERS} characters")
    matches = _TOKEN.findall(text)
    if not matches or "".join(matches) != "".join(text.split()):
        raise NotAnExpressionError(f"{text!r}: not only numbers, operators and letters")
    return [token.removeprefix("\\") for token in matches]


def unknowns(symbols: list[str]) -> frozenset[str]:
    """Return the letters that stand for numbers."""
    return frozenset(symbol for symbol in symbols if len(symbol) == 1 and symbol.isalpha())


def value(symbols: list[str], values: Mapping[str, float]) -> float:
    """Evaluate in double precision.

    Raises:
        NotAnExpressionError: wrong syntax, a division by zero, or no finite real value.
    """
    reader = _Reader(symbols, values)
    try:
        result = reader.sum(0)
    except (ArithmeticError, IndexError, KeyError, ValueError) as error:
        raise NotAnExpressionError(f"{type(error).__name__}: {error}") from error
    if not reader.at_end or isinstance(result, complex) or not math.isfinite(result):
        raise NotAnExpressionError("no finite real value")
    return result


class _Reader:
    """Recursive descent; every method reads one construct and returns its value."""

    def __init__(self, symbols: list[str], values: Mapping[str, float]) -> None:
        self._symbols, self._values, self._at = symbols, values, 0

    @property
    def at_end(self) -> bool:
        return self._at == len(self._symbols)

    def sum(self, depth: int) -> float:
        if depth > MAX_DEPTH:
            raise NotAnExpressionError(f"more than {MAX_DEPTH} brackets within each other")
        total = self._product(depth)
        while self._peek() in ("+", "-"):
            sign = 1.0 if self._take() == "+" else -1.0
            total += sign * self._product(depth)
        return total

    def _product(self, depth: int) -> float:
        product = self._signed(depth)
        while not self.at_end:
            if self._peek() == "/":
                self._take()
                product /= self._signed(depth)
            elif self._peek() == "*":
                self._take()
                product *= self._signed(depth)
            elif self._peek() in _PRODUCT_ENDS:
                break
            else:
                product *= self._power(depth)
        return product

    def _signed(self, depth: int) -> float:
        sign = 1.0
        while self._peek() in ("+", "-"):
            sign *= -1.0 if self._take() == "-" else 1.0
        return sign * self._power(depth)

    def _power(self, depth: int) -> float:
        base = self._atom(depth)
        if self._peek() != "^":
            return base
        self._take()
        sign = -1.0 if self._peek() == "-" else 1.0
        if sign < 0:
            self._take()
        return math.pow(base, sign * self._atom(depth))

    def _atom(self, depth: int) -> float:
        symbol = self._take()
        if symbol in _CLOSING:
            return self._bracket(_CLOSING[symbol], depth)
        if symbol == "frac":
            numerator = self._atom(depth)
            return numerator / self._atom(depth)
        if symbol == "sqrt":
            return self._root(depth)
        if symbol == "pi":
            return math.pi
        return self._values[symbol] if symbol.isalpha() else float(symbol)

    def _root(self, depth: int) -> float:
        if self._peek() != "[":
            return math.sqrt(self._atom(depth))
        self._take()
        degree = self._bracket("]", depth)
        return math.pow(self._atom(depth), 1.0 / degree)

    def _bracket(self, closing: str, depth: int) -> float:
        inner = self.sum(depth + 1)
        if self._take() != closing:
            raise NotAnExpressionError(f"a bracket is not closed by {closing}")
        return inner

    def _peek(self) -> str:
        return "" if self.at_end else self._symbols[self._at]

    def _take(self) -> str:
        symbol = self._symbols[self._at]
        self._at += 1
        return symbol
