"""One trainer rank: rank 0 obeys lines of standard input, the others follow it.

All ranks wait for a line ``go`` once they are ready, so that none runs into a short deadline while
another one still loads. Rank 0's further lines are ``train STEP`` (answers with the metrics),
``weights FILE``, ``save FOLDER`` (answers with the error, if there is one), ``count FOLDER``
(saves; answers with the bytes that took), ``load FOLDER``, ``publish VERSION`` (to a replica in
this process; answers with what arrived), ``fail READER`` (at its first tensor), ``uniform STEP``
(trains on a batch whose last groups have no advantages), ``routed STEP`` (trains on a batch with
experts), ``sources STEP`` (whose groups are those of `SOURCES` in turn), ``spoil NUMBER`` (of the
next optimizer steps, whose gradients are infinite on rank 0), ``begin FOLDER`` and ``finish
FOLDER`` (a checkpoint ``global_step_N`` beside other commands), ``resume FOLDER`` (from the latest
of a run; answers with its step); the end of input stops all ranks, which then answer with the bytes
that they hold. Every answer is one line of JSON; an error ends the process with its text as the
last line.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from msgspec import structs
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from services.trainer.learner import learner as learner_module
from services.trainer.learner import rank_shares, sharded_state
from services.trainer.learner.checkpoint import CheckpointStore
from services.trainer.learner.learner import Learner
from services.trainer.learner.model import trained_model
from services.trainer.learner.model.optimizer import ShardedGradients
from services.trainer.learner.policy_snapshots import PolicySnapshots, connected_ranks
from services.trainer.learner.rank_command import RankLeader, follow
from services.trainer.learner.ranks import ParallelContext, TorchDistributed
from services.trainer.learner.tensor_layouts import local_part
from services.trainer.loop.learner_thread import LearnerThread
from sluice.concurrency.process import hold_errors, run_and_exit
from sluice.concurrency.threads import OwnerThread
from sluice.device.select import select_device
from sluice.errors import SluiceError
from sluice.types import DataProgress, TrainBatch
from sluice.vision.image_prompts import load_image_prompts
from sluice.vision.vision_shape import read_vision_shape
from sluice.weights import rank_sender
from sluice.weights.group import TransferGroup
from sluice.weights.rank_sender import RemoteRank
from tests.support.made_bytes import MadeBytes
from tests.support.publisher_fleet import Trainer
from tests.support.taken_samples import MadeSamples, outline_of
from tests.support.tiny_policy import (
    adapting,
    freezing,
    make_batch,
    make_config,
    of_sources,
    on_device,
    recomputing,
    routed,
    skipping,
    uniform,
    with_critic,
    with_sources,
)
from tests.support.vision_batches import make_image_batch
from tests.support.weight_digest import plain_digest

NUM_GROUPS = 4
SENDS_WITHIN_S = 120.0
UNIFORM = (2, 3)
NUM_EXPERTS = 8
SOURCES = ("math", "code")
BUCKET_BYTES = 1 << 12
"""Of gathered shards: with it even a tiny model takes several."""


def answer(values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


class Publishing:
    """A publisher with one replica in this process."""

    def __init__(
        self, snapshots: PolicySnapshots, others: Sequence[RemoteRank], timeout_s: float
    ) -> None:
        self._trainer = Trainer(
            timeout_s,
            specs=snapshots.tensors,
            snapshots=snapshots.buffers,
            holdings=snapshots.holdings,
            others=others,
        )
        self._runner = asyncio.Runner()
        self._replica = self._trainer.add("replica")

    def publish(self, leader: RankLeader, version: int) -> dict[str, object]:
        leader.freeze(version)
        report = self._runner.run(self._trainer.publisher.publish(version))
        served = self._replica.served
        assert served is not None
        assert (served.version, report.replicas) == (version, 1)
        return {
            "digest": plain_digest(served.tensors),
            "sent": report.sent_bytes,
            "all": report.dense_bytes,
            "ranks": report.rank_bytes,
        }

    def close(self) -> None:
        self._runner.run(self._trainer.publisher.close())
        self._replica.end()
        self._runner.close()


def batch_of(model: Path, step: int) -> TrainBatch:
    """With images, if the model reads them."""
    reader = load_image_prompts(model)
    if reader is None:
        return make_batch(NUM_GROUPS, seed=step)
    return make_image_batch(reader, NUM_GROUPS, seed=step)


def made_batch(model: Path, batch_id: str) -> TrainBatch:
    """By the command that trains it, and its step."""
    command, step = batch_id.split("-")
    batch = batch_of(model, int(step))
    if command == "uniform":
        batch = uniform(batch, UNIFORM)
    if command == "routed":
        batch = routed(batch, NUM_EXPERTS, without=2, layers=num_layers(model))
    if command == "sources":
        batch = of_sources(batch, SOURCES)
    return replace(batch, batch_id=batch_id)


def num_layers(model: Path) -> int:
    """Of the language model in a folder."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return int(config.get("text_config", config)["num_hidden_layers"])


