"""One run under chaos, from its start over calm, faults and quiet to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow.parquet as pq

from sluice.api.trainer.v1 import trainer_pb2
from sluice.config.addresses import peer_address
from sluice.config.run import RunConfig
from sluice.errors import DataError, SluiceError
from sluice.report.run_record import read_run
from sluice.rpc.client import open_channel, trainer_stub, unary_call
from tools.chaos.bookkeeping import (
    ended_as,
    judge_accounting,
    read_dumps,
    read_ledger,
    surviving_steps,
)
from tools.chaos.cable import Cable
from tools.chaos.injection import Injector
from tools.chaos.late_waits import late_waits, limits_of
from tools.chaos.launched_run import LaunchedRun, launched_run
from tools.chaos.observation import Observation, Observer, digest_mismatches
from tools.chaos.preparation import DUMPS, Size, prepare_run
from tools.chaos.schedule import Fault
from tools.chaos.verdict import Findings, Times
from tools.chaos.witness import Question, Witness

if TYPE_CHECKING:
    from rich.console import Console

_START_S, _END_S, _POLL_S, _NEWS_S = 240.0, 120.0, 0.2, 5.0
_LOOPBACK = "127.0.0.1"
_NUM_QUESTIONS = 1000


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done to what: seconds of calm before the faults, seconds of quiet after them."""

    replicas: ClassVar[int] = 2
    size: Size
    seed: int
    schedule: Sequence[Fault]
    calm_s: float
    quiet_s: float


async def run_experiment(
    folder: Path, plan: Plan, plugged: Cable | str, console: Console
) -> Findings:
    """Run all of it.

    Raises:
        RuntimeError: the run did not even start.
    """
    line = None if isinstance(plugged, str) else plugged
    host = _LOOPBACK if line is None else line.near
    console.print("making model and data", highlight=False)
    config, config_file = await asyncio.to_thread(
        prepare_run, folder, plan.size, seed=plan.seed, host=host
    )
    for fault in plan.schedule:
        length = f" for {fault.seconds:g} s" if fault.seconds else ""
        console.print(f"{fault.at_s:7.1f} s  {fault.kind}{length}", highlight=False)
    observer, witness = Observer(config, folder), Witness(_reward(config), _questions(config))
    async with (
        launched_run(config, config_file, line) as run,
        _beside(observer.run(), witness.run()),
    ):
        injector = Injector(run, plugged)
        times, failure = await _go(run, observer, injector, plan, console)
        await _stop(run, config)
        exit_code = await run.ended()
    observer.read_files()
    seen = _Seen(observer.seen, witness, injector, times, exit_code, failure)
    return _findings(folder, config, seen)


async def _go(
    run: LaunchedRun, observer: Observer, injector: Injector, plan: Plan, console: Console
) -> tuple[Times, str]:
    """Run start, calm, faults, quiet; return why the run did not continue after the faults."""
    wanted = Plan.replicas + (not isinstance(injector.cable, str))
    seen = observer.seen
    await _until(
        lambda: seen.last_step >= 2 and seen.serving >= wanted, run, _START_S, "the first steps"
    )
    calm_from_s = time.monotonic()
    console.print(f"step {seen.last_step}: {plan.calm_s:g} s of calm", highlight=False)
    await asyncio.sleep(plan.calm_s)
    faults_from_s = time.monotonic()
    async with _beside(_notify(observer, injector, faults_from_s, plan, console)):
        await injector.follow(plan.schedule)
        failure = await _recover(run, observer, injector)
        await asyncio.sleep(0.0 if failure else plan.quiet_s)
        end_s = time.monotonic()
    return Times(calm_from_s, faults_from_s, end_s, plan.size.window_s), failure


async def _recover(run: LaunchedRun, observer: Observer, injector: Injector) -> str:
    """Wait for a step after all faults; return why there is none, or nothing."""
    steps = observer.seen.steps_s
    before = len(steps)
    try:
        await injector.restore(Plan.replicas)
        await _until(lambda: len(steps) > before, run, _END_S, "a step after all faults")
    except (RuntimeError, SluiceError) as error:
        return str(error)
    return ""


