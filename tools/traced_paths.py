"""Which of the project's files and functions a piece of work passes, by a profile hook.

Each path runs in this process around the doubles of the project's own tests. A function is a code
object's qualified name in its file, so a comprehension or a lambda counts beside the function
around it (on Python 3.11; later versions inline most comprehensions).
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("sluice", "services")
GENERATED = ("sluice", "api")


class CallTrace:
    """The code objects that any thread enters while the trace records."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self._is_recording = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hook into this thread and into those that start meanwhile."""
        before, before_in_threads = sys.getprofile(), threading.getprofile()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before_in_threads)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record within the block."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if self._is_recording and event == "call":
            self._codes.add(frame.f_code)

    def functions(self) -> set[tuple[str, str]]:
        """Return file and qualified name of what was entered in the product."""
        found = set()
        for code in self._codes:
            path = Path(code.co_filename)
            if path.is_relative_to(ROOT) and code.co_name != "<module>":
                parts = path.relative_to(ROOT).parts
                if parts[0] in PRODUCT and parts[:2] != GENERATED:
                    found.add(("/".join(parts), code.co_qualname))
        return found

    def files(self) -> set[str]:
        """Return the product's files in which something was entered."""
        return {file for file, _ in self.functions()}


def prompt_path() -> CallTrace:
    """Trace two prompts from submission to the acknowledged batch, in the reward service alone.

    Strategy `stream`, staleness 1, the ledger in memory; no gRPC, no sqlite. A double grades: the
    scorers' own code does not count, nor do their processes. The first weights are announced
    before.
    """
    # What is computed once and cached belongs to the start, so a first round goes unrecorded.
    asyncio.run(_two_prompts(CallTrace()))
    trace = CallTrace()
    with trace.installed():
        asyncio.run(_two_prompts(trace))
    return trace


async def _two_prompts(trace: CallTrace) -> None:
    import msgspec

    from sluice.config.run import RunConfig
    from tests.support.reward_app import ScriptedClient, publish, running_app, submit, turns

    tree: dict[str, Any] = {
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "algorithm": {"filter_groups": {"enable": True}},
        "sluice": {"asynchrony": {"max_staleness": 1}, "sampling": {"strategy": "stream"}},
    }
    client = ScriptedClient()
    async with running_app(msgspec.convert(tree, RunConfig), client) as app:
        await publish(app, client, 0)
        with trace.recording():
            submit(app, ["answer=1 right=1", "answer=1 right=1"])
            batch = await app.loop.batches.take(1, 0, 5)
            app.loop.batches.acknowledge(batch.batch_id, 1)
            await turns(50)


def submission_to_gradient() -> dict[str, set[str]]:
    """Trace a prompt's stations up to the optimizer step; return the files of each. Loads torch.

    Left out: gRPC, its codec and the servicers; sqlite and scorer processes; weight transfer; what
    the processes do as they start.
    """
    generation, loop, learner = CallTrace(), CallTrace(), CallTrace()
    with tempfile.TemporaryDirectory() as scratch:
        with generation.installed():
            asyncio.run(_one_generate_call(generation, Path(scratch)))
        with loop.installed():
            asyncio.run(_two_loop_steps(loop))
        with learner.installed():
            _one_learner_step(learner, Path(scratch))
    return {
        "reward service": prompt_path().files(),
        "embedded engine": generation.files(),
        "train loop": loop.files(),
        "learner": learner.files(),
    }


async def _one_generate_call(trace: CallTrace, scratch: Path) -> None:
    from tests.support.causal_lms import (
        generate,
        reference_model,
        request,
        running_engine,
        save_config,
    )

    folder = save_config("qwen3", scratch / "engine")
    async with running_engine(folder, reference_model(folder)) as engine:
        with trace.recording():
            await generate(engine, request(samples=2))


async def _two_loop_steps(trace: CallTrace) -> None:
    from tests.support.loop_world import World, run

    world = World(steps=2)
    world.register("a")
    loop = world.loop()
    with trace.recording():
        await run(loop)


def _one_learner_step(trace: CallTrace, scratch: Path) -> None:
    from services.trainer.learner.learner import Learner
    from services.trainer.learner.ranks import ParallelContext
    from tests.support.tiny_policy import make_batch, make_config, save_model

    config = make_config(save_model(scratch / "learner"))
    learner = Learner(config, ParallelContext(), total_steps=10)
    with trace.recording():
        learner.train_step(make_batch(), 1)
