"""Submitting prompts to a run."""

from __future__ import annotations

import asyncio

import pytest

from sluice.client.policy_client import NewPrompt, PolicyClient, PromptEvent
from sluice.errors import DeadlineError
from sluice.types import ChatMessage
from tests.support.rpc_server import serving
from tests.support.scripted_trainer import ScriptedReward


def prompt(prompt_id: str) -> NewPrompt:
    return NewPrompt(prompt_id, (ChatMessage("user", "2 + 2?"),), "math_dapo", "4")


async def test_receipts_come_for_all_and_outcomes_for_the_accepted() -> None:
    async with serving(reward=ScriptedReward()) as server, PolicyClient(server.address) as client:
        events = [event async for event in client.submit([prompt("a"), prompt("bad")])]
    assert events == [
        PromptEvent("a", "accepted", None, (), ""),
        PromptEvent("bad", "refused", None, (), "the id is taken"),
        PromptEvent("a", "trained", 1, (1.0, -1.0), ""),
    ]


async def test_a_validation_is_of_the_version_that_was_asked_for() -> None:
    async with serving(reward=ScriptedReward()) as server, PolicyClient(server.address) as client:
        result = await client.evaluate(7, n=None, temperature=None)
    assert result.metrics == {"version": 7.0}


async def test_a_validation_may_take_any_time_while_groups_are_validated() -> None:
    reward = ScriptedReward(looks_to_evaluate=12)
    async with serving(reward=reward) as server, PolicyClient(server.address) as client:
        # A look every quarter: three times as long as it may stand still.
        result = await client.evaluate(7, n=None, temperature=None, stall_s=1.0)
    assert result.metrics == {"version": 7.0}


async def test_a_validation_that_stands_still_is_ended_with_an_error_that_names_it() -> None:
    reward = ScriptedReward(looks_to_evaluate=10**9, moves=False)
    async with serving(reward=reward) as server, PolicyClient(server.address) as client:
        with pytest.raises(DeadlineError, match=r"no answer within 0\.4 s while evaluating .* 7"):
            await client.evaluate(7, n=None, temperature=None, stall_s=0.4)
        async with asyncio.timeout(20):
            while not reward.was_cancelled:
                await asyncio.sleep(0.01)
