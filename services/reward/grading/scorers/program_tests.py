"""Grade programs by tests: codecontests, apps, codeforces and taco, like verl's prime_code
(`verl/utils/reward_score/prime_code`), but each program runs in a sandbox.

The sandbox gets the inputs and returns the outputs. Expected outputs never get there, so a program
can neither read them nor answer for the scorer.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from services.reward.grading.scorers import program_runner
from sluice.errors import ConfigError, DataError, SandboxUnavailableError
from sluice.json_objects import DECODE_ERRORS
from sluice.sandbox.run_result import MIB, PYTHON, Limits, Sandbox

FIRST_TESTS = 10
"""The number of first tests; the score is the share of these that pass."""
TEST_S = 10.0
"""Most seconds of one test."""
_TEST_OUTPUT_BYTES, _OUTPUT_BYTES = 4 * MIB, 64 * MIB
_BUDGET_SHARE, _KILL_SHARE = 0.8, 0.1  # of the sample's time: for tests, and until the kill
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8  # numpy.allclose
_RUNNER = Path(program_runner.__file__)
_LANGUAGE = re.compile(r"\s*[A-Za-z]+\s*")


@dataclass(frozen=True, slots=True)
class ProgramCases:
    """Test inputs with their expected outputs; for the function `fn_name`, if given."""

    inputs: Sequence[object]
    outputs: Sequence[object]
    fn_name: str | None = None


class _TestReport(msgspec.Struct):
    test: int
    end: str
    output: str


class ProgramTests:
    """Grades a response by the tests that its program passes.

    The score is the share of the first ten tests that pass. If these all pass but a later test
    fails, the score is 10/11. Tests for which the time is too short count as failed.

    Args:
        limits: limits of a program; its time and output limits are set here.
        item_timeout_s: wall-clock limit of one sample, after which its scorer is killed.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits, item_timeout_s: float) -> None:
        self._sandbox, self._timeout_s = sandbox, item_timeout_s
        self._limits = replace(limits, output_bytes=_OUTPUT_BYTES)
        self._runner = _RUNNER.read_text(encoding="utf-8")

    def __call__(self, response: str, ground_truth: str) -> float:
        """Return the score, 0 to 1.

        Raises:
            DataError: the ground truth holds no tests.
            SandboxUnavailableError: the sandbox failed.
        """
        cases, program = cases_of(ground_truth), program_of(response)
        if not program.strip():
            return 0.0
        ends_s = time.monotonic() + _BUDGET_SHARE * self._timeout_s
        first_cases, later_cases = _split(cases, FIRST_TESTS)
        passed = [verdict is True for verdict in self._verdicts(program, first_cases, ends_s)]
        considered = len(passed)
        if (
            all(passed)
            and later_cases.inputs
            and not all(verdict is True for verdict in self._verdicts(program, later_cases, ends_s))
        ):
            considered += 1
        return sum(passed) / considered

    def _verdicts(self, program: str, cases: ProgramCases, ends_s: float) -> list[bool | None]:
        """Return for each test whether the answer is right; ``None`` if there was no time for
        it."""
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            return [None] * len(cases.inputs)
        job: program_runner.Job = {
            "program": program,
            "fn_name": cases.fn_name,
            "inputs": list(cases.inputs),
            "total_s": left_s,
            "test_s": TEST_S,
            "output_bytes": _TEST_OUTPUT_BYTES,
        }
        result = self._sandbox.run(
            [PYTHON, "runner.py"],
            {"runner.py": self._runner},
            json.dumps(job).encode(),
            replace(self._limits, wall_s=left_s + _KILL_SHARE * self._timeout_s),
        )
        first_line, *lines = result.stdout.split(b"\n")
        if first_line.decode(errors="replace").strip() != program_runner.STARTED:
            # However it ended, the program has not run yet.
            stderr_text = result.stderr[-300:].decode(errors="replace").strip()
            raise SandboxUnavailableError(
                f"Python did not start the tests ({result.end}, exit code {result.exit_code}): "
                f"{stderr_text or 'no message'}"
            )
        return _parse_verdicts(lines, cases)


def cases_of(ground_truth: str) -> ProgramCases:
    """Return the tests in a ground truth: JSON with ``inputs``, ``outputs`` and perhaps
    ``fn_name``.

    Raises:
        DataError: it holds no tests.
    """
    try:
        cases = json.loads(ground_truth)  # integers of any size
    except (ValueError, RecursionError) as error:
        raise DataError(f"ground_truth is no JSON: {error}; {_FORM}") from error
    inputs, outputs = _input_output_lists(cases)
    if not inputs or len(inputs) != len(outputs):
        raise DataError(
            f"ground_truth has {len(inputs)} inputs and {len(outputs)} outputs; {_FORM}"
        )
    return ProgramCases(inputs, outputs, cases.get("fn_name"))


