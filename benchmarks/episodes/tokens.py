"""Ten thousand episodes through the real loop: what the engine read and sampled against what the
trainer packs, and the trainer's logprobs against those of the embedded engine.

Half of the episodes call a tool and are one root; half think, and their template leaves thoughts
out of history, so that each turn is a root. The engine is scripted; replica, tokenizer, template,
gRPC, environment server and the cutting of batches are real.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from benchmarks.parts import Part
from benchmarks.reporting import print_line
from services.reward.episodes.loop import EpisodeGenerator
from services.reward.generation.client import RolloutClient
from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.replica_queue import ReplicaQueue
from services.trainer.learner.batch.packed_rows import training_rows
from services.trainer.learner.batch.train_batch import BatchCut, split_batch
from services.trainer.learner.model.attention import PACKED_ATTENTION
from services.trainer.learner.model.forward import TokenPass, token_outputs
from services.trainer.learner.ranks import ParallelContext
from sluice.algorithm.episode_rules import EpisodeRules, Observation
from sluice.algorithm.episodes import follows_prompt, path_tokens, training_paths
from sluice.algorithm.routing import AnnouncedReplica
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.environment.v1 import environment_pb2 as environment
from sluice.types import (
    Answer,
    ChatMessage,
    ReplicaInfo,
    RolloutGroup,
    Scored,
    TrainGroup,
)
from tests.support.causal_lms import reference_model
from tests.support.layer_parity import pack
from tests.support.scripted_environment import (
    Played,
    ScriptedEnvironment,
    ThisProcess,
    call_of,
    group_request,
    path_of,
    playing,
    tool_says,
    user_says,
)
from tests.support.word_replica import DIALOGUE, word_replica, words

EPISODES = 10_000
_GROUP, _AT_ONCE, _BUDGET = 8, 25, 8000
_REAL_GROUPS, _REAL_LENGTH, _REAL_TURNS = 50, 96, 4
_LOOKED = "<tool_response>\n"


def measure(episodes: int) -> Mapping[str, Any]:
    """Return the figures of so many episodes."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        counted = asyncio.run(_counted(Path(folder), episodes))
    with tempfile.TemporaryDirectory() as folder:
        error = asyncio.run(_logprob_error(Path(folder)))
    return counted | {"logprob_error": error}


# ------------------------------------------------------------------------------ tokens and places


def _number(episode: str, turn: int) -> int:
    return crc32(f"{episode}/{turn}".encode())


def _looks(prompt: str) -> str:
    """Look until a number is a multiple of three, six times at most."""
    seen = prompt.split(_LOOKED)[1:]
    last = int(seen[-1].partition("\n")[0]) if seen else 1
    return f"Answer: {last}" if last % 3 == 0 or len(seen) == 6 else f"{last}\n{call_of('C')}"


def _tool(episode: str, turn: int, answer: common.Answer) -> environment.Observation:
    if not answer.tool_calls:
        return environment.Observation(done=True)
    return tool_says(str(_number(episode, turn)))


def _thinks(prompt: str) -> str:
    return f"<think>\n{crc32(prompt.encode())}\n</think>\n\nMore."


def _asks(episode: str, turn: int, _answer: common.Answer) -> environment.Observation:
    number = _number(episode, turn)
    if (turn and number % 3 == 0) or turn == 4:
        return environment.Observation(done=True)
    return user_says(f"And {number}?")


