"""Whatever a scorer does, its sample gets a typed outcome and the others keep their scores."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from services.reward.grading.scorers.registry import RULES
from sluice.config.schema.reward import CustomRewardFunctionConfig, ScorerPoolConfig
from sluice.data.scoring import ScorerInput
from sluice.types import Failed, FailureKind, Scored
from tests.support.scorer_pools import hurry, running_scorer_pool

SCORER = """
import ctypes, math, os, signal, struct, sys, time

def hang():
    time.sleep(1000)

def hang_in_c():
    libc = ctypes.PyDLL(None)  # keeps the interpreter's lock
    libc.sleep(1000)

def ignore_signals():
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    hang()

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def end():
    sys.exit(0)

def crash():
    ctypes.string_at(0)

def allocate():
    held = []
    while True:
        held.append(bytearray(2**24))

def recurse():
    return recurse()

def print_without_end():
    while True:
        print("x" * 1000, flush=True)

def print_much():
    for _ in range(200):
        print("x" * 10_000, flush=True)
        print("x" * 10_000, file=sys.stderr)
    return 0.25

def fork_and_both_return():
    os.fork()
    return 0.75

def fork_and_leave_one_behind():
    if os.fork() == 0:
        hang()
    return 0.5

def note():
    with open(__file__ + ".notes", "a") as file:
        file.write("noted\\n")
    return 0.125

def take_the_pipes():
    for fd in range(3, 64):
        try:
            os.write(fd, struct.pack("<I", 2**31) + b"junk")
        except OSError:
            pass
    return 1.0

def answer_too_deep():
    body = b"\\x93\\x01\\x90" + b"\\x91" * 100_000 + b"\\xc0"
    for fd in range(3, 64):
        try:
            os.write(fd, struct.pack("<I", len(body)) + body)
        except OSError:
            pass
    return 1.0

def close_the_pipes():
    os.closerange(3, 256)
    return 1.0

def raise_what_cannot_be_shown():
    class Mute(Exception):
        def __str__(self):
            raise ValueError
    raise Mute

def raise_half_a_character():
    raise ValueError("\\ud800")

DEEDS = {
    "nan": lambda: math.nan, "inf": lambda: -math.inf, "none": lambda: None,
    "text": lambda: "1.0", "huge dict": lambda: {"score": 1.0} | {str(i): i for i in range(10**5)},
    "long text": lambda: "x" * 10**8, "raise": lambda: 1 / 0,
    "no score": lambda: {"acc": 1.0}, "nan metric": lambda: {"score": 1.0, "acc": math.nan},
}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str in DEEDS:
        return DEEDS[solution_str]()
    return globals()[solution_str]() if solution_str in globals() else float(len(solution_str))
