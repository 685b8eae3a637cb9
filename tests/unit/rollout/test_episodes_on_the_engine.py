"""Episodes on the embedded engine: a whole replica, its tokenizer and template, real sampling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from services.reward.episodes.loop import EpisodeGenerator
from services.reward.generation.client import RolloutClient
from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.replica_queue import ReplicaQueue
from sluice.algorithm.episode_rules import EpisodeRules, Observation
from sluice.algorithm.routing import AnnouncedReplica
from sluice.types import Answer, ChatMessage, EpisodeEnd, ReplicaInfo, RolloutGroup
from tests.support.causal_lms import EOS, reference_model
from tests.support.scripted_environment import ThisProcess, group_request, path_of
from tests.support.word_replica import DIALOGUE, word_replica, words

MAX_LEN = 96
NUM_TURNS = 4


def respond(turn: int, _answer: Answer) -> Observation:
    if turn + 1 == NUM_TURNS:
        return Observation(done=True)
    return Observation((ChatMessage("user", words(30 + turn, 31 + turn)),))


async def played(folder: Path) -> RolloutGroup:
    client = RolloutClient(linger_ms=0, timeout_s=60.0, max_message_bytes=1 << 20)
    async with (
        word_replica(folder, template=DIALOGUE, max_model_len=MAX_LEN) as address,
        client,
    ):
        dispatcher = GroupDispatcher(client, ReplicaQueue(1.0), max_attempts=1)
        await dispatcher.announce([AnnouncedReplica(ReplicaInfo("a", "a-1", address, 8), 1)])
        rules = EpisodeRules(MAX_LEN)
        worlds = ThisProcess(respond)
        episodes = EpisodeGenerator(dispatcher, worlds, rules, by_default=True, seed=3)
        request = group_request(4)
        prompt = replace(request.prompt, messages=(ChatMessage("user", words(5, 6)),))
        # Half of the vocabulary ends an answer, so that few are long.
        sampling = replace(
            request.sampling, max_tokens=40, stop_token_ids=tuple(range(50, 100)), seed=5
        )
        return await episodes.generate(replace(request, prompt=prompt, sampling=sampling))


async def test_logprobs_over_turns_are_those_of_the_model_on_the_trained_sequence(
    tmp_path: Path,
) -> None:
    group = await played(tmp_path)
    model = reference_model(tmp_path)
    lengths = set[int]()
    for rollout in group.rollouts:
        assert rollout.end is EpisodeEnd.DONE
        assert [turn.parent for turn in rollout.turns] == [None, 0, 1, 2]
        assert rollout.num_roots == 1
        path = path_of(group.prompt_token_ids, rollout, NUM_TURNS - 1)
        with torch.inference_mode():
            logits = model(torch.tensor([path])).logits[0].double()
        logprobs = torch.log_softmax(logits, -1)
        for number, turn in enumerate(rollout.turns):
            end = len(path_of(group.prompt_token_ids, rollout, number))
            places = range(end - turn.token_ids.size, end)
            expected = [float(logprobs[place - 1, path[place]]) for place in places]
            np.testing.assert_allclose(turn.behavior_logprobs, expected, atol=1e-5)
            lengths.add(turn.token_ids.size)
            # An answer that another token ended is closed as the template does, unsampled.
            if number:
                before = rollout.turns[number - 1].token_ids[-1]
                closes = [] if before == EOS else [EOS]
                assert turn.context.tolist() == [*closes, 1, 29 + number, 30 + number, EOS, 2]
    assert len(lengths) > 1


async def test_a_run_of_episodes_repeats_token_by_token(tmp_path: Path) -> None:
    first, second = await played(tmp_path / "a"), await played(tmp_path / "b")
    for one, other in zip(first.rollouts, second.rollouts, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
    assert len({tuple(rollout.token_ids.tolist()) for rollout in first.rollouts}) == 4
