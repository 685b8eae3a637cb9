"""What the reward service remembers does not grow with the length of a run."""

from __future__ import annotations

import gc
from collections import deque
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import msgspec
import pytest

from services.reward.app import RewardApp, RunFiles
from services.reward.ledger.ledger import ACKNOWLEDGED_REMEMBERED, PromptLedger
from sluice.config.run import RunConfig
from sluice.errors import InvalidRequestError, NotFoundError
from sluice.types import ChatMessage, Prompt, PromptEnd, PromptOrigin
from tests.support.reward_app import ScriptedClient, replica, running_app, submit

NEVER_ENTERED = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType)


def config() -> RunConfig:
    tree = {
        "data": {"train_batch_size": 1},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "algorithm": {"filter_groups": {"enable": True, "min_yield_groups": 8}},
        "sluice": {"asynchrony": {"max_staleness": 0}},
    }
    return msgspec.convert(tree, RunConfig)


def num_held(root: object) -> int:
    """Entries of all containers that `root` leads to."""
    found, seen, queue = 0, set[int](), deque[Any]([root])
    while queue:
        item = queue.popleft()
        if id(item) in seen or isinstance(item, NEVER_ENTERED):
            continue
        seen.add(id(item))
        if isinstance(item, dict | list | set | deque):
            found += len(item)
        queue.extend(gc.get_referents(item))
    return found


async def steps(app: RewardApp, client: ScriptedClient, first: int, count: int) -> None:
    for step in range(first, first + count):
        client.versions["a"] = step
        await app.loop.announce("trainer", step, [replica("a", step)], None)
        names = 3 * step
        submit(app, ["answer=1 right=0", "answer=1 right=2", "answer=1 right=1"], first=names)
        batch = await app.loop.batches.take(step, step, 60)
        app.loop.batches.acknowledge(batch.batch_id, step)


async def test_nothing_grows_with_steps_or_prompts() -> None:
    client, files = ScriptedClient(), RunFiles(ledger=PromptLedger(ended_ids=8))
    async with running_app(config(), client, files=files) as app:
        sizes = []
        for first in (0, 100, 200):
            await steps(app, client, first, 100)
            client.calls.clear()
            sizes.append(num_held(app))
    assert max(sizes) - min(sizes) <= 10, sizes


def client_prompt(ledger: PromptLedger, name: str) -> Prompt:
    turns = (ChatMessage("user", "?"),)
    made = Prompt(name, ledger.next_sequence(), turns, "math_dapo", "1", PromptOrigin.CLIENT, None)
    ledger.accept(made)
    return made


def test_an_id_is_refused_while_pending_and_among_the_last_that_ended() -> None:
    ledger = PromptLedger(ended_ids=2)
    client_prompt(ledger, "pending")
    for name in "abc":
        client_prompt(ledger, name)
        ledger.end(name, PromptEnd.TRAINED)
    for name in ("pending", "b", "c"):
        with pytest.raises(InvalidRequestError, match=f"'{name}' was used before"):
            client_prompt(ledger, name)
    client_prompt(ledger, "a")


async def test_the_last_acknowledgements_may_be_repeated_and_older_ones_are_unknown() -> None:
    client = ScriptedClient()
    async with running_app(config(), client) as app:
        batch_ids = []
        for step in range(ACKNOWLEDGED_REMEMBERED + 1):
            client.versions["a"] = step
            await app.loop.announce("trainer", step, [replica("a", step)], None)
            submit(app, ["answer=1 right=1"], first=step)
            batch_ids.append((await app.loop.batches.take(step, step, 60)).batch_id)
            app.loop.batches.acknowledge(batch_ids[-1], step)
        for batch_id in batch_ids[1:]:
            app.loop.batches.acknowledge(batch_id, 0)
        with pytest.raises(NotFoundError):
            app.loop.batches.acknowledge(batch_ids[0], 0)