async def _counted(folder: Path, episodes: int) -> dict[str, Any]:
    errors, turns, roots = np.zeros(2, np.int64), 0, 0
    kinds = (
        ("qwen2.5", _looks, ScriptedEnvironment(respond=_tool)),
        (
            "qwen3",
            _thinks,
            ScriptedEnvironment(respond=_asks, opening=lambda _: environment.Observation()),
        ),
    )
    for family, policy, world in kinds:
        own = folder / family
        own.mkdir()
        async with playing(own, policy, world, family=family) as played:
            for _ in range(episodes // (2 * _GROUP * _AT_ONCE)):
                groups = await _groups(played, _AT_ONCE)
                errors += _mismatches(played, groups), _miscounted(groups)
                rollouts = [one for group in groups for one in group.rollouts]
                turns += sum(len(one.turns) for one in rollouts)
                roots += sum(one.num_roots for one in rollouts)
                passes = (played.engine.prompts, played.engine.sampled)
                for seen in (*passes, world.opened, world.steps):
                    seen.clear()
    print_line(f"{episodes} episodes, {turns} turns, {roots} roots")
    return {"token_mismatches": int(errors[0]), "loss_count_errors": int(errors[1])}


async def _groups(played: Played, number: int) -> list[RolloutGroup]:
    async with asyncio.TaskGroup() as tasks:
        found = [
            tasks.create_task(played.generator.generate(group_request(_GROUP)))
            for _ in range(number)
        ]
    return [one.result() for one in found]


def _mismatches(played: Played, groups: Sequence[RolloutGroup]) -> int:
    """Count turns and trained paths whose sequence no pass of the engine has read and sampled."""
    engine = played.engine
    passes = zip(engine.prompts, engine.sampled, strict=True)
    seen = {(*read, *sampled) for read, sampled in passes}
    found = 0
    for group in groups:
        for rollout in group.rollouts:
            assert rollout.end is not None, rollout.outcome
            sequences = [
                path_of(group.prompt_token_ids, rollout, number)
                for number in range(len(rollout.turns))
            ]
            for path in training_paths(rollout.turns):
                own = path_tokens(rollout.turns, path).token_ids.tolist()
                before = group.prompt_token_ids.tolist()
                follows = follows_prompt(rollout.turns, path)
                sequences.append([*before, *own] if follows else own)
            found += sum(tuple(one) not in seen for one in sequences)
    return found


def _miscounted(groups: Sequence[RolloutGroup]) -> int:
    """Count sampled tokens that are not in the loss once, and labels that are no sampled token."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    most = max(rollout.num_tokens for rollout in rollouts)
    counts = np.zeros((len(rollouts), most), np.int64)
    expected, ids = np.zeros_like(counts), np.zeros_like(counts)
    for number, rollout in enumerate(rollouts):
        expected[number, : rollout.num_tokens] = 1
        ids[number, : rollout.num_tokens] = rollout.token_ids
    wrong = 0
    cut = BatchCut(len(groups), _BUDGET, None)
    train_groups = [_trained(group) for group in groups]
    for mini_batch in split_batch(
        train_groups, cut, ParallelContext(), step=1, device=torch.device("cpu")
    ):
        for packed in mini_batch.micro_batches:
            rows, columns = packed.batch_rows.numpy(), packed.columns.numpy()
            np.add.at(counts, (rows, columns), 1)
            wrong += int((ids[rows, columns] != packed.labels.numpy()).sum())
    return wrong + int((counts != expected).sum())


def _trained(group: RolloutGroup) -> TrainGroup:
    # Rewards are mixed, since a group without an advantage is not packed.
    scores = tuple(Scored(float(i % 2), float(i % 2), {}) for i in range(len(group.rollouts)))
    return TrainGroup(
        group.prompt.prompt_id, group.prompt_token_ids, group.rollouts, scores, "made up"
    )


# ---------------------------------------------------------------------------------- the two models


async def _logprob_error(folder: Path) -> float:
    """Return the largest difference between engine and trainer over sampled tokens, float32."""
    groups = await _sampled(folder)
    model = reference_model(folder)
    model.set_attn_implementation(PACKED_ATTENTION)
    worst, turns = 0.0, 0
    for group in groups:
        rows = training_rows([_trained(group)], [range(len(group.rollouts))])
        packed = pack(rows)
        with torch.inference_mode():
            found = token_outputs(model, TokenPass(packed)).logprobs
        worst = max(worst, float((found - packed.behavior_logprobs).abs().max()))
        turns += sum(len(rollout.turns) for rollout in group.rollouts)
    print_line(f"{_REAL_GROUPS * _GROUP} episodes of the embedded engine, {turns} turns")
    return worst


def _responds(turn: int, _answer: Answer) -> Observation:
    if turn + 1 == _REAL_TURNS:
        return Observation(done=True)
    return Observation((ChatMessage("user", words(30 + turn, 31 + turn)),))


async def _sampled(folder: Path) -> list[RolloutGroup]:
    client = RolloutClient(linger_ms=0, timeout_s=60.0, max_message_bytes=1 << 20)
    async with (
        word_replica(folder, template=DIALOGUE, max_model_len=_REAL_LENGTH) as address,
        client,
    ):
        dispatcher = GroupDispatcher(client, ReplicaQueue(1.0), max_attempts=1)
        await dispatcher.announce([AnnouncedReplica(ReplicaInfo("a", "a-1", address, 8), 1)])
        episodes = EpisodeGenerator(
            dispatcher,
            ThisProcess(_responds),
            EpisodeRules(_REAL_LENGTH),
            by_default=True,
            seed=3,
        )
        groups = []
        for number in range(_REAL_GROUPS):
            request = group_request(_GROUP)
            message = ChatMessage("user", words(5 + number % 20, 6))
            # Half of the vocabulary ends an answer, so that few are long.
            stops = tuple(range(50, 100))
            sampling = replace(request.sampling, max_tokens=40, stop_token_ids=stops, seed=number)
            request = replace(
                request, prompt=replace(request.prompt, messages=(message,)), sampling=sampling
            )
            groups.append(await episodes.generate(request))
        return groups


PART = Part(
    lambda parsed: measure(parsed.episodes),
    most={"token_mismatches": 0.0, "loss_count_errors": 0.0, "logprob_error": 1e-5},
)