"""
# No busy machine reaches this limit; a deed without an end gets a shorter one.
LIMITS = ScorerPoolConfig(num_workers=1, timeout_s=300.0, memory_mb=600)
GOOD = ("a", "bb", "ccc", "dddd")
TIMEOUT = (FailureKind.SCORER_TIMEOUT,)
CRASH = (FailureKind.SCORER_CRASH,)
UNSCORABLE = (FailureKind.UNSCORABLE,)


@pytest.fixture
def custom(tmp_path: Path) -> CustomRewardFunctionConfig:
    path = tmp_path / "score.py"
    path.write_text(SCORER)
    return CustomRewardFunctionConfig(path=str(path))


def items(*responses: str) -> list[ScorerInput]:
    return [ScorerInput("mine", response, "A") for response in responses]


def reported(outcomes: tuple[Scored | Failed, ...]) -> list[object]:
    return [o.kind if isinstance(o, Failed) else o.score for o in outcomes]


@pytest.mark.parametrize(
    ("deed", "kinds"),
    [
        ("hang", TIMEOUT),
        ("hang_in_c", TIMEOUT),
        ("ignore_signals", TIMEOUT),
        ("stop", TIMEOUT),
        ("print_without_end", TIMEOUT),
        ("end", CRASH),
        ("crash", CRASH),
        ("raise_what_cannot_be_shown", CRASH),
        ("allocate", (*UNSCORABLE, *CRASH)),
        ("recurse", (*UNSCORABLE, *CRASH)),
    ],
)
async def test_a_misdeed_costs_its_own_sample_and_no_other(
    custom: CustomRewardFunctionConfig,
    deed: str,
    kinds: tuple[FailureKind, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kinds == TIMEOUT:
        hurry(monkeypatch, deed)
    async with running_scorer_pool(LIMITS, custom) as pool:
        outcomes = reported(await pool.score(items("a", deed, "ccc")))
        assert [outcomes[0], outcomes[2]] == [1.0, 3.0]
        assert outcomes[1] in kinds
        assert reported(await pool.score(items("dddd"))) == [4.0]


async def test_what_is_no_number_costs_its_own_sample_and_not_the_process(
    custom: CustomRewardFunctionConfig,
) -> None:
    deeds = (
        *("nan", "inf", "none", "text", "huge dict", "long text", "raise", "no score"),
        *("nan metric", "raise_half_a_character"),
    )
    async with running_scorer_pool(LIMITS, custom) as pool:
        outcomes = await pool.score(items("a", *deeds, "ccc"))
        failed = {
            deed: one.kind
            for deed, one in zip(deeds, outcomes[1:-1], strict=True)
            if isinstance(one, Failed)
        }
        assert failed == dict.fromkeys(deeds, FailureKind.UNSCORABLE)
        assert reported((outcomes[0], outcomes[-1])) == [1.0, 3.0]
        assert pool.num_replaced == 0


async def test_what_a_scorer_prints_beyond_its_share_is_dropped(
    custom: CustomRewardFunctionConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running_scorer_pool(LIMITS, custom) as pool:
        assert reported(await pool.score(items("print_much", "a"))) == [0.25, 1.0]
        printed = capfd.readouterr()
        assert not printed.out
        assert len(printed.err) < 70_000
        assert "the scorer prints more" in printed.err


async def test_a_fork_that_comes_back_does_not_answer_for_another_request(
    custom: CustomRewardFunctionConfig,
) -> None:
    async with running_scorer_pool(LIMITS, custom) as pool:
        assert reported(await pool.score(items("fork_and_both_return", "a"))) == [0.75, 1.0]
        for length in range(1, 6):
            assert reported(await pool.score(items("x" * length))) == [float(length)]


async def test_a_fork_that_comes_back_grades_nothing(custom: CustomRewardFunctionConfig) -> None:
    async with running_scorer_pool(LIMITS, custom) as pool:
        assert reported(await pool.score(items("fork_and_both_return", "note"))) == [0.75, 0.125]
        async with asyncio.timeout(300):
            while sum(map(_is_running, _sessions_of(_children()))) > 1:
                await asyncio.sleep(0.01)
    assert Path(f"{custom.path}.notes").read_text() == "noted\n"


async def test_a_process_left_behind_does_not_hide_that_the_scorer_ended(
    custom: CustomRewardFunctionConfig,
) -> None:
    async with running_scorer_pool(LIMITS, custom) as pool:
        outcomes = reported(await pool.score(items("fork_and_leave_one_behind", "end")))
        assert outcomes == [0.5, FailureKind.SCORER_CRASH]


async def test_a_process_that_a_scorer_left_behind_ends_with_the_pool(
    custom: CustomRewardFunctionConfig,
) -> None:
    async with running_scorer_pool(LIMITS, custom) as pool:
        assert reported(await pool.score(items("fork_and_leave_one_behind", "a"))) == [0.5, 1.0]
        groups = _sessions_of(_children())
        assert len(groups) == 2
    async with asyncio.timeout(300):
        while any(map(_is_running, groups)):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("deed", ["take_the_pipes", "answer_too_deep", "close_the_pipes"])
async def test_a_scorer_that_meddles_with_the_pipes_gets_no_score(
    custom: CustomRewardFunctionConfig, deed: str
) -> None:
    async with running_scorer_pool(LIMITS, custom) as pool:
        assert reported(await pool.score(items(deed))) == [FailureKind.SCORER_CRASH]
        assert reported(await pool.score(items(*GOOD))) == [1.0, 2.0, 3.0, 4.0]


REPETITIVE = (
    "<think>" + "</think>\\boxed{" * 15_000,
    "<answer>" * 25_000,
    "\\boxed{" + "\\text{" * 30_000 + "}",
    "\\boxed{" + "(" * 150_000 + "}",
    "\\boxed{" + "1" * 150_000 + "}",
    "#### " + "1,." * 60_000,
    "Answer: " + "\\text{" * 200 + "$" * 200,
)


async def test_repetition_without_end_is_wrong_and_not_slow() -> None:
    names = sorted(set(RULES) - {"math_verify", "program_tests"})
    limits = ScorerPoolConfig(num_workers=1, timeout_s=60.0)
    routes = {name: name for name in names}
    async with running_scorer_pool(limits, CustomRewardFunctionConfig(), routes) as pool:
        for name in names:
            asked = [ScorerInput(name, response, "A") for response in REPETITIVE]
            worst = -1.0 if name.startswith("math_dapo") else 0.0
            outcomes = reported(await pool.score(asked))
            assert outcomes == [worst] * len(REPETITIVE), name


def _children() -> list[int]:
    return [pid for pid, (parent, _) in _processes().items() if parent == os.getpid()]


def _sessions_of(leaders: list[int]) -> list[int]:
    return [pid for pid, (_, session) in _processes().items() if session in leaders]


def _processes() -> dict[int, tuple[int, int]]:
    """Parent and session by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            found[int(entry.name)] = (int(fields[1]), int(fields[3]))
        except (OSError, ValueError, IndexError):
            continue
    return found


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
