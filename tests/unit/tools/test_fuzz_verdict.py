"""When `make fuzz` fails."""

from __future__ import annotations

import pytest

from tools.fuzz.__main__ import exit_code


@pytest.mark.parametrize(
    ("crashes", "leaks", "missing", "code"),
    [(0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1)],
)
def test_a_run_that_found_something_or_ended_early_fails(
    crashes: int, leaks: int, missing: int, code: int
) -> None:
    assert exit_code({"crashes": crashes, "leaks": leaks, "missing": missing}) == code
