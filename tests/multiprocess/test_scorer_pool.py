"""The pool of scorer processes: one item's misdeeds are its own, and nothing outlives the pool."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from services.reward.grading.scorer_worker import ScorerWorker
from sluice.config.schema.reward import CustomRewardFunctionConfig, ScorerPoolConfig
from sluice.data.scoring import ScorerInput
from sluice.errors import ConfigError
from sluice.types import Failed, FailureKind, Scored
from tests.support.reward_process import own_children
from tests.support.scorer_pools import hurry, running_scorer_pool, scorer_pool

SCORER = """
import os, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, path=None):
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "spawn":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(path, "w") as file:
            file.write(str(child.pid))
        time.sleep(1000)
    if solution_str == "burn":
        while True:
            pass
    if solution_str == "length":
        return 0.0
    return float(len(solution_str))
"""


@pytest.fixture
def custom(tmp_path: Path) -> CustomRewardFunctionConfig:
    path = tmp_path / "score.py"
    path.write_text(SCORER)
    kwargs: dict[str, object] = {"path": str(tmp_path / "pid")}
    return CustomRewardFunctionConfig(path=str(path), reward_kwargs=kwargs)


def items(*responses: str) -> list[ScorerInput]:
    return [ScorerInput("mine", response, "") for response in responses]


def kinds(outcomes: tuple[Scored | Failed, ...]) -> list[object]:
    return [o.kind if isinstance(o, Failed) else o.score for o in outcomes]


# No busy machine reaches this limit; a test that waits for one gives the sample a shorter one.
LIMITS = ScorerPoolConfig(num_workers=1, timeout_s=300.0, max_response_chars=9)

IMPORTS = """
from importlib.util import find_spec

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(find_spec("services") is not None and find_spec("reward") is None)
"""


async def test_a_scorer_imports_the_package_from_any_folder_and_its_insides_under_no_other_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "score.py"
    path.write_text(IMPORTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    limits = ScorerPoolConfig(num_workers=1)
    async with running_scorer_pool(limits, CustomRewardFunctionConfig(path=str(path))) as pool:
        assert kinds(await pool.score(items("a"))) == [1.0]


async def test_the_other_samples_of_a_group_are_scored_when_one_hangs_and_one_dies(
    custom: CustomRewardFunctionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch, "hang", 0.5)
    async with running_scorer_pool(LIMITS, custom) as pool:
        outcomes = await pool.score(items("a", "hang", "bb", "exit", "ccc"))
        assert kinds(outcomes) == [
            1.0,
            FailureKind.SCORER_TIMEOUT,
            2.0,
            FailureKind.SCORER_CRASH,
            3.0,
        ]
        assert pool.num_replaced == 2
        assert kinds(await pool.score(items("dddd"))) == [4.0]


async def test_a_scorer_that_cannot_be_started_again_is_not_logged_as_replaced(
    custom: CustomRewardFunctionConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_scorer_pool(LIMITS, custom) as pool:
        assert custom.path is not None
        Path(custom.path).write_text("raise OSError('the disk is gone')")
        exited, *others = kinds(await pool.score(items("exit", "a")))
        assert [exited, *others] == [FailureKind.SCORER_CRASH] * 2
        assert pool.num_replaced == 1
    lines = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert lines[0].startswith("scorer replaced (item 0; 1 replaced so far)")
    assert lines[1].startswith("a scorer could not be started: ")
    assert "the disk is gone" in lines[1]
    assert not any("replaced" in line for line in lines[1:])


def nested(depth: int) -> object:
    found: object = 1
    for _ in range(depth):
        found = [found]
    return found


async def test_an_item_that_cannot_be_sent_is_unscorable_and_the_others_are_graded(
    custom: CustomRewardFunctionConfig,
) -> None:
    async with running_scorer_pool(LIMITS, custom) as pool:
        for value in (2**80, -(2**63) - 1, nested(5000)):
            unsendable = ScorerInput("mine", "ccc", "", {"id": value})
            outcomes = await pool.score([*items("a", "bb"), unsendable, *items("dddd")])
            assert kinds(outcomes) == [1.0, 2.0, FailureKind.UNSCORABLE, 4.0]
            assert isinstance(outcomes[2], Failed)
            assert "extra_info" in outcomes[2].detail
            assert kinds(await pool.score([unsendable])) == [FailureKind.UNSCORABLE]
        assert pool.num_replaced == 0


async def test_a_reward_function_of_verl_reads_the_number_of_turns(tmp_path: Path) -> None:
    # As verl's naive manager calls it, for a single answer and for one after a call of a tool.
    path = tmp_path / "turns.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    assert extra_info['rollout_reward_scores'] == {} and extra_info['index'] == 3\n"
        "    return (extra_info['num_turns'] - 2) / 2 * 0.25\n"
    )
    item = ScorerInput("mine", "7", "7", {"index": 3, "num_turns": None})
    several = msgspec.structs.replace(item, num_turns=4)
    function = CustomRewardFunctionConfig(path=str(path))
    async with running_scorer_pool(LIMITS, function) as pool:
        assert kinds(await pool.score([item, several])) == [0.0, 0.25]


async def test_many_slow_samples_have_a_deadline_each_and_not_together(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\ndef compute_score(**kw):\n    time.sleep(2.6)\n    return 1.0\n")
    custom = CustomRewardFunctionConfig(path=str(path))
    async with running_scorer_pool(ScorerPoolConfig(timeout_s=15.0), custom) as pool:
        assert kinds(await pool.score(items(*"abcdef"))) == [1.0] * 6
        assert pool.num_replaced == 0


async def test_what_a_scorer_started_is_killed_with_it(
    custom: CustomRewardFunctionConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    hurry(monkeypatch, "spawn", 0.0, lambda: pid.exists() and pid.read_text() != "")
    async with running_scorer_pool(LIMITS, custom) as pool:
        assert kinds(await pool.score(items("spawn"))) == [FailureKind.SCORER_TIMEOUT]
        child = int(pid.read_text())
        async with asyncio.timeout(300):
            while _is_running(child):
                await asyncio.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def test_a_cancelled_request_leaves_no_half_answer_behind(
    custom: CustomRewardFunctionConfig,
) -> None:
    async with running_scorer_pool(LIMITS, custom) as pool:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await pool.score(items("hang"))
        assert kinds(await pool.score(items("a"))) == [1.0]


async def test_a_process_that_died_between_requests_is_replaced_unnoticed(
    custom: CustomRewardFunctionConfig,
) -> None:
    async with running_scorer_pool(LIMITS, custom) as pool:
        (pid,) = own_children()
        os.kill(pid, 9)
        assert kinds(await pool.score(items("a", "bb"))) == [1.0, 2.0]


async def test_only_the_end_of_a_long_response_is_graded(
    custom: CustomRewardFunctionConfig,
) -> None:
    async with running_scorer_pool(LIMITS, custom) as pool:
        assert kinds(await pool.score(items("x" * 10_000))) == [9.0]


async def test_requests_share_the_processes_and_all_are_answered(
    custom: CustomRewardFunctionConfig,
) -> None:
    limits = ScorerPoolConfig(num_workers=2, timeout_s=300.0)
    async with running_scorer_pool(limits, custom) as pool, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(pool.score(items("x" * n))) for n in range(50)]
    assert [kinds(task.result()) for task in asked] == [[float(n)] for n in range(50)]


async def test_no_process_outlives_the_pool(custom: CustomRewardFunctionConfig) -> None:
    async with running_scorer_pool(ScorerPoolConfig(num_workers=3), custom):
        assert len(own_children()) == 3
    assert own_children() == []


async def test_a_function_that_ends_its_process_while_loading_is_a_configuration_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "quits.py"
    path.write_text("import os\nos._exit(5)\n")
    pool = scorer_pool(ScorerPoolConfig(), CustomRewardFunctionConfig(path=str(path)))
    with pytest.raises(ConfigError, match=r"quits\.py ended with code 5"):
        await pool.start()
    await pool.stop()


async def test_a_scorer_that_is_killed_while_it_loads_is_started_again(tmp_path: Path) -> None:
    path, seen = tmp_path / "killed.py", tmp_path / "seen"
    path.write_text(
        f"import os, signal\nif not os.path.exists({str(seen)!r}):\n"
        f"    open({str(seen)!r}, 'w').close()\n    os.kill(os.getpid(), signal.SIGKILL)\n{SCORER}"
    )
    function = CustomRewardFunctionConfig(path=str(path))
    async with running_scorer_pool(LIMITS, function) as pool:
        assert kinds(await pool.score(items("four"))) == [4.0]
    assert seen.exists()


async def test_routes_lead_any_data_source_to_a_built_in_scorer() -> None:
    routes = {"mine": "gsm8k_flexible"}
    async with running_scorer_pool(LIMITS, CustomRewardFunctionConfig(), routes) as pool:
        asked = [
            ScorerInput("mine", "x" * 100 + " 7", "7"),
            ScorerInput("openai/gsm8k", "#### 8", "7"),
            ScorerInput("unknown", "7", "7"),
        ]
        outcomes = await pool.score(asked)
        assert kinds(outcomes) == [1.0, 0.0, FailureKind.UNSCORABLE]
        assert isinstance(outcomes[2], Failed)
        assert "data_source 'unknown'" in outcomes[2].detail


def of_json(source: str, response: str, truth: str) -> ScorerInput:
    return ScorerInput(source, response, truth, truth_is_json=True)


async def test_a_users_function_gets_the_ground_truth_as_the_row_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "value.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 1.0, 'pred': repr(ground_truth)}\n"
    )
    function = CustomRewardFunctionConfig(path=str(path))
    truths = ("72", "72.0", "true", '["a", 1]', '{"target": ["a"]}')
    as_values = [of_json("mine", "?", truth) for truth in truths]
    as_texts = [msgspec.structs.replace(one, truth_is_json=False) for one in as_values]
    async with running_scorer_pool(LIMITS, function) as pool:
        outcomes = await pool.score([*as_values, *as_texts])
    predictions = [one.prediction for one in outcomes if isinstance(one, Scored)]
    assert predictions == [*(repr(json.loads(truth)) for truth in truths), *map(repr, truths)]


async def test_built_in_scorers_read_values_where_they_can_and_refuse_the_others() -> None:
    asked = [
        of_json("searchR1_nq", "<answer>B</answer>", '{"target": ["a", "b"]}'),
        of_json("searchR1_nq", "<answer>b</answer>", '["a"]'),
        of_json("searchR1_nq", "<answer>72</answer>", "72"),
        of_json("openai/gsm8k", "#### 72", "72"),
        of_json("openai/gsm8k", "#### 71", "72"),
        of_json("openai/gsm8k", "#### 72", '["72"]'),
        of_json("searchR1_nq", "<answer>72</answer>", "[72]"),
    ]
    limits = msgspec.structs.replace(LIMITS, max_response_chars=99)
    async with running_scorer_pool(limits, CustomRewardFunctionConfig()) as pool:
        outcomes = await pool.score(asked)
    assert kinds(outcomes[:5]) == [1.0, 0.0, 1.0, 1.0, 0.0]
    for outcome in outcomes[5:]:
        assert isinstance(outcome, Failed)
        assert outcome.kind is FailureKind.UNSCORABLE
        assert "reward.custom_reward_function.path" in outcome.detail


async def test_a_route_to_no_scorer_is_known_before_the_first_sample() -> None:
    pool = scorer_pool(LIMITS, CustomRewardFunctionConfig(), {"mine": "gsm"})
    with pytest.raises(ConfigError, match="no scorer is called 'gsm'"):
        await pool.start()
    await pool.stop()


async def test_only_what_the_scorer_looks_at_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[ScorerInput] = []
    real = ScorerWorker.score

    async def watched(worker: ScorerWorker, asked: Sequence[ScorerInput]) -> object:
        sent.extend(asked)
        return await real(worker, asked)

    monkeypatch.setattr(ScorerWorker, "score", watched)
    limits = ScorerPoolConfig(num_workers=1)
    long = "x" * 5000 + " Answer: 7"
    async with running_scorer_pool(limits, CustomRewardFunctionConfig()) as pool:
        asked = [ScorerInput("aime24", long, "7"), ScorerInput("hiyouga/geometry3k", long, "7")]
        assert kinds(await pool.score(asked)) == [1.0, 0.0]
    assert [item.response for item in sent] == [long[-300:], long]
