"""Submitting prompts to a run."""

from __future__ import annotations

from sluice.client.policy_client import NewPrompt, PolicyClient, PromptEvent
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
