"""Rank 0 of the trainer: connect its parts, serve, run the loop, and shut down in order.

Shutdown, in reverse order of the start: the loop ends or is cancelled; streams of steps and waits
for checkpoints get an answer; the process of the run's page ends; the server stops; the publisher
leaves its transfer group; the metric sinks close; the other ranks stop (after the learner's current
work); their process group is destroyed, except after an error.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from services.trainer.fleet.delivery import DeliveryCounts
from services.trainer.fleet.members import Fleet, drop_silent
from services.trainer.fleet.publisher import WeightPublisher
from services.trainer.fleet.replica_client import ReplicaClient, replica_counters
from services.trainer.learner.checkpoint import (
    Checkpoint,
    CheckpointStore,
    num_to_keep,
    start_point,
)
from services.trainer.learner.learner import Learner
from services.trainer.learner.policy_snapshots import (
    PolicySnapshots,
    connected_ranks,
    policy_snapshots,
)
from services.trainer.learner.rank_command import (
    REWARD_START_TIMEOUT_S,
    RankLeader,
    join_ranks,
    share_total_steps,
)
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.sample_reader import reward_samples
from services.trainer.loop.accounting import RunAccountant
from services.trainer.loop.guards import RECORD_FILE, RunGuards, read_record
from services.trainer.loop.learner_thread import LearnerThread
from services.trainer.loop.reward_client import connect_reward
from services.trainer.loop.run_state import RunState
from services.trainer.loop.train_loop import TrainLoop
from services.trainer.metrics.sinks import (
    CONSOLE,
    JSONL,
    ProgressSink,
    Reporter,
    SinkTarget,
    check_sinks,
    open_sinks,
)
from services.trainer.servicer import TrainerServicer, trainer_server
from services.trainer.telemetry import RunHistory, TrainerMetrics, served_readings, watched_trainer
from sluice.algorithm.guards import GuardRecord
from sluice.algorithm.publishing import swaps_at_once
from sluice.concurrency.process import (
    SUPERVISOR_VARIABLE,
    exempt_from_gc,
    process_age_s,
    until_signal,
)
from sluice.concurrency.waits import ends_within, run_beside
from sluice.config.addresses import advertised_host
from sluice.config.deadlines import commit_timeout_s
from sluice.config.derived import (
    checkpoint_folder,
    message_mb,
    sleeps_while_training,
    total_training_steps,
    uses_critic,
)
from sluice.config.loading.yaml_text import flat_settings, write_config
from sluice.config.run import RunConfig
from sluice.device.select import transfer_device
from sluice.rpc.client import ChannelPool
from sluice.rpc.credentials import Credentials, service_credentials
from sluice.rpc.ports import bind_socket
from sluice.rpc.status import expect_no_tls
from sluice.service_contract import CONFIG_NAME, restarts
from sluice.types import layout_digest
from sluice.weights.adapters import is_adapter
from sluice.weights.rank_sender import RemoteRank
from sluice.weights.sender import WeightSender, broadcast_deadline_s

logger = logging.getLogger(__name__)

_LAST_ANSWERS_S = 1.0
_LOGGERS_SHARE_OF_GRACE = 0.5
_ACCOUNTING_INTERVAL_S = 10.0
_PAGE_ENDS_S = 5.0


@dataclass(frozen=True, slots=True)
class _LoadedLearner:
    """The loaded learner, and the values that depend on its weights."""

    learner: LearnerThread
    snapshots: PolicySnapshots
    other_ranks: Sequence[RemoteRank]
    total_steps: int
    checkpoint: Checkpoint | None
    guard_record: GuardRecord


async def run_leader(config: RunConfig) -> bool:
    """Run to the end; return False if SIGTERM or SIGINT ended the run before."""
    farewell = "a signal ends the run before its last step; the last checkpoint stands"
    return bool(await until_signal(_run_rank_0(config), farewell))


async def _run_rank_0(config: RunConfig) -> bool:
    """Run to the end, and return true."""
    instance_id = str(uuid.uuid4())
    check_sinks(config.trainer.logger)
    async with AsyncExitStack() as stack:
        endpoint = config.sluice.trainer.endpoint
        credentials = service_credentials(config.sluice.security, endpoint)
        if not credentials.is_encrypted:
            expect_no_tls()
        # Bound early, so that a port in use ends the run now and not after the model is loaded.
        # Nothing listens yet: replicas are refused until the server starts.
        reserved_port = stack.enter_context(ExitStack())
        if endpoint.port:
            reserved_port.enter_context(bind_socket(endpoint.host, endpoint.port))
        reward = await connect_reward(config, credentials, instance_id, stack)
        dataset_rows = await reward.wait_until_up(REWARD_START_TIMEOUT_S)
        # Both calls block the event loop, but nothing else needs it yet.
        parallel = stack.enter_context(join_ranks(config))
        trained = _load(config, parallel, total_training_steps(config, dataset_rows), stack)
        stack.push_async_callback(trained.learner.close)
        observed = _metrics(config, trained, instance_id)
        reporter = await _open_reporter(config, trained, observed.history)
        stack.push_async_callback(reporter.close)
        replicas = ChannelPool(message_mb(config) << 20, credentials)
        stack.push_async_callback(replicas.close)
        publisher = _make_publisher(config, trained, replicas, credentials, observed)
        stack.push_async_callback(publisher.close)
        reserved_port.close()
        servicer = TrainerServicer(observed.fleet, observed.state, config.sluice)
        server = trainer_server(config, servicer, credentials)
        await server.start()
        stack.push_async_callback(server.stop, _LAST_ANSWERS_S)
        stack.enter_context(watched_trainer(config, observed.state, observed.fleet))
        stack.enter_context(served_readings(config, observed))
        exempt_from_gc()
        await stack.enter_async_context(live_page(config))
        # Runs first at shutdown: streams of steps and waits for checkpoints get an answer.
        stack.push_async_callback(observed.state.finish)
        ask = partial(replica_counters, replicas)
        accounting = RunAccountant(
            observed.fleet, observed.state, ask, reward.counters, has_restarted=restarts() > 0
        )
        checkpoint = trained.checkpoint
        loop = TrainLoop(
            config,
            dataset_rows,
            learner=trained.learner,
            reward=reward,
            publisher=publisher,
            reporter=reporter,
            accounting=accounting,
            fleet=observed.fleet,
            state=observed.state,
            guards=_make_guards(config, trained, observed.state),
            resume_from=checkpoint.progress if checkpoint else None,
        )
        await _run_loop(loop, observed.fleet, accounting, replicas)
    # Write the accounts again: now they include the seconds of shutting down.
    reporter.accounts(accounting.close(loop.accounts))
    return True


def _metrics(config: RunConfig, trained: _LoadedLearner, instance_id: str) -> TrainerMetrics:
    """Return state and fleet at the beginning of the run, with the counters."""
    trainer, service = config.trainer, config.sluice.trainer
    logger.info(
        "%s / %s: %d steps", trainer.project_name, trainer.experiment_name, trained.total_steps
    )
    checkpoint = trained.checkpoint
    step = checkpoint.step if checkpoint else 0
    weights = [spec for spec in trained.snapshots.tensors if not is_adapter(spec.name)]
    return TrainerMetrics(
        RunState(instance_id, trained.total_steps, step, process_age_s()),
        Fleet(layout_digest(weights), service.replica_ttl_s, service.replica_stall_s, weights),
        RunHistory(),
        DeliveryCounts(),
    )


def _make_guards(config: RunConfig, trained: _LoadedLearner, state: RunState) -> RunGuards:
    file = Path(checkpoint_folder(config)) / RECORD_FILE
    guards = RunGuards(config.sluice.guards, file, state, trained.guard_record)
    trained.learner.protect(guards.steps_to_protect)
    return guards


async def _run_loop(
    loop: TrainLoop, fleet: Fleet, accounting: RunAccountant, replicas: ChannelPool
) -> None:
    async with (
        run_beside(drop_silent(fleet), "heartbeats"),
        run_beside(_refresh_accounting(accounting, fleet, replicas), "accounting"),
    ):
        await loop.run()


async def _refresh_accounting(
    accounting: RunAccountant, fleet: Fleet, replicas: ChannelPool
) -> None:
    """Refresh the accounts during a step too, for status calls."""
    while True:
        await replicas.retain({member.info.address for member in fleet.members()})
        await accounting.take()
        await asyncio.sleep(_ACCOUNTING_INTERVAL_S)


async def _open_reporter(
    config: RunConfig, trained: _LoadedLearner, history: RunHistory
) -> Reporter:
    trainer, run_dir = config.trainer, Path(config.sluice.run_dir)
    replaces_after = 0 if restarts() else None
    target = SinkTarget(
        run_dir,
        trainer.project_name,
        trainer.experiment_name,
        flat_settings(config),
        trained.checkpoint.step if trained.checkpoint else replaces_after,
    )
    # `sluice status` and the report read the JSONL file, so it is always written.
    names = list(dict.fromkeys([JSONL, *trainer.logger]))
    close_timeout_s = config.sluice.shutdown_grace_s * _LOGGERS_SHARE_OF_GRACE
    sinks = await open_sinks(names, target, close_timeout_s=close_timeout_s)
    # The console's lines show each step already.
    progress = [] if CONSOLE in names else [ProgressSink(trained.total_steps)]
    return Reporter((*sinks, *progress, history), run_dir, trainer.log_val_generations)


def _load(
    config: RunConfig, parallel: ParallelContext, total_steps: int, stack: AsyncExitStack
) -> _LoadedLearner:
    share_total_steps(parallel, total_steps)
    logger.info("loading the model from %s", config.actor_rollout_ref.model.path)
    learner = Learner(config, parallel, total_steps)
    snapshots = policy_snapshots(config, learner, parallel)
    clients = stack.enter_context(connected_ranks(config, snapshots, parallel))
    leader = RankLeader(learner, parallel, reward_samples(config), snapshots)
    keep = num_to_keep(config.trainer, with_critic=uses_critic(config))
    store = CheckpointStore(Path(checkpoint_folder(config)), keep)
    checkpoint = start_point(config.trainer, store)
    record = read_record(checkpoint)
    if checkpoint is not None:
        leader.load(checkpoint.actor, record.learning_rate_factor)
        logger.info("resumed from step %d", checkpoint.step)
    thread = LearnerThread(leader, store, learner.peaks, frees_cache=sleeps_while_training(config))
    return _LoadedLearner(thread, snapshots, clients, total_steps, checkpoint, record)


def _make_publisher(
    config: RunConfig,
    trained: _LoadedLearner,
    replicas: ChannelPool,
    credentials: Credentials,
    observed: TrainerMetrics,
) -> WeightPublisher:
    weights, endpoint = config.sluice.weights, config.sluice.trainer.endpoint
    device = transfer_device(config.trainer.device, weights.backend)
    bucket_bytes = weights.bucket_mb << 20
    snapshots = trained.snapshots
    elements = sum(math.prod(tensor.shape) for tensor in snapshots.tensors)
    wire_bytes = elements * getattr(torch, config.actor_rollout_ref.rollout.dtype).itemsize
    sends_changes = weights.delta == "auto"
    make_sender = partial(
        WeightSender,
        device=device,
        bucket_bytes=bucket_bytes,
        timeout_s=weights.timeout_s,
        host=advertised_host(endpoint),
        bind_host=endpoint.host,
        certificates=credentials.for_transfers(),
        keeps_base=sends_changes,
        holdings=snapshots.holdings,
        other_ranks=trained.other_ranks,
    )
    connect = partial(
        ReplicaClient,
        channels=replicas,
        timeout_s=weights.timeout_s,
        transfer_timeout_s=broadcast_deadline_s(
            snapshots.tensors, bucket_bytes, weights.timeout_s, snapshots.holdings
        ),
        commit_timeout_s=commit_timeout_s(config, wire_bytes),
    )
    return WeightPublisher(
        observed.fleet,
        snapshots.buffers,
        snapshots.tensors,
        make_sender=make_sender,
        connect=connect,
        timeout_s=weights.timeout_s,
        probe_timeout_s=weights.probe_timeout_s,
        sends_changes=sends_changes,
        counts=observed.deliveries,
        swaps_at_once=partial(swaps_at_once, max_staleness=config.sluice.asynchrony.max_staleness),
    )


@asynccontextmanager
async def live_page(config: RunConfig) -> AsyncIterator[None]:
    """Serve the run's page during the block, if `sluice.dashboard.port` is set.

    The page has its own process and ends with the trainer. Training never waits for it: a page
    that cannot start or ends early leaves a log line.
    """
    process = await _start_page(config)
    if process is None:
        yield
        return
    try:
        async with run_beside(_log_end_of_page(process), "dashboard"):
            yield
    finally:
        await _end_page(process)


async def _start_page(config: RunConfig) -> asyncio.subprocess.Process | None:
    page = config.sluice.dashboard
    if page.port is None:
        return None
    command = ["-m", "sluice.cli.main", "dashboard", config.sluice.run_dir]
    command += ["--host", page.host, "--port", str(page.port)]
    environment = {**os.environ, SUPERVISOR_VARIABLE: str(os.getpid())}
    try:
        # `sluice up` has written the configuration, which the page reads; torchrun has not.
        file = Path(config.sluice.run_dir) / CONFIG_NAME
        if not file.exists():
            write_config(config, file)
        return await asyncio.create_subprocess_exec(
            sys.executable, *command, env=environment, stdin=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        logger.warning("the dashboard cannot be started: %s", error)
        return None


async def _log_end_of_page(process: asyncio.subprocess.Process) -> None:
    code = await process.wait()
    logger.warning(
        "the dashboard has ended with exit code %d and training continues; `sluice dashboard` with "
        "the run's folder shows the page again",
        code,
    )


async def _end_page(process: asyncio.subprocess.Process) -> None:
    """Send SIGTERM, then SIGKILL if the process does not end in time."""
    if process.returncode is not None:
        return
    process.terminate()
    if not await ends_within(_PAGE_ENDS_S, process.wait()):
        process.kill()
        await process.wait()
