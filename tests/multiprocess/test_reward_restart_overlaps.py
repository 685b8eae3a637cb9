"""A reward service that restarts during a step generates for the next one at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.reward_process import reward_process
from tests.support.reward_scenarios import mixed, until
from tests.support.scripted_rollout import ScriptedReplica, scripted_replicas

BATCH = 8


async def test_the_next_batch_is_generated_while_the_one_in_hand_is_trained(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(64), data__shuffle=False, sluice__asynchrony__max_staleness=1)
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            await service.announce(0, [replica])
            in_hand = await service.take(1, 0)
            service.process.kill()
            await service.wait()
        async with reward_process(config) as service:
            await service.announce(0, [replica], resume_from=in_hand.progress)

            async def kept() -> bool:
                return bool((await service.status()).groups_kept >= BATCH)

            await until(kept)
            await service.acknowledge(in_hand, 1)
            await service.announce(1, [replica], resume_from=in_hand.progress)
            following = await service.take(2, 1)
            status = await service.status()
    assert {g.prompt_id for g in in_hand.groups}.isdisjoint(g.prompt_id for g in following.groups)
    assert {r.oldest_version for g in following.groups for r in g.rollouts} == {0}
    assert status.statistics["reward/prompts_lost"] == 0