def obey(
    leader: RankLeader,
    snapshots: PolicySnapshots,
    others: Sequence[RemoteRank],
    model: Path,
    sends_within_s: float,
) -> None:
    saving = Saving()
    with ExitStack() as stack:
        publishing: Publishing | None = None
        for line in sys.stdin:
            command, argument = line.split()
            if command == "publish":
                if publishing is None:
                    publishing = Publishing(snapshots, others, sends_within_s)
                    stack.callback(publishing.close)
                answer(publishing.publish(leader, int(argument)))
            elif command == "begin":
                saving.begin(leader, Path(argument))
                answer("begun")
            elif command == "finish":
                answer(saving.finish())
            elif command == "resume":
                answer(resume(leader, Path(argument)))
            else:
                answer(obey_one(leader, command, argument, model))


class Saving:
    """Checkpoints that a second thread writes, as `LearnerThread` has one write them."""

    def __init__(self) -> None:
        self._thread = OwnerThread("checkpoint")
        self._running: Future[Path] | None = None

    def begin(self, leader: RankLeader, folder: Path) -> None:
        store, step = CheckpointStore(folder.parent), int(folder.name.rpartition("_")[2])
        write = leader.begin_save(store.begin(step))
        self._running = self._thread.submit(lambda: store.finish(step, write, DataProgress(step)))

    def finish(self) -> str:
        assert self._running is not None
        return str(self._running.result())


def resume(leader: RankLeader, root: Path) -> int:
    found = CheckpointStore(root).latest()
    assert found is not None
    leader.load(found.actor)
    return found.step


def hold(file: Path) -> None:
    """Let no rank write a tensor while `file` exists."""
    append = sharded_state.TensorFile.append

    def held(writer: sharded_state.TensorFile, tensor: torch.Tensor) -> None:
        while file.exists():
            time.sleep(0.01)
        append(writer, tensor)

    mock.patch.object(sharded_state.TensorFile, "append", held).start()


def refuse(name: str) -> None:
    """Let this rank make no file and no folder of this name."""
    for method in ("open", "mkdir"):
        original = getattr(Path, method)

        def refused(path: Path, *arguments: Any, make: Any = original, **options: Any) -> Any:
            if path.name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return make(path, *arguments, **options)

        mock.patch.object(Path, method, refused).start()


def obey_one(leader: RankLeader, command: str, argument: str, model: Path) -> object:
    if command in {"train", "uniform", "routed", "sources"}:
        outline, step = outline_of(made_batch(model, f"{command}-{argument}")), int(argument)
        lost = leader.take_samples(outline, step)
        return {"lost": lost} if lost else leader.train_step(outline, step)
    if command == "weights":
        folder = Path(f"{argument}.saved") / "actor"
        leader.save(folder)
        save_file(saved_weights(folder), argument)
    elif command == "save":
        try:
            leader.save(Path(argument))
        except OSError as error:
            return {"error": str(error)}
    elif command == "count":
        with MadeBytes() as live:
            leader.save(Path(argument))
        return live.most
    elif command == "spoil":
        spoil_gradients(int(argument))
    elif command == "load":
        leader.load(Path(argument))
    elif command == "fail":
        parts = leader._learner.parts

        def failing(*arguments: Any, **options: Any) -> Iterator[Any]:
            yield next(iter(parts(*arguments, **options)))
            raise OSError("no space left")

        with suppress(OSError), mock.patch.object(leader._learner, "parts", failing):
            leader.freeze(99)
    return "done"


def spoil_gradients(steps: int) -> None:
    """Let one gradient of this rank be infinite in so many optimizer steps."""
    complete, counts = ShardedGradients.complete, count(1)

    def completed(gradients: ShardedGradients) -> None:
        complete(gradients)
        if next(counts) <= steps:
            found = gradients._parameters[-1].grad
            assert found is not None
            local_part(found).fill_(math.inf)

    mock.patch.object(ShardedGradients, "complete", completed).start()


def dying(exchange: Callable[..., Any], calls: int, *, raises: bool = False) -> Callable[..., Any]:
    """An exchange that kills this process, or raises, instead of its call of this number.

    It raises while a collective is under way, as the next layer's gathering may be.
    """
    counts = count(1)

    def exchanged(*arguments: Any) -> Any:
        if next(counts) != calls:
            return exchange(*arguments)
        if raises:
            dist.all_reduce(torch.zeros(1), async_op=True)
            raise RuntimeError("no memory left on the device")
        return os.kill(os.getpid(), signal.SIGKILL)

    return exchanged


def die_in_exchanges(call: int) -> None:
    """Let this rank die in this call of an exchange of parts of a layer."""
    for name in ("_exchange", "_all_gather"):
        mock.patch.object(rank_shares, name, dying(getattr(rank_shares, name), call)).start()


