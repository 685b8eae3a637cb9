"""A reward model over HTTP: real connections, and what a broken server does to a sample."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from sluice.config.run import RunConfig
from sluice.config.schema.reward import (
    CustomRewardFunctionConfig,
    RewardConfig,
    RewardModelConfig,
    ScorerPoolConfig,
)
from sluice.data.prompt_rows import PromptRow
from sluice.data.scoring import ScorerInput
from sluice.doctor.reward import try_responses
from sluice.errors import ConfigError
from sluice.types import ChatMessage, Failed, FailureKind, Scored
from tests.support.scorer_pools import running_scorer_pool, scorer_pool

POOL = ScorerPoolConfig(num_workers=1, timeout_s=300.0)
RULES_ONLY = CustomRewardFunctionConfig()
HANGS_S = 600.0
TEMPLATE = "{question}|{response}|{ground_truth}"
Behaviour = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Behaves as the server's `behaviour` says and remembers requests."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        try:
            self.server.behaviour(self)  # type: ignore[attr-defined]
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def is_over(self, seconds: float) -> bool:
        """Wait for the end of the server."""
        return self.server.released.wait(seconds)  # type: ignore[attr-defined,no-any-return]

    @property
    def number(self) -> int:
        return len(self.server.requests)  # type: ignore[attr-defined]


def completion(text: str | None) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@contextmanager
def served(
    behaviour: Behaviour, request_timeout_s: float = 60.0
) -> Iterator[tuple[RewardModelConfig, list[Any]]]:
    """A server on a free port, the settings to reach it, and the requests it got."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.behaviour, server.requests = behaviour, []  # type: ignore[attr-defined]
    server.released = released = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    settings = RewardModelConfig(
        base_url=url,
        model_path="judge",
        prompt_template=TEMPLATE,
        request_timeout_s=request_timeout_s,
    )
    try:
        yield settings, server.requests  # type: ignore[attr-defined]
    finally:
        released.set()
        server.shutdown()
        server.server_close()
        thread.join()


ITEM = ScorerInput("mine", "It is 4.", "4", {}, "2+2?")


async def outcome_of(settings: RewardModelConfig) -> tuple[Scored | Failed, int]:
    async with running_scorer_pool(POOL, RULES_ONLY, None, settings) as pool:
        (outcome,) = await pool.score([ITEM])
        return outcome, pool.num_replaced


async def test_the_models_number_is_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with served(lambda handler: handler.answer(completion("Grade: 0.75"))) as (settings, requests):
        settings = msgspec.structs.replace(settings, api_key_env="JUDGE_KEY")
        outcome, _ = await outcome_of(settings)
    assert outcome == Scored(0.75, 0.75, {"acc": 0.75})
    ((path, headers, body),) = requests
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body["model"] == "judge"
    assert body["messages"] == [{"role": "user", "content": "2+2?|It is 4.|4"}]
    assert body["temperature"] == 0


def test_reward_try_asks_the_model_that_the_run_would_ask() -> None:
    row = PromptRow((ChatMessage("user", "2+2?"),), "mine", "4", {}, "row 0")
    with served(lambda handler: handler.answer(completion("Grade: 0.75"))) as (settings, requests):
        reward = RewardConfig(
            scorer_pool=POOL, reward_model=msgspec.structs.replace(settings, enable=True)
        )
        config = msgspec.structs.replace(RunConfig(), reward=reward)
        answers, _ = try_responses(config, [(row, "It is 4.")], 300.0)
    assert [one.score for one in answers] == [0.75]
    ((_, _, body),) = requests
    assert body["messages"] == [{"role": "user", "content": "2+2?|It is 4.|4"}]


def _hang(handler: Handler) -> None:
    handler.is_over(HANGS_S)


