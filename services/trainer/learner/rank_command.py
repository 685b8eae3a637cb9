"""Commands between trainer ranks: rank 0 broadcasts them, the others follow until the run ends.

A command's message is the length of its header, the header as JSON, and a body. While there is
nothing to do, rank 0 broadcasts a command that only shows that it lives.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from functools import partial
from pathlib import Path

import torch

from services.trainer.learner.batch.train_batch import check_routing
from services.trainer.learner.learner import Learner
from services.trainer.learner.policy_snapshots import (
    PolicySnapshots,
    connected_ranks,
    policy_snapshots,
)
from services.trainer.learner.ranks import ParallelContext, TorchDistributed
from services.trainer.learner.sample_reader import RewardSamples, reward_samples
from sluice.codec.train_batch import outline_from_bytes, outline_to_bytes
from sluice.concurrency.process import exempt_from_gc
from sluice.concurrency.threads import OwnerThread
from sluice.config.deadlines import command_timeout_s
from sluice.config.derived import world_size
from sluice.config.run import RunConfig
from sluice.device.select import select_device
from sluice.errors import InvalidRequestError, PeerError, SluiceError
from sluice.types import TrainBatch

logger = logging.getLogger(__name__)

_LENGTH_BYTES = 4
_KEEP_ALIVES_PER_DEADLINE = 4
_END_S = 5.0

REWARD_START_TIMEOUT_S = 120.0
_FREEZING = "freezing the weights"


class CommandKind(StrEnum):
    """The next work of all ranks."""

    TAKE = "take"
    TRAIN = "train"
    LOAD = "load"
    FREEZE = "freeze"
    SAVE = "save"
    KEEP_ALIVE = "keep_alive"
    STOP = "stop"


class _Outcome(IntEnum):
    """How a rank's reading of its samples ended."""

    TAKEN = 0
    LOST = 1  # the reward service or the lease is gone
    FAILED = 2
    READING = 3


