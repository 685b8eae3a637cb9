"""Run the whole loop under random faults, and check what is left of it; `make chaos`.

The last line printed is one JSON object: `minutes`, `faults` by kind, `prompts_lost`,
`prompts_doubled`, `digest_mismatches`, `late_waits` (all four have to be 0), `recovery_s`,
`final_accuracy` and more. With ``--single`` the next fault waits until throughput is back;
without it `recovery_by_kind` includes what other faults cost. `back_s` are the seconds from a kill
until what was killed works again, `stages_s` what they are. With ``--episodes`` a model plays the
jar game, and `episodes_lost`, `episodes_doubled`, `leases_left`, `failure_rewards` have to be 0,
too. Exit code 0: the zeros are zeros, nothing is `unchecked`, and the run ended with code 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from sluice.client.launcher import LaunchedProcess
from sluice.concurrency.process import SUPERVISOR_VARIABLE
from sluice.config.addresses import peer_address
from sluice.config.run import RunConfig
from sluice.errors import DataError, SluiceError
from sluice.report.run_record import read_progress
from tools.chaos import verdict
from tools.chaos.cable import Cable, cable
from tools.chaos.episodes import judge_episodes, read_lines
from tools.chaos.faults import (
    FAR,
    KINDS,
    PLAYED_BY,
    REPLICAS,
    Injected,
    Injector,
    make_schedule,
    single_faults,
)
from tools.chaos.front import Front
from tools.chaos.observation import Observer, Witness
from tools.chaos.stages import STAGES, back_s, stage_table, table_lines, with_next
from tools.commands import started
from tools.launched_run import (
    LOOPBACK,
    SHORT_DEADLINES,
    LaunchedRun,
    launched_run,
    prepare_run,
)
from tools.phases import PhaseError, say, tool_parser

_LONGEST_CALM_S, _LONGEST_QUIET_S = 30.0, 45.0
_START_S, _STEP_S, _END_S, _LATE_S = 400.0, 300.0, 20.0, 10.0
_RECOVERY_S = 120.0
# The rate before a fault is that of so many windows. None of them was chosen for its rate: a run
# that takes the window in which it found recovery compares with a high one, and then a higher one.
_WINDOWS_BEFORE = 2
_NUM_QUESTIONS, _NUM_EXAMPLES = 1000, 3
# A policy that learns changes how many groups are trained, and with it the rate.
_STEADY = ("actor_rollout_ref.actor.optim.lr=0.000001",)
_KILLED = {"kill_replica": "replica", "kill_reward": "reward", "kill_trainer": "trainer"}
_WINDOW_S = {"tiny": 4.0, "stretch": 10.0, "jars": 10.0}
_JARS = "jars"
_INTERVAL_S, _EPISODES_INTERVAL_S = 6.0, 10.0
_LEASES = (
    "sluice.environment.agents=true",
    "sluice.environment.path=null",
    "sluice.environment.name=null",
)
_ZEROS = ("prompts_lost", "prompts_doubled", "digest_mismatches", "late_waits")
_COUNTS = ("episodes_trained", "episodes_replayed")
_EPISODE_ZEROS = ("episodes_lost", "episodes_doubled", "leases_left", "failure_rewards")


@dataclass(frozen=True, slots=True)
class Times:
    """Monotonic seconds: the beginning of the calm, of the faults, and the end of watching."""

    calm_s: float
    faults_s: float
    end_s: float


def main(arguments: Sequence[str]) -> int:
    """Run chaos; return 0 if nothing was found."""
    options, began_s = _parse(arguments), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sluice-chaos-") as scratch, cable() as plugged:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(_run(folder, options, plugged))
    missing = unchecked(report, options)
    _say_found("parts unchecked", missing)
    report |= {"unchecked": missing, "seconds": round(time.monotonic() - began_s, 1)}
    sys.stdout.write(json.dumps(report) + "\n")
    zeros = (*_ZEROS, *(_EPISODE_ZEROS if options.episodes else ()), "exit_code", "failure")
    return 1 if any(report[name] for name in (*zeros, "unchecked")) else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = tool_parser(__doc__, "python -m tools.chaos --single --minutes 5 --size tiny")
    parser.add_argument("--minutes", type=float, default=10.0, help="calm, faults and quiet")
    parser.add_argument("--seed", type=int, default=0, help="of faults, model, data and sampling")
    parser.add_argument("--interval", type=float, help="mean seconds between faults")
    parser.add_argument(
        "--episodes", choices=sorted(PLAYED_BY), help="what plays the jar game, which is trained"
    )
    parser.add_argument("--single", action="store_true", help="one fault at a time")
    parser.add_argument("--kinds", type=_kinds, help=f"of faults: some of {', '.join(KINDS)}")
    parser.add_argument("--each", type=int, help="with --single: so many faults of each kind")
    parser.add_argument("--size", choices=("stretch", "tiny"), help="of the task; stretch")
    parser.add_argument("--folder", type=Path, help="an empty one: keep everything written here")
    options = parser.parse_args(arguments)
    if options.single and options.interval is not None:
        parser.error("--interval: --single waits for recoveries; leave one of them out")
    if options.each is not None and not options.single:
        parser.error("--each: give --single, too")
    if options.episodes and options.size:
        parser.error("--size: --episodes trains the jar game; leave one of them out")
    player = PLAYED_BY.get(options.episodes)
    others = set(PLAYED_BY.values()) - {player}
    possible = tuple(kind for kind in (STAGES if options.single else KINDS) if kind not in others)
    if wrong := set(options.kinds or ()) - set(possible):
        parser.error(f"--kinds {min(wrong)}: these options have {','.join(sorted(possible))}")
    own = (player, *_KILLED) if player else possible
    # Chance and machine decide which of all kinds a run has.
    options.needed = options.kinds or (own if options.episodes or options.each else ())
    options.kinds = options.kinds or own
    options.size = _JARS if options.episodes else options.size or "stretch"
    if options.interval is None:
        options.interval = _EPISODES_INTERVAL_S if options.episodes else _INTERVAL_S
    return options


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: give some of {','.join(KINDS)}")
    return kinds


async def _run(
    folder: Path, options: argparse.Namespace, plugged: Cable | str
) -> dict[str, object]:
    """Run all of it; raise PhaseError if the run did not even start.

    A seventh of the time is calm before the faults. A sixth is quiet after them, if they overlap.
    """
    seconds = 60 * options.minutes
    calm_s = min(_LONGEST_CALM_S, seconds / 7)
    quiet_s = 0.0 if options.single else min(_LONGEST_QUIET_S, seconds / 6)
    faults_s = seconds - calm_s - quiet_s
    schedule = make_schedule(options.seed, faults_s, options.interval, options.kinds)
    for fault in () if options.single else schedule:
        say(
            f"{fault.at_s:7.1f} s  {fault.kind}"
            + (f" for {fault.seconds:g} s" * bool(fault.seconds))
        )
    say("making model and data")
    config, file = prepare_run(
        folder,
        options.size,
        (
            SHORT_DEADLINES,
            f"sluice.rollout.replicas={REPLICAS}",
            f"trainer.rollout_data_dir={(folder / 'dumps').absolute()}",
            *(_STEADY if options.single else ()),
            *(_LEASES if options.episodes == "leases" else ()),
        ),
        seed=options.seed,
        host=LOOPBACK if isinstance(plugged, str) else plugged.near,
    )
    observer, witness = Observer(config, folder), _witness(config)
    with launched_run(config, file) as run:
        injector, leases_left = Injector(run, plugged), None
        front = Front(injector, folder) if options.episodes == "leases" else None
        work = [observer.run(), witness.run()]
        if front is not None:
            work.append(front.keep())
        if not isinstance(plugged, str):
            work.append(_keep_far(injector, plugged, file))
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(each) for each in work]
            inject = partial(injector.follow, schedule)
            if options.single:
                inject = partial(_inject_singly, injector, observer, options, faults_s)
            times, failure = await _go(run, observer, witness, injector, inject, calm_s, quiet_s)
            if front is not None:
                expired_s = config.sluice.environment.episode_timeout_s + _LATE_S
                leases_left = await front.leases_left(observer, expired_s)
            exit_code = await run.stop("the time is over")
            for task in beside:
                task.cancel()
    observer.read_files()
    report = _report(folder, config, observer, witness, injector, times, options)
    return report | {"leases_left": leases_left, "exit_code": exit_code, "failure": failure}


def unchecked(report: Mapping[str, Any], options: argparse.Namespace) -> list[str]:
    """Return what the run did not have, so that zeros show nothing."""
    faults, each = report["faults"], options.each or 1
    found = [
        f"{kind}: {faults.get(kind, 0)} of {each} faults (give more --minutes)"
        for kind in options.needed
        if faults.get(kind, 0) < each
    ]
    if not faults:
        found.append("no fault was possible")
    if options.episodes:
        found += [f"{key} is 0" for key in _COUNTS if not report[key]]
    if options.episodes == "leases" and report["leases_left"] is None:
        found.append("leases_left: the reward service did not answer after the last kill")
    return found


async def _go(
    run: LaunchedRun,
    observer: Observer,
    witness: Witness,
    injector: Injector,
    inject: Callable[[], Awaitable[None]],
    calm_s: float,
    quiet_s: float,
) -> tuple[Times, str]:
    """Run start, calm, faults, quiet; return why the run did not continue after the faults."""
    replicas = REPLICAS + (not isinstance(injector.cable, str))

    async def has_started() -> bool:
        return observer.last_step >= 2 and observer.serving >= replicas

    await run.until("the first steps", has_started, _START_S)
    began_s, failure = time.monotonic(), ""
    say(f"step {observer.last_step}: {calm_s:g} s of calm")
    await asyncio.sleep(calm_s)
    faults_s = time.monotonic()
    await inject()
    before = len(observer.steps_s)

    async def has_continued() -> bool:
        return len(observer.steps_s) > before and witness.num_trained > 0

    try:
        await injector.set_replicas(REPLICAS)
        what = "a step after all faults, and a client's prompt trained"
        await run.until(what, has_continued, _STEP_S)
        await asyncio.sleep(quiet_s)
    except (PhaseError, SluiceError) as error:
        failure = str(error)
    return Times(began_s, faults_s, time.monotonic()), failure


async def _inject_singly(
    injector: Injector, observer: Observer, options: argparse.Namespace, seconds: float
) -> None:
    """Inject one fault after the other for so many seconds, or `--each` times of each kind."""
    window_s = _WINDOW_S[options.size]

    async def recover(injected: Injected) -> None:
        until_s = injected.over_s + _RECOVERY_S
        while time.monotonic() < until_s:
            await asyncio.sleep(1.0)
            seconds = _recovered_s(observer, injected, time.monotonic(), None, window_s)
            if seconds is not None:
                back, load = back_s(observer, injected) or 0.0, os.getloadavg()[0]
                say(f"{'':9}  back: {back:.1f} s, full rate: {seconds:.1f} s; load {load:.0f}")
                break
        await asyncio.sleep(_WINDOWS_BEFORE * window_s)

    faults = single_faults(options.seed, options.kinds)
    if options.each is not None:
        faults = islice(faults, options.each * len(options.kinds))
    await injector.follow_singly(faults, recover, until_s=time.monotonic() + seconds)


async def _keep_far(injector: Injector, plugged: Cable, config_file: Path) -> None:
    """Keep the replica at the far end running, as a launcher on that machine would."""
    command = plugged.inside(
        (
            *(sys.executable, "-m", "services.rollout", "--config", str(config_file)),
            *("--name", FAR, f"sluice.rollout.endpoint.host={plugged.far}"),
        )
    )
    environment = {"OMP_NUM_THREADS": "1", SUPERVISOR_VARIABLE: str(os.getpid())}
    log = config_file.parent / f"{FAR}.log"
    while True:
        with started(command, log, environment, ends_within_s=_END_S) as process:
            injector.far = LaunchedProcess(FAR, process.pid, 0, is_draining=False)
            try:
                await asyncio.to_thread(process.wait)
            finally:
                injector.far = None


def _witness(config: RunConfig) -> Witness:
    """Return a client with questions of the data set."""
    columns = ["data_source", "prompt", "reward_model", "extra_info"]
    rows = pq.read_table(config.data.train_files, columns=columns).slice(0, _NUM_QUESTIONS)
    address = peer_address(config.sluice.reward.endpoint, "sluice.reward.endpoint")
    return Witness(address, rows.to_pylist())


def _report(
    folder: Path,
    config: RunConfig,
    observer: Observer,
    witness: Witness,
    injector: Injector,
    times: Times,
    options: argparse.Namespace,
) -> dict[str, object]:
    """Judge the run; print what is wrong; return the report without the run's end."""
    run_dir, last_step = Path(config.sluice.run_dir), observer.last_step
    lines = list(read_lines([run_dir / "groups.jsonl"]))
    batches = [*verdict.read_leases(injector.ledgers), *verdict.read_dumps(folder / "dumps")]
    surviving = verdict.surviving_steps(batches, observer.restarts, last_step)
    ledger = verdict.read_ledger(run_dir / "reward" / "ledger.sqlite")
    returned = verdict.returned_rows(batches, surviving, lines, observer.restarts)
    lost = verdict.lost_prompts(surviving, ledger, witness.accepted, last_step, lines, returned)
    doubled = verdict.doubled_prompts(surviving, ledger)
    differing = [version for (_, version), found in observer.digests.items() if len(found) > 1]
    late = verdict.late_waits(observer.waits, config, injector.stopped)
    service_lost, accuracy = observer.max_lost, None
    with suppress(DataError):  # a trainer that was killed may leave half a line
        record = read_progress(run_dir)
        service_lost = max(service_lost, record.accounts.get("prompts_lost", 0.0))
        accuracy = next((point.accuracy for point in reversed(record.accuracies())), None)
    full_rate = verdict.tokens_per_s(observer.groups, times.calm_s, times.faults_s)
    done = [one for one in injector.done if not one.skipped]
    _say_found("prompts lost", [f"{name}: {why}" for name, why in lost.items()])
    _say_found("prompts trained twice", [f"{name}: {why}" for name, why in doubled.items()])
    _say_found("digests that differ", [f"version {version}" for version in differing])
    _say_found("waits past their deadline", late)
    figures, examples = judge_episodes(lines, surviving, config) if options.episodes else ({}, {})
    for key, texts in examples.items():
        _say_found(key, texts)
    return {
        "minutes": options.minutes,
        "seed": options.seed,
        "faults": dict(sorted(Counter(one.fault.kind for one in done).items())),
        "skipped": _skipped(injector),
        "prompts_lost": len(lost) + int(service_lost),
        "prompts_doubled": len(doubled),
        "digest_mismatches": len(differing),
        "late_waits": len(late),
        **_recoveries(observer, done, options, full_rate, times.end_s),
        "trainer_stall_s": round(
            verdict.longest_pause_s(observer.steps_s, times.faults_s, times.end_s), 1
        ),
        "tokens_per_s_before": round(full_rate, 1),
        "final_accuracy": accuracy,
        "steps_trained": len(observer.steps_s),
        "steps_without_dump": last_step - len(surviving),
        "client_prompts": {
            "accepted": len(witness.accepted),
            "refused": len(witness.refused),
            **Counter(how for how, _ in ledger.ended.values()),
        },
        "starts": {name: len(found) for name, found in sorted(observer.starts.items())},
        "tracebacks": {name: count for name, count in observer.tracebacks.items() if count},
        **figures,
    }


