"""`sluice generate`, `submit` and `score` against a scripted run over real sockets."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sluice.cli.main import commands
from sluice.concurrency.process import ProcessMark, host_of_pids, mark_process
from sluice.errors import DataError, DeadlineError, InvalidRequestError
from tests.support.image_files import png
from tests.support.threaded_run import folder_of, threaded_run
from tests.support.token_replica import TokenReplica

WHOLE = "[0][1][2][3][4][5]"
PROMPT = {
    "prompt_id": "a",
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "data_source": "math_dapo",
    "ground_truth": "4",
}


@pytest.fixture
def replica() -> TokenReplica:
    return TokenReplica()


@pytest.fixture
def run(replica: TokenReplica, tmp_path: Path) -> Iterator[Path]:
    with threaded_run(replica) as address:
        yield folder_of(address, tmp_path)


def sluice(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(commands, arguments, input=stdin)


def rows(file: Path, *values: dict[str, object]) -> str:
    file.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return str(file)


def test_responses_are_shown_with_their_version(run: Path, replica: TokenReplica) -> None:
    shown = sluice("generate", "hi", "--run", str(run), "-n", "2", "--priority", "3")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[:2] == ["[0] version 3 (stop)", WHOLE]
    (request,) = replica.requests
    assert request.priority == 3
    assert [turn.role for turn in request.prompt.chat.messages] == ["user"]


def test_a_prompt_may_come_from_stdin_raw_and_be_streamed(run: Path, replica: TokenReplica) -> None:
    options = ("--run", str(run), "--raw", "--stream", "--token-budget", "2")
    shown = sluice("generate", "-", *options, stdin="from stdin")
    assert shown.stdout == "[0][1]\n"
    assert replica.requests[0].prompt.text == "from stdin"


def test_each_stop_string_reaches_the_replica(run: Path, replica: TokenReplica) -> None:
    shown = sluice("generate", "hi", "--run", str(run), "--stop", "][2", "--stop", "END")
    assert shown.exit_code == 0, shown.output
    assert list(replica.requests[0].sampling.stop) == ["][2", "END"]
    refused = sluice("generate", "hi", "--run", str(run), "--stop", "")
    assert "stop[0]: empty" in str(refused.exception)


def test_images_stand_where_the_prompt_says_or_before_it(
    run: Path, replica: TokenReplica, tmp_path: Path
) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png())
    one = ("--run", str(run), "--image", str(file))
    for prompt, images in (("hi", one), ("how <image> many?", one), ("hi", (*one, *one[2:]))):
        shown = sluice("generate", prompt, *images)
        assert shown.exit_code == 0, shown.output
    chats = [request.prompt.chat for request in replica.requests]
    assert [chat.messages[0].content for chat in chats] == [
        "<image>hi",
        "how <image> many?",
        "<image><image>hi",
    ]
    assert [list(chat.images) for chat in chats] == [[png()], [png()], [png()] * 2]
    for wrong, error in (
        (("--raw", *one), "--image: cannot be used with --raw"),
        (one, "2 times <image>"),
    ):
        refused = sluice("generate", "<image><image>", *wrong)
        assert error in str(refused.exception)


def test_a_prompt_that_is_not_text_is_refused(run: Path) -> None:
    shown = CliRunner().invoke(commands, ["generate", "-", "--run", str(run)], input=b"\xff")
    assert isinstance(shown.exception, DataError)
    assert "stdin: not text" in str(shown.exception)


def test_json_holds_tokens_logprobs_and_versions(run: Path) -> None:
    shown = sluice("generate", "hi", "--run", str(run), "--json", "--system", "be brief")
    found = json.loads(shown.stdout)
    assert found["token_ids"] == list(range(6))
    assert len(found["logprobs"]) == 6
    assert found["versions"] == [[3, 0, 6]]


def test_a_deadline_is_an_error(run: Path, replica: TokenReplica) -> None:
    replica.hangs_after = 0
    shown = sluice("generate", "hi", "--run", str(run), "--deadline", "0.3")
    assert isinstance(shown.exception, DeadlineError)


def test_watched_prompts_are_shown_to_their_end(run: Path, tmp_path: Path) -> None:
    file = rows(tmp_path / "prompts.jsonl", PROMPT, {**PROMPT, "prompt_id": "bad"})
    shown = sluice("submit", file, "--run", str(run), "--watch")
    assert shown.exit_code == 1  # one was refused
    assert shown.stdout.splitlines() == [
        "a accepted",
        "bad refused: the id is taken",
        "a trained in step 1 rewards [1.0, -1.0]",
    ]
    assert shown.stderr.splitlines()[-1] == "1 accepted, 1 refused, 1 trained"


def test_without_watching_receipts_are_all(run: Path, tmp_path: Path) -> None:
    file = rows(tmp_path / "prompts.jsonl", PROMPT)
    shown = sluice("submit", file, "--run", str(run), "--json")
    assert shown.exit_code == 0
    assert [json.loads(line)["event"] for line in shown.stdout.splitlines()] == ["accepted"]


def test_responses_are_graded_in_order_and_a_failure_is_exit_code_1(
    run: Path, tmp_path: Path
) -> None:
    asked = [
        {"data_source": "math_dapo", "ground_truth": "4", "response": text}
        for text in ("4", "5", "slow")
    ]
    file = rows(tmp_path / "responses.jsonl", *asked)
    shown = sluice("score", file, "--run", str(run))
    assert shown.exit_code == 1
    assert shown.stdout.splitlines() == [
        "[0] score 1 acc=1",
        "[1] score 0 acc=0",
        "[2] failed: scorer_timeout: 10 s",
    ]
    assert "2 of 3 graded, mean score 0.5" in shown.stderr
    one = rows(tmp_path / "one.jsonl", asked[0])
    graded = sluice("score", one, "--run", str(run), "--json", "--deadline", "30")
    assert graded.exit_code == 0
    assert json.loads(graded.stdout)["score"] == 1.0
    refused = sluice("score", one, "--run", str(run), "--deadline", "0")
    assert isinstance(refused.exception, InvalidRequestError)


def test_a_row_may_hold_the_question_that_a_reward_model_reads(run: Path, tmp_path: Path) -> None:
    row = {"data_source": "math_dapo", "ground_truth": "4", "response": "4"}
    file = rows(tmp_path / "responses.jsonl", {**row, "question": "What is 2 + 2?"}, row)
    shown = sluice("score", file, "--run", str(run))
    expected = ["[0] score 1 acc=1 prediction 'What is 2 + 2?'", "[1] score 1 acc=1"]
    assert shown.stdout.splitlines() == expected


def test_resume_ends_the_hold_of_a_guard_and_says_why_it_was(tmp_path: Path) -> None:
    with threaded_run(TokenReplica(), hold_reason="accuracy fell") as address:
        run = str(folder_of(address, tmp_path))
        assert json.loads(sluice("resume", run, "--json").stdout)["reason"] == "accuracy fell"
        again = sluice("resume", run)
        assert again.stdout.endswith("continues after step 2; no guard held it\n")
    gone = sluice("resume", run)
    assert str(gone.exception).startswith("the run is not active.")


@pytest.mark.parametrize("was_killed", [False, True])
@pytest.mark.parametrize(
    "command",
    [("generate", "hi"), ("resume",), ("stop",), ("eval",), ("status",), ("status", "--why")],
)
def test_a_run_whose_processes_have_left_is_not_confused_with_one_at_its_addresses(
    run: Path, command: tuple[str, ...], was_killed: bool, tmp_path: Path
) -> None:
    (tmp_path / "processes").mkdir()
    if was_killed:
        ended_long_ago = ProcessMark("trainer", os.getpid(), host_of_pids(), started=1)
        mark = tmp_path / "processes" / "trainer.json"
        mark.write_text(json.dumps(asdict(ended_long_ago)), encoding="utf-8")
    done = sluice(*command, "--run", str(run))
    if command[0] == "status":
        assert done.stdout.startswith(f"{run}: not running; 0 steps finished")
    else:
        assert "is not active" in str(done.exception)


def test_a_run_with_a_process_in_its_folder_is_asked(run: Path) -> None:
    with mark_process(run, "reward"):
        assert sluice("generate", "hi", "--run", str(run)).exit_code == 0


def test_a_pipe_gets_each_account_of_the_status_on_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = sluice("status", "--run", str(run)).stdout.splitlines()
    for account in ("trainer", "rollout"):
        (line,) = (line for line in lines if line.startswith(f"{account}  "))
        assert "unaccounted" in line