def _drip(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    while not handler.is_over(0.1):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def _flood(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b"x" * 2**20)
    handler.close_connection = True


def _hang_up(handler: Handler) -> None:
    handler.close_connection = True


def _redirect(handler: Handler) -> None:
    handler.send_response(302)
    handler.send_header("Location", "/elsewhere")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


NO_ANSWERS: tuple[tuple[Behaviour, int, str], ...] = (
    (_hang_up, 3, "RemoteDisconnected"),
    (lambda h: h.answer(b"overloaded", 500), 3, "status 500: overloaded"),
    (lambda h: h.answer(b"slow down", 429), 3, "status 429"),
    (lambda h: h.answer(b"no such model", 404), 1, "status 404: no such model"),
    (_redirect, 1, "status 302"),
    (_flood, 1, "more than 1048576 bytes"),
    (lambda h: h.answer(b"<html>"), 1, "no chat completion"),
    (lambda h: h.answer(b'{"choices": "\xff"}'), 1, "no chat completion"),
    (lambda h: h.answer(b'{"choices": []}'), 1, "without choices"),
    (lambda h: h.answer(completion(None)), 1, "no chat completion"),
    (lambda h: h.answer(completion("NaN")), 1, "no number"),
    (lambda h: h.answer(completion("Infinity")), 1, "no number"),
    (lambda h: h.answer(completion("17")), 1, "no number from 0 to 1"),
)


async def test_what_is_no_answer_is_no_score() -> None:
    behaves: list[Behaviour] = [_hang]
    with served(lambda handler: behaves[-1](handler)) as (settings, requests):
        async with running_scorer_pool(POOL, RULES_ONLY, None, settings) as pool:
            for behaviour, num_requests, detail in NO_ANSWERS:
                behaves.append(behaviour)
                requests.clear()
                (outcome,) = await pool.score([ITEM])
                assert isinstance(outcome, Failed), detail
                assert outcome.kind is FailureKind.UNSCORABLE
                assert detail in outcome.detail
                assert len(requests) == num_requests, detail
            assert pool.num_replaced == 0


@pytest.mark.parametrize("behaviour", [_hang, _drip])
async def test_what_does_not_come_in_time_is_asked_for_again_and_is_no_score(
    behaviour: Behaviour,
) -> None:
    # A busy machine may not even send a request in the first of these times.
    for request_timeout_s in (0.5, 20.0):
        with served(behaviour, request_timeout_s) as (settings, requests):
            outcome, num_replaced = await outcome_of(settings)
            if len(requests) == 3:
                break
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.UNSCORABLE
    assert "in time" in outcome.detail
    assert (len(requests), num_replaced) == (3, 0)


async def test_an_answer_after_a_failed_attempt_counts() -> None:
    def recover(handler: Handler) -> None:
        handler.answer(completion("1"), 200 if handler.number > 1 else 503)

    with served(recover) as (settings, requests):
        outcome, _ = await outcome_of(settings)
    assert isinstance(outcome, Scored)
    assert len(requests) == 2


async def test_a_model_that_is_not_there_is_no_score() -> None:
    with served(_hang) as (settings, _):
        pass
    outcome, _ = await outcome_of(settings)
    assert isinstance(outcome, Failed)
    assert "ConnectionRefusedError" in outcome.detail


async def test_all_attempts_end_before_the_samples_own_limit() -> None:
    # What is left of the first limit may be less than a busy machine keeps a process waiting.
    for timeout_s in (8.0, 120.0):
        limits = ScorerPoolConfig(num_workers=1, timeout_s=timeout_s)
        with served(_hang) as (settings, _):
            patient = msgspec.structs.replace(settings, request_timeout_s=60.0, max_attempts=9)
            async with running_scorer_pool(limits, RULES_ONLY, None, patient) as pool:
                (outcome,) = await pool.score([ITEM])
                num_replaced = pool.num_replaced
        if not num_replaced:
            break
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.UNSCORABLE
    assert num_replaced == 0


async def test_impossible_settings_are_known_before_the_first_sample() -> None:
    settings = RewardModelConfig(base_url="judge:8000", model_path="judge")
    pool = scorer_pool(POOL, RULES_ONLY, None, settings)
    with pytest.raises(ConfigError, match=r"reward\.reward_model\.base_url = 'judge:8000'"):
        await pool.start()
    await pool.stop()


async def test_a_custom_function_wins_over_the_model(tmp_path: Any) -> None:
    path = tmp_path / "score.py"
    path.write_text("def compute_score(**call):\n    return 0.125\n")
    custom = CustomRewardFunctionConfig(path=str(path))
    settings = RewardModelConfig(base_url="http://127.0.0.1:9", model_path="judge")
    async with running_scorer_pool(POOL, custom, None, settings) as pool:
        (outcome,) = await pool.score([ITEM])
    assert isinstance(outcome, Scored)
    assert outcome.score == 0.125
