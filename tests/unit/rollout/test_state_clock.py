"""Every second of a replica belongs to one state."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.threaded_engine import EngineState, StateTimer
from services.rollout.engines.weight_inbox import LiveWeights
from sluice.concurrency.process import process_age_s
from sluice.errors import WeightSyncError
from tests.support.causal_lms import (
    generate,
    load_weights,
    reference_model,
    request,
    running_engine,
    save_config,
    weights_of,
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_path: Path) -> PreTrainedModel:
    return reference_model(model_path)


class Clock:
    """Time that passes only on request."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@given(
    st.floats(0, 1e4),
    st.lists(st.tuples(st.sampled_from(list(EngineState)), st.floats(0, 1e4))),
)
def test_the_states_add_up_to_the_time_that_passed(
    elapsed_s: float, changes: list[tuple[EngineState, float]]
) -> None:
    time = Clock()
    clock, expected = StateTimer(elapsed_s, time), dict.fromkeys(map(str, EngineState), 0.0)
    expected["starting"] += elapsed_s
    for state, seconds in changes:
        clock.enter(state)
        time.now_s += seconds
        expected[state] += seconds
    assert clock.seconds_by_state() == pytest.approx(expected, abs=1e-6)


def test_the_present_state_counts_up_to_the_moment_of_the_question() -> None:
    time = Clock()
    clock = StateTimer(2.0, time)
    clock.enter(EngineState.IDLE)
    time.now_s += 3.0
    assert clock.seconds_by_state()["idle"] == 3.0
    time.now_s += 1.0
    assert clock.seconds_by_state()["idle"] == 4.0
    assert clock.seconds_by_state()["starting"] == 2.0


def state_of(engine: EmbeddedEngine) -> EngineState:
    return engine._clock.state


async def test_an_engine_is_starting_until_its_first_weights_serve_and_idle_without_work(
    model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path) as engine:
        await engine.check_alive()
        before = (await engine.check_alive()).seconds_by_state
        assert (before["idle"], before["generating"], before["swapping"]) == (0.0, 0.0, 0.0)
        assert before["starting"] > 0.0
        await load_weights(engine, weights_of(model, engine), 1, "one")
        assert (await engine.check_alive()).seconds_by_state["swapping"] == 0.0
        await generate(engine, request(samples=4))
        await load_weights(engine, weights_of(model, engine), 2, "two")
        after = (await engine.check_alive()).seconds_by_state
        assert state_of(engine) is EngineState.IDLE
    assert min(after["idle"], after["generating"], after["swapping"]) > 0.0


async def test_a_request_that_comes_during_a_swap_or_a_lost_caller_does_not_end_it(
    model_path: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end, take = threading.Event(), threading.Event(), LiveWeights.take

    def slowly(weights: LiveWeights, tensors: Mapping[str, torch.Tensor]) -> None:
        has_begun.set()
        assert may_end.wait(60)
        take(weights, tensors)

    async with running_engine(model_path, model) as engine, asyncio.TaskGroup() as tasks:
        monkeypatch.setattr(LiveWeights, "take", slowly)
        loading = tasks.create_task(load_weights(engine, weights_of(model, engine), 2, "two"))
        assert await asyncio.to_thread(has_begun.wait, 60)
        tasks.create_task(generate(engine, request(samples=1)))
        while not engine.load().slots_busy:
            await asyncio.sleep(0.001)
        in_swap = [state_of(engine)]
        loading.cancel()
        await asyncio.wait([loading])
        in_swap.append(state_of(engine))
        may_end.set()
        while state_of(engine) is EngineState.SWAPPING:
            await asyncio.sleep(0.001)
    assert in_swap == [EngineState.SWAPPING] * 2
    assert state_of(engine) is not EngineState.SWAPPING


async def test_weights_that_do_not_fit_leave_the_engine_in_the_state_it_was_in(
    model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path, model) as engine:
        for _ in range(2):  # what is done first is reported second
            await engine.check_alive()
        with pytest.raises(WeightSyncError):
            await load_weights(engine, {}, 2, "two")
        await engine.check_alive()
        assert state_of(engine) is EngineState.IDLE


async def test_the_states_add_up_to_the_age_of_the_process(
    model_path: Path, model: PreTrainedModel
) -> None:
    async with running_engine(model_path, model) as engine:
        await generate(engine, request(samples=8, max_tokens=30))
        for _ in range(20):
            younger_s = process_age_s()
            spent_s = sum(engine.load().seconds_by_state.values())
            older_s = process_age_s()
            # The kernel gives a process's start in ticks of 10 ms.
            assert younger_s - 0.02 <= spent_s <= older_s + 0.02