def fail_to_send(phase: str, call: int, number: int) -> None:
    """Let this rank signal itself at a call of a phase: ``form``, ``send`` (the header or trailer
    of a version) or ``encode_update``."""
    owner: Any = TransferGroup if phase == "form" else rank_sender
    original, counts = getattr(owner, phase), count(1)

    def failing(*arguments: Any) -> Any:
        if next(counts) == call:
            # Sent to the process, SIGSTOP reaches another thread, and this one still sends.
            signal.pthread_kill(threading.get_ident(), number)
        return original(*arguments)

    mock.patch.object(owner, phase, failing).start()


def saved_weights(actor: Path) -> dict[str, torch.Tensor]:
    """By parameter name, from the files of a checkpoint."""
    folder = actor / "huggingface"
    family: Any = AutoModelForCausalLM
    if read_vision_shape(str(folder)) is not None:
        family = AutoModelForImageTextToText
    loaded = family.from_pretrained(folder, dtype="auto")
    return dict(loaded.named_parameters())


def held_bytes() -> int:
    """Of all storages that tensors of this process have."""
    gc.collect()
    # isinstance would ask an object for its class, and some of torch's warn then.
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    storages = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in storages}
    return sum(sizes.values())


def fail_as_asked(
    parallel: ParallelContext,
    dies_in_exchange: int,
    fails_between_stages: tuple[int, int, bool] | None,
    fails_to_send: tuple[str, int, int] | None,
) -> None:
    """Let this rank fail later, if it is the one: the last, if none is named."""
    is_last = parallel.rank == parallel.world_size - 1
    if dies_in_exchange and is_last:
        die_in_exchanges(dies_in_exchange)
    if fails_between_stages and parallel.rank == fails_between_stages[0]:
        _, call, raises = fails_between_stages
        exchange = dying(TorchDistributed.exchange, call, raises=raises)
        mock.patch.object(TorchDistributed, "exchange", exchange).start()
    if fails_to_send is not None and is_last:
        fail_to_send(*fails_to_send)


def run(
    model: Path,
    timeout_s: float,
    forming_timeout_s: float,
    actor: dict[str, object],
    frozen: str | None = None,
    *,
    device: str = "cpu",
    critic: bool | dict[str, Any] = False,
    skips: bool = False,
    recomputes: bool = False,
    adapters: dict[str, object] | None = None,
    sources: dict[str, dict[str, object]] | None = None,
    dies_in_exchange: int = 0,
    fails_between_stages: tuple[int, int, bool] | None = None,
    holds: str | None = None,
    refuses: tuple[int, str] | None = None,
    sends_within_s: float = SENDS_WITHIN_S,
    fails_to_send: tuple[str, int, int] | None = None,
) -> None:
    if holds is not None:
        hold(Path(holds))
    parallel: ParallelContext = ParallelContext()
    if os.environ["WORLD_SIZE"] != "1":
        parallel = TorchDistributed(select_device(device), timeout_s, forming_timeout_s)
    if refuses is not None and parallel.rank == refuses[0]:
        refuse(refuses[1])
    small = partial(trained_model.write_model, bucket_bytes=BUCKET_BYTES)
    mock.patch.object(trained_model, "write_model", small).start()
    config = on_device(make_config(model, NUM_GROUPS, **actor), device)
    config = adapting(config, **(adapters or {}))
    if critic is not False or frozen is not None:
        config = with_critic(config, **(critic if isinstance(critic, dict) else {}))
    config = config if sources is None else with_sources(config, sources)
    if frozen is not None:
        mock.patch.object(learner_module, "load_policy", freezing(frozen)).start()
    config = recomputing(config) if recomputes else config
    fail_as_asked(parallel, dies_in_exchange, fails_between_stages, fails_to_send)
    learner = Learner(skipping(config) if skips else config, parallel, total_steps=10)
    samples = MadeSamples(partial(made_batch, model))
    weights = structs.replace(config.sluice.weights, timeout_s=sends_within_s)
    config = structs.replace(config, sluice=structs.replace(config.sluice, weights=weights))
    snapshots = PolicySnapshots(learner, parallel.rank, torch.bfloat16, SENDS_WITHIN_S)
    with parallel:
        with connected_ranks(config, snapshots, parallel) as others:
            answer("ready")
            assert sys.stdin.readline() == "go\n"
            if parallel.rank == 0:
                leader = RankLeader(learner, parallel, samples, snapshots)
                thread = LearnerThread(leader, CheckpointStore(model), learner.peaks)
                try:
                    obey(leader, snapshots, others, model, sends_within_s)
                finally:
                    # A rank that is stopped would hold the stop command until the deadline.
                    if not isinstance(sys.exception(), SluiceError):
                        asyncio.run(thread.close())
            else:
                follow(learner, parallel, samples, snapshots)
        answer({"held_bytes": held_bytes()})


def obeyed() -> int:
    torch.set_num_threads(1)
    arguments = json.loads(sys.argv[1])
    try:
        run(Path(arguments.pop("model")), **arguments)
    except SluiceError as error:
        hold_errors([error])
        answer(f"{type(error).__name__}: {error}")
        return 3
    return 0


def main() -> NoReturn:
    run_and_exit(obeyed)


if __name__ == "__main__":
    main()