class RankLeader:
    """Runs commands on rank 0's learner and all others. Calls block; one thread at a time.

    A second thread sends signs of life while the learner's thread is idle. It is only a timer, and
    `_commanding` keeps it from interrupting a command.

    Args:
        learner: rank 0's; the other ranks run `follow`.
        snapshots: rank 0's, for a run that publishes.

    Raises (all methods):
        DeadlineError, PeerError: a rank failed, now or since the last call.
    """

    def __init__(
        self,
        learner: Learner,
        parallel: ParallelContext,
        samples: RewardSamples,
        snapshots: PolicySnapshots | None = None,
    ) -> None:
        self._learner = learner
        self._snapshots = snapshots
        self._parallel = parallel
        self._samples = RankSamples(learner, parallel, samples)
        self._commanding = threading.Lock()
        self._stopped = threading.Event()
        self._failure: Exception | None = None
        self._interval_s = parallel.timeout_s / _KEEP_ALIVES_PER_DEADLINE
        self._keep_alives = threading.Thread(
            target=self._keep_alive, name="rank-keep-alive", daemon=True
        )
        if parallel.world_size > 1:
            self._keep_alives.start()

    def take_samples(self, outline: TrainBatch, step: int) -> str:
        """Let every rank read its samples of a leased batch.

        Returns:
            an empty text if all samples arrived; otherwise the reason why the batch must be taken
            again.
        """
        with self._on_all_ranks():
            body = outline_to_bytes(outline) if self._parallel.world_size > 1 else b""
            self._send(CommandKind.TAKE, {"step": step}, body)
            return self._samples.take(outline, step)

    def train_step(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """Call `Learner.train_step` on all ranks, each with the samples that it took.

        Args:
            batch: the outline of `take_samples`.
        """
        with self._on_all_ranks():
            self._send(CommandKind.TRAIN, {"step": step, "batch_id": batch.batch_id})
            return self._learner.train_step(self._samples.pop_batch(batch.batch_id), step)

    def load(self, directory: Path, rate_factor: float = 1.0) -> None:
        """Call `Learner.load` on all ranks; every rank reads `directory`."""
        with self._on_all_ranks():
            arguments = {"directory": str(directory), "rate_factor": rate_factor}
            self._send(CommandKind.LOAD, arguments)
            self._learner.load(directory, rate_factor)

    def freeze(self, version: int) -> None:
        """Call `PolicySnapshots.freeze` on all ranks that send weights.

        The version is readable here only once all of them hold it: rank 0 starts every transfer.

        Raises:
            DeadlineError: a broadcast still reads the buffer, here or on another rank.
        """
        snapshots = self._snapshots
        assert snapshots is not None
        if not snapshots.holdings:  # rank 0 holds all weights: the others are not needed
            snapshots.freeze(version)
            return
        snapshots.freeze(version, self._freeze_on_others(version))

    @contextmanager
    def _freeze_on_others(self, version: int) -> Iterator[None]:
        """Make the other ranks freeze during the block, and wait for them."""
        with self._commanding:
            with self._remember_failure():
                self._send(CommandKind.FREEZE, {"version": version})
            try:
                yield  # after an error here all ranks still meet and take commands
            finally:
                with self._remember_failure():
                    self._parallel.all_gather([0.0], _FREEZING)

    @property
    def saves_in_background(self) -> bool:
        """Return `Learner.saves_in_background`."""
        return self._learner.saves_in_background

    def save(self, directory: Path) -> None:
        """Call `Learner.save` on all ranks."""
        with self._on_all_ranks(survived=OSError):
            self._send(CommandKind.SAVE, {"directory": str(directory)})
            self._learner.save(directory)

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """Call `Learner.begin_save` on all ranks.

        Returns:
            rank 0's work, to be called. If `saves_in_background`, the other ranks work already and
            later commands may run meanwhile, so call it in another thread. Otherwise all ranks work
            during the call.
        """
        if not self.saves_in_background:
            return partial(self.save, directory)
        with self._on_all_ranks(survived=OSError):
            self._send(CommandKind.SAVE, {"directory": str(directory)})
            return self._learner.begin_save(directory)

    def stop(self) -> None:
        """End the other ranks' `follow`. Later calls do nothing."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        try:
            with self._commanding:
                self._send(CommandKind.STOP, {})
        finally:
            if self._keep_alives.is_alive():
                self._keep_alives.join()
            self._samples.close()

    @contextmanager
    def _on_all_ranks(self, survived: type[Exception] | None = None) -> Iterator[None]:
        """Hold back other commands while all ranks work; after an error, fail all later ones.

        Args:
            survived: an error after which all ranks still take commands: if one rank cannot write,
                the save fails on all.
        """
        with self._commanding, self._remember_failure(survived):
            yield

    @contextmanager
    def _remember_failure(self, survived: type[Exception] | None = None) -> Iterator[None]:
        """After an error, make every later command fail at once.

        The other ranks may still be working, and a command would wait for them until its deadline.
        """
        try:
            yield
        except Exception as error:
            if survived is None or not isinstance(error, survived):
                self._failure = self._failure or error
            raise

    def _send(self, kind: CommandKind, arguments: dict[str, object], body: bytes = b"") -> None:
        if self._parallel.world_size == 1:
            return
        if self._failure is not None:
            is_ours = isinstance(self._failure, SluiceError)
            why = str(self._failure) if is_ours else repr(self._failure)
            raise PeerError("trainer ranks", f"sending {kind}", why)
        header = json.dumps({"kind": kind, **arguments}).encode()
        message = len(header).to_bytes(_LENGTH_BYTES, "little") + header + body
        self._parallel.broadcast_bytes(message, f"sending the command {kind}")

    def _keep_alive(self) -> None:
        while not self._stopped.wait(self._interval_s):
            # A running command already shows that rank 0 lives.
            if not self._commanding.acquire(blocking=False):
                continue
            try:
                if not self._stopped.is_set() and self._failure is None:
                    self._send(CommandKind.KEEP_ALIVE, {})
            except SluiceError as error:
                logger.error("trainer ranks do not answer: %s", error)  # noqa: TRY400 - no bug here
                self._failure = error  # the next command raises it in the learner's thread
                return
            finally:
                self._commanding.release()


class RankSamples:
    """This rank's samples of the next step.

    A thread reads them, so that ranks can meet meanwhile: ranks that finish early wait as long as
    the others receive messages, and a hanging rank is noticed within the deadline of a collective.

    If a pause ends the train loop's wait, the ranks keep reading, and keep the samples until the
    batch is taken again.
    """

    def __init__(self, learner: Learner, parallel: ParallelContext, samples: RewardSamples) -> None:
        self._learner = learner
        self._parallel = parallel
        self._reader = samples
        self._thread = OwnerThread("samples")
        self._interval_s = parallel.timeout_s / _KEEP_ALIVES_PER_DEADLINE
        self._batch: TrainBatch | None = None

    def take(self, outline: TrainBatch, step: int) -> str:
        """Read this rank's samples; see `RankLeader.take_samples`. Collective.

        If the stream of one rank breaks, all ranks take the batch again.
        """
        self._batch = None
        phase = f"taking samples of step {step}"
        rows = self._learner.own_rows(outline, step)
        reading = self._thread.submit(lambda: self._read(outline, rows, step, phase))
        while True:
            outcome, problem = _Outcome.READING, None
            if wait([reading], self._interval_s).done:
                outcome, problem = reading.result()
            outcomes = self._parallel.all_gather([outcome], f"{phase}: comparing the ranks")
            if [_Outcome.READING] not in outcomes:
                ended = [_Outcome(int(number)) for (number,) in outcomes]
                return _combine_outcomes(ended, outcome, problem, phase)

    def pop_batch(self, batch_id: str) -> TrainBatch:
        """Return the batch with this rank's samples, and drop it here.

        Raises:
            PeerError: another batch was taken.
        """
        batch, self._batch = self._batch, None
        if batch is None or batch.batch_id != batch_id:
            raise PeerError("trainer ranks", "training", f"batch {batch_id} was not taken before")
        return batch

    def close(self) -> None:
        """Close the reader in the reader's thread."""
        self._thread.retire(self._reader.close, within_s=_END_S)

    def _read(
        self, outline: TrainBatch, rows: Sequence[int], step: int, phase: str
    ) -> tuple[_Outcome, SluiceError | None]:
        outcome = _Outcome.TAKEN
        problem: SluiceError | None = None
        try:
            self._batch = self._reader.read(outline, rows, step)
        except PeerError as error:
            outcome, problem = _Outcome.LOST, error
        except InvalidRequestError as error:
            detail = f"batch {outline.batch_id}: {error}; the batch is refused and was not trained"
            outcome, problem = _Outcome.FAILED, PeerError("reward service", phase, detail)
        except SluiceError as error:
            outcome, problem = _Outcome.FAILED, error
        if self._batch is not None:
            try:
                check_routing(self._batch, self._learner.routing_shape)
            except PeerError as error:
                outcome, problem = _Outcome.FAILED, error
        return outcome, problem


def _combine_outcomes(
    outcomes: Sequence[_Outcome], outcome: _Outcome, problem: SluiceError | None, phase: str
) -> str:
    if outcome is _Outcome.FAILED:
        assert problem is not None
        raise problem
    if _Outcome.FAILED in outcomes:
        detail = "it could not take its samples; its log has the reason"
        raise PeerError(f"trainer rank {outcomes.index(_Outcome.FAILED)}", phase, detail)
    if _Outcome.LOST not in outcomes:
        return ""
    rank = outcomes.index(_Outcome.LOST)
    lost = str(problem or f"trainer rank {rank} lost the batch; see its log")
    logger.warning("the batch must be taken again: %s", lost)
    return lost


def follow(
    learner: Learner,
    parallel: ParallelContext,
    reader: RewardSamples,
    snapshots: PolicySnapshots | None = None,
) -> None:
    """Follow rank 0's commands until the stop command. Blocks; for ranks above 0.

    Raises:
        DeadlineError: no command came in time.
        PeerError: rank 0 failed or vanished, or samples were refused.
    """
    saving = OwnerThread("checkpoint")
    failures: list[Exception] = []  # for saves beside training
    samples = RankSamples(learner, parallel, reader)
    try:
        # If a save failed, the others wait for this rank's part until this process ends.
        while not failures and _execute(learner, parallel, samples, saving, failures, snapshots):
            pass
    except Exception:
        # The thread ends with the process, and all ranks would lose the checkpoint. Wait half of
        # the deadline, so that ranks that wait for this one see its end.
        wait([saving.submit(lambda: None)], parallel.timeout_s / 2)
        raise
    saving.submit(lambda: None).result()  # after it has written the rest
    samples.close()
    if failures:
        raise failures[0]


def _execute(
    learner: Learner,
    parallel: ParallelContext,
    samples: RankSamples,
    saving: OwnerThread,
    failures: list[Exception],
    snapshots: PolicySnapshots | None,
) -> bool:
    """Execute rank 0's next command; return False after the stop command."""
    message = parallel.broadcast_bytes(None, "waiting for rank 0's next command")
    split = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "little")
    header = json.loads(message[_LENGTH_BYTES:split])
    kind = CommandKind(header["kind"])
    if kind is CommandKind.TAKE:
        samples.take(outline_from_bytes(message[split:]), int(header["step"]))
    elif kind is CommandKind.TRAIN:
        learner.train_step(samples.pop_batch(header["batch_id"]), int(header["step"]))
    elif kind is CommandKind.LOAD:
        learner.load(Path(header["directory"]), float(header["rate_factor"]))
    elif kind is CommandKind.FREEZE:
        assert snapshots is not None
        snapshots.freeze(int(header["version"]))
        parallel.all_gather([0.0], _FREEZING)
    elif kind is CommandKind.SAVE:
        directory = Path(header["directory"])
        # Keep no reference to the work: it has a copy of this rank's parts.
        if learner.saves_in_background:
            saving.submit(partial(_save_aside, learner.begin_save(directory), failures))
        else:
            _save(learner.begin_save(directory))
    return kind is not CommandKind.STOP