_FORM = (
    'write {"inputs": [...], "outputs": [...]}, equally many and at least one, and "fn_name" if a '
    "function is called"
)


def _input_output_lists(cases: object) -> tuple[list[object], list[object]]:
    if isinstance(cases, Mapping):
        inputs, outputs = cases.get("inputs"), cases.get("outputs")
        if isinstance(inputs, list) and isinstance(outputs, list):
            return inputs, outputs
    raise DataError(f"ground_truth is no object with the lists inputs and outputs; {_FORM}")


def program_of(response: str) -> str:
    """Return the program in a response: the last Python block, else the first block, else the
    whole text."""
    if "```python" in response:
        return response.split("```python")[-1].split("```")[0]
    if "```" not in response:
        return response
    block = response.split("```")[1]
    language, newline, rest = block.partition("\n")
    return rest if newline and _LANGUAGE.fullmatch(language) else block


def _split(cases: ProgramCases, number: int) -> tuple[ProgramCases, ProgramCases]:
    inputs, outputs = cases.inputs, cases.outputs
    return (
        ProgramCases(inputs[:number], outputs[:number], cases.fn_name),
        ProgramCases(inputs[number:], outputs[number:], cases.fn_name),
    )


def _parse_verdicts(lines: Sequence[bytes], cases: ProgramCases) -> list[bool | None]:
    """Grade the runner's lines. The program may have written some, so the first of each test
    counts."""
    verdicts: dict[int, bool | None] = {}
    for line in lines:
        try:
            answer = msgspec.json.decode(line, type=_TestReport)
        except DECODE_ERRORS:
            continue
        if 0 <= answer.test < len(cases.inputs) and answer.test not in verdicts:
            verdicts[answer.test] = _verdict(answer, cases)
    return [verdicts.get(test) for test in range(len(cases.inputs))]


def _verdict(answer: _TestReport, cases: ProgramCases) -> bool | None:
    if answer.end == program_runner.TIMED_OUT:
        return None
    if answer.end != program_runner.FINISHED:
        return False
    expected = cases.outputs[answer.test]
    if cases.fn_name is not None:
        return is_same_value(answer.output, expected)
    text = "\n".join(map(str, expected)) if isinstance(expected, list) else str(expected)
    return is_same_output(answer.output, text)


def is_same_output(output: str, expected: str) -> bool:
    """Return whether a program's output is the expected one.

    Ignore spaces around the text and around each line, and empty lines. If every line is a
    number, and not all are integers, each may differ by a relative 1e-5.
    """
    lines = output.splitlines()
    expected_text = expected.strip()
    if (
        "\n".join(lines).strip() == expected_text
        or "\n".join(map(str.strip, lines)).strip() == expected_text
    ):
        return True
    expected_lines = [line.strip() for line in expected.split("\n") if line]
    filled = [line for line in lines if line]
    if expected_lines in (lines, filled):
        return True
    return len(filled) == len(expected_lines) and _are_close(filled, expected_lines)


def _are_close(printed: Sequence[str], expected: Sequence[str]) -> bool:
    if all(map(str.isdigit, (*printed, *expected))):
        return False  # integers have to be equal
    try:
        return all(
            _is_close(float(printed_text), float(expected_text))
            for printed_text, expected_text in zip(printed, expected, strict=True)
        )
    except ValueError:
        return False


def _is_close(printed: float, expected: float) -> bool:
    if math.isinf(printed) or math.isinf(expected):
        return printed == expected
    return abs(printed - expected) <= _ABSOLUTE + _RELATIVE * abs(expected)


def is_same_value(answer: str, expected: object) -> bool:
    """Return whether a function's value, as JSON, is the expected one, which may be wrapped in a
    list."""
    try:
        value = json.loads(answer)
        expected_value = json.loads(expected) if isinstance(expected, str) else expected
    except (ValueError, RecursionError):
        return False
    if value == expected_value:
        return True
    return (
        isinstance(expected_value, list)
        and bool(expected_value)
        and bool(value == expected_value[0])
    )


def refuse_to_score(_response: str, _ground_truth: str) -> float:
    """Replace the scorer if there is no sandbox: always raise.

    Raises:
        ConfigError: always.
    """
    raise ConfigError("programs are graded in a sandbox only; set sluice.sandbox.backend")