def _recoveries(
    observer: Observer,
    done: Sequence[Injected],
    options: argparse.Namespace,
    full_rate: float,
    end_s: float,
) -> dict[str, object]:
    """Return what is known of the seconds after the faults; print their stages."""
    window_s = _WINDOW_S[options.size]
    rate = None if options.single else full_rate
    bounded = with_next(done) if options.single else [(one, math.inf) for one in done]
    full: dict[str, list[float | None]] = defaultdict(list)
    back: dict[str, list[float | None]] = defaultdict(list)
    for one, until_s in bounded:
        kind = one.fault.kind
        full[kind].append(_recovered_s(observer, one, min(end_s, until_s), rate, window_s))
        if kind in _KILLED:
            back[_KILLED[kind]].append(back_s(observer, one, until_s))
    table = stage_table(observer, done) if options.single else {}
    for line in table_lines(table):
        say(line)
    return {
        "recovery_s": _percentiles([seconds for each in full.values() for seconds in each]),
        "recovery_by_kind": {kind: _percentiles(each) for kind, each in sorted(full.items())},
        "back_s": {name: _percentiles(each) for name, each in sorted(back.items())},
        "stages_s": table,
    }


def _recovered_s(
    observer: Observer,
    injected: Injected,
    until_s: float,
    full_rate: float | None,
    window_s: float,
) -> float | None:
    """Return the seconds from a fault's end to full throughput, None if not before `until_s`.

    Without `full_rate` it is the rate before this fault, and what was hit has to work again, too.
    """
    from_s = injected.over_s
    if full_rate is None:
        found_s = back_s(observer, injected, until_s)
        if found_s is None:
            return None
        from_s += found_s
        before_s = injected.at_s - _WINDOWS_BEFORE * window_s
        full_rate = verdict.tokens_per_s(observer.groups, before_s, injected.at_s)
    recovered_s = verdict.recovered_s(
        observer.groups, from_s, full_rate=full_rate, window_s=window_s, end_s=until_s
    )
    return None if recovered_s is None else recovered_s - injected.over_s


def _percentiles(found: Sequence[float | None]) -> dict[str, float | None]:
    known = [seconds for seconds in found if seconds is not None]
    return {
        "p50": verdict.percentile(known, 0.5),
        "p95": verdict.percentile(known, 0.95),
        "not_seen": len(found) - len(known),
    }


def _skipped(injector: Injector) -> dict[str, str]:
    """Return how often faults of a kind were impossible, and why the first one was."""
    reasons: dict[str, list[str]] = {}
    for one in injector.done:
        if one.skipped:
            reasons.setdefault(one.fault.kind, []).append(one.skipped)
    return {kind: f"{len(why)} times: {why[0]}" for kind, why in sorted(reasons.items())}


def _say_found(what: str, examples: Sequence[str]) -> None:
    """Print what has to be nothing and is not, with examples."""
    if examples:
        say(f"FOUND {len(examples)} {what}: {'; '.join(examples[:_NUM_EXAMPLES])}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