def _save(work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:  # rank 0 is notified and ends the run
        logger.error("the checkpoint cannot be written: %s", error)  # noqa: TRY400 - no bug here


def _save_aside(work: Callable[[], None], failures: list[Exception]) -> None:
    try:
        _save(work)
    except Exception as error:
        logger.exception("the checkpoint cannot be written")
        failures.append(error)


def join_ranks(config: RunConfig) -> ParallelContext:
    """Join this process to all trainer ranks."""
    torch.set_num_threads(config.sluice.trainer.torch_threads)
    device = select_device(config.trainer.device)
    if world_size(config) == 1:
        return ParallelContext(device.torch_device.type)
    timeout_s = command_timeout_s(config)
    logger.info("waiting for the %d ranks of the trainer", world_size(config))
    # Rank 0 joins only after the reward service has answered.
    return TorchDistributed(device, timeout_s, REWARD_START_TIMEOUT_S + timeout_s)


def share_total_steps(parallel: ParallelContext, total_steps: int | None) -> int:
    """Send the length of the run from rank 0 to all ranks; the others pass None. Collective."""
    payload = None if total_steps is None else json.dumps(total_steps).encode()
    return int(json.loads(parallel.broadcast_bytes(payload, "sharing the length of the run")))


def run_follower(config: RunConfig) -> None:
    """Follow rank 0 until the run ends."""
    with join_ranks(config) as parallel:
        learner = Learner(config, parallel, share_total_steps(parallel, None))
        snapshots = policy_snapshots(config, learner, parallel)
        with connected_ranks(config, snapshots, parallel):
            exempt_from_gc()
            follow(learner, parallel, reward_samples(config), snapshots)