async def _notify(
    observer: Observer, injector: Injector, from_s: float, plan: Plan, console: Console
) -> None:
    """Print progress: each fault as it comes, and where the run stands."""
    reported, news_s = 0, 0.0
    total_s = plan.schedule[-1].at_s + plan.quiet_s if plan.schedule else plan.quiet_s
    while True:
        now_s = time.monotonic()
        for one in injector.done[reported:]:
            what = f"not possible: {one.skipped}" if one.skipped else one.target
            console.print(
                f"{one.at_s - from_s:7.1f} s  {one.fault.kind}: {what}",
                markup=False,
                highlight=False,
            )
        reported = len(injector.done)
        if now_s - news_s > _NEWS_S:
            left_s = max(0.0, total_s - (now_s - from_s))
            console.print(
                f"{now_s - from_s:7.1f} s  step {observer.seen.last_step}, "
                f"{observer.seen.serving} replicas serve, {left_s:.0f} s left",
                highlight=False,
            )
            news_s = now_s
        await asyncio.sleep(_POLL_S)


async def _stop(run: LaunchedRun, config: RunConfig) -> None:
    """Ask the trainer to end the run as at its last step."""
    address = peer_address(config.sluice.trainer.endpoint, "sluice.trainer.endpoint")
    ends_s = time.monotonic() + _END_S
    while run.up.returncode is None:
        try:
            async with open_channel(address, max_message_bytes=1 << 20) as channel:
                await unary_call(
                    trainer_stub(channel).Stop,
                    trainer_pb2.StopRequest(reason="the time is over"),
                    name="TrainerService/Stop",
                    peer="trainer",
                    phase="asking it to stop",
                )
        except SluiceError:
            if time.monotonic() > ends_s:
                return
            await asyncio.sleep(1.0)
        else:
            return


async def _until(
    condition: Callable[[], bool], run: LaunchedRun, seconds: float, what: str
) -> None:
    ends_s = time.monotonic() + seconds
    while not condition():
        if run.up.returncode is not None:
            raise RuntimeError(f"the run ended with code {run.up.returncode} before {what}")
        if time.monotonic() > ends_s:
            raise RuntimeError(f"within {seconds:g} s not {what}")
        await asyncio.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is known about the run without its files."""

    observed: Observation
    witness: Witness
    injector: Injector
    times: Times
    exit_code: int
    failure: str


def _findings(folder: Path, config: RunConfig, known: _Seen) -> Findings:
    seen, run_dir = known.observed, Path(config.sluice.run_dir)
    surviving = surviving_steps(read_dumps(folder / DUMPS), seen.restarts, seen.last_step)
    ledger = read_ledger(run_dir / "reward" / "ledger.sqlite")
    accepted = known.witness.accepted
    lost, accuracy = _end_of(run_dir)
    return Findings(
        injected=known.injector.done,
        steps_s=seen.steps_s,
        groups=seen.groups,
        times=known.times,
        accounting=judge_accounting(surviving, ledger, accepted, seen.last_step),
        lost_by_service=max(lost, seen.most_lost),
        digest_mismatches=digest_mismatches(seen.digests),
        late=late_waits(seen.waits, limits_of(config.sluice), known.injector.stopped),
        exit_code=known.exit_code,
        failure=known.failure,
        final_accuracy=accuracy,
        starts={name: len(found) for name, found in seen.starts.items()},
        tracebacks=seen.tracebacks,
        client_prompts={
            "accepted": len(accepted),
            "refused": len(known.witness.refused),
            **ended_as(ledger),
        },
    )


def _end_of(run_dir: Path) -> tuple[float, float | None]:
    """Return prompts that the run counts as lost, and held-out accuracy after the last step."""
    try:
        record = read_run(run_dir)
    except DataError:  # it did not reach its end, which its exit code says
        return 0.0, None
    accuracies = record.accuracies()
    accuracy = accuracies[-1].accuracy if accuracies else None
    return record.accounts.get("prompts_lost", 0.0), accuracy


def _reward(config: RunConfig) -> str:
    return peer_address(config.sluice.reward.endpoint, "sluice.reward.endpoint")


def _questions(config: RunConfig) -> list[Question]:
    """Return questions of the data set, for the client."""
    files = config.data.train_files or ""
    file = files if isinstance(files, str) else files[0]
    rows = pq.read_table(file, columns=["data_source", "prompt", "reward_model"])
    return [
        Question(
            row["prompt"][-1]["content"], row["data_source"], row["reward_model"]["ground_truth"]
        )
        for row in rows.slice(0, _NUM_QUESTIONS).to_pylist()
    ]


@asynccontextmanager
async def _beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines for the length of the block."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
