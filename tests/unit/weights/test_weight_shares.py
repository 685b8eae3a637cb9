"""Workers that take a share of the weights: what reaches them, and what the replica's digest is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
import xxhash

from sluice.device.cpu import CpuDevice
from sluice.errors import InvalidRequestError, NotReadyError, WeightSyncError
from sluice.types import TransferGroupSpec
from sluice.weight_share import WHOLE, Cut, WeightShare
from sluice.weights import receiver, sender, transfer
from sluice.weights.digest import WeightDigests, combined_digest
from sluice.weights.group import TransferGroup
from sluice.weights.plan import WeightBuffer, tensor_specs
from sluice.weights.receiver import StagedWeights, WeightReceiver
from sluice.weights.sender import BroadcastReport, WeightSender
from sluice.weights.share import check_share, pack, part_name, part_shape, unpack
from tests.support.weight_buffers import buffer_of
from tests.support.weight_digest import plain_digest

_NEVER = threading.Event()
_WAIT_S = 60.0


def _weights(seed: int = 1, changed: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = {
        "embed": torch.randn(96, 64, generator=generator),
        "down": torch.randn(32, 128, generator=generator).to(torch.bfloat16),
        "experts": torch.randn(6, 10, 8, generator=generator),
        "norm": torch.randn(33, generator=generator),
        "steps": torch.tensor(12),
    }
    if seed != 1:
        for tensor in weights.values():
            flat = tensor.view(-1)
            flat[: max(1, int(changed * flat.numel()))] += seed
    return weights


_SPECS = tensor_specs(_weights().items())


def _half(rank: int) -> WeightShare:
    cuts = {
        "down": (Cut(1, ((64 * rank, 64),)),),
        "embed": (Cut(0, ((48 * rank, 48),)),),
        "experts": (Cut(0, ((3 * rank, 3),)), Cut(1, ((rank, 2), (5 + rank, 2)))),
    }
    return WeightShare(tuple(cuts.items()))


def _every_second(size: int) -> tuple[tuple[int, int], ...]:
    return tuple((start, 1) for start in range(0, size, 2))


_HALVES = (_half(0), _half(1))


class _Fleet:
    """A sender and replicas; each replica's workers are receivers in threads of their own."""

    def __init__(self, stack: ExitStack, shares: Mapping[str, Sequence[WeightShare]]) -> None:
        self.sender = stack.enter_context(
            closing(WeightSender(device=CpuDevice(), bucket_bytes=4096, timeout_s=60.0))
        )
        self.shares, self.epoch = shares, 0
        self.workers = {
            (name, number): stack.enter_context(
                closing(WeightReceiver(CpuDevice(), share, in_place=True))
            )
            for name, given in shares.items()
            for number, share in enumerate(given)
        }
        self.pool = stack.enter_context(ThreadPoolExecutor(len(self.workers)))

    def form(self) -> dict[str, TransferGroupSpec]:
        self.epoch += 1
        specs = self.sender.form_group(self.epoch, list(self.shares), _SPECS, self.shares)
        joined = [
            self.pool.submit(worker.join, specs[name].of_worker(number))
            for (name, number), worker in self.workers.items()
        ]
        self.sender.join(_NEVER)
        for one in joined:
            one.result(_WAIT_S)
        return specs

    def send(
        self,
        version: int,
        weights: WeightBuffer,
        since: tuple[BroadcastReport, WeightBuffer] | None,
    ) -> tuple[BroadcastReport, dict[tuple[str, int], StagedWeights]]:
        staging = {
            key: self.pool.submit(worker.stage, version) for key, worker in self.workers.items()
        }
        update = None
        if since is not None:
            update = self.sender.encode_update(since[0].bases, since[1], weights, _NEVER)
            assert update is not None
        report = self.sender.broadcast(weights, version, _NEVER, update)
        return report, {key: one.result(_WAIT_S) for key, one in staging.items()}

    def keep(self, staged: Mapping[tuple[str, int], StagedWeights]) -> None:
        for key, one in staged.items():
            self.workers[key].keep(one)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def _check(
    weights: Mapping[str, torch.Tensor],
    share: WeightShare,
    staged: StagedWeights,
) -> None:
    cuts = dict(share.cuts)
    for name, tensor in weights.items():
        assert torch.equal(staged.tensors[name], pack(tensor, cuts.get(name, ()))), name


def test_each_worker_receives_its_share_and_no_more(stack: ExitStack) -> None:
    fleet = _Fleet(stack, {"split": _HALVES, "other": _HALVES, "one": (WHOLE,)})
    specs = fleet.form()
    assert [place.group for place in specs["split"].places] == [0, 1]
    assert [place.rank for place in specs["other"].places] == [2, 2]
    assert specs["one"].group == 2
    weights = _weights()
    report, staged = fleet.send(1, buffer_of(weights), None)
    for (name, number), one in staged.items():
        _check(weights, fleet.shares[name][number], one)
    whole_bytes = staged["one", 0].received_bytes
    assert staged["split", 0].received_bytes < 0.55 * whole_bytes
    assert report.dense_bytes == sum(
        staged[key].received_bytes for key in (("split", 0), ("split", 1), ("one", 0))
    )


def test_a_replicas_digest_has_each_part_once_and_is_that_of_its_workers(stack: ExitStack) -> None:
    fleet = _Fleet(stack, {"split": _HALVES, "one": (WHOLE,)})
    fleet.form()
    weights = _weights()
    report, staged = fleet.send(1, buffer_of(weights), None)
    assert report.digests["one"] == plain_digest(weights) != report.digests["split"]
    parts = [staged["split", number].digests.by_name for number in (0, 1)]
    assert parts[0].keys() & parts[1].keys() == {"norm", "steps"}
    assert report.digests["split"] == combined_digest(parts[0] | parts[1])
    header = b'["down","bfloat16",[32,128],[[1,[[64,64]]]]]'
    content = weights["down"][:, 64:].contiguous().view(torch.uint8).numpy().tobytes()
    expected = xxhash.xxh3_128(len(header).to_bytes(8, "little") + header + content).digest()
    assert parts[1]["down[1:64+64]"] == expected


def test_members_that_divide_the_weights_in_one_way_have_one_digest_computed_once(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = _Fleet(stack, {"a": _HALVES, "one": (WHOLE,), "b": _HALVES, "turned": _HALVES[::-1]})
    fleet.form()
    computed: list[str] = []

    def combined(parts: Mapping[str, bytes]) -> str:
        computed.append(combined_digest(parts))
        return computed[-1]

    monkeypatch.setattr(sender, "combined_digest", combined)
    report, _ = fleet.send(1, buffer_of(_weights()), None)
    assert report.digests["a"] == report.digests["b"] == report.digests["turned"]
    assert len(computed) == len({*report.digests.values()}) == 2


def test_changes_travel_within_a_share_and_are_made_in_place(stack: ExitStack) -> None:
    fleet = _Fleet(stack, {"split": _HALVES, "one": (WHOLE,)})
    fleet.form()
    old = buffer_of(_weights())
    first, staged = fleet.send(1, old, None)
    fleet.keep(staged)
    memory = {key: one.buffer for key, one in staged.items()}
    weights = _weights(2, changed=0.01)
    report, staged = fleet.send(2, buffer_of(weights), (first, old))
    assert report.sent_bytes < 0.3 * report.dense_bytes
    for (name, number), one in staged.items():
        _check(weights, fleet.shares[name][number], one)
        assert one.buffer is memory[name, number]
    assert report.digests["one"] == plain_digest(weights)


def test_a_version_that_was_broken_off_is_no_base_and_the_next_comes_whole(
    stack: ExitStack,
) -> None:
    fleet = _Fleet(stack, {"split": _HALVES})
    fleet.form()
    old = buffer_of(_weights())
    first, staged = fleet.send(1, old, None)
    fleet.keep(staged)
    waiting = [fleet.pool.submit(worker.stage, 2) for worker in fleet.workers.values()]
    fleet.sender.abandon("a test")
    for one in waiting:
        with pytest.raises(WeightSyncError):
            one.result(_WAIT_S)
    fleet.form()
    waiting = [fleet.pool.submit(worker.stage, 3) for worker in fleet.workers.values()]
    new = buffer_of(_weights(2, 0.01))
    with contextlib.suppress(WeightSyncError):  # it may have sent all before a worker refuses
        changes = fleet.sender.encode_update(first.bases, old, new, _NEVER)
        fleet.sender.broadcast(new, 3, _NEVER, changes)
    for one in waiting:
        with pytest.raises(WeightSyncError, match=r"builds on version 1 .*held here is none"):
            one.result(_WAIT_S)
    fleet.form()
    _, staged = fleet.send(4, buffer_of(_weights(2)), None)
    _check(_weights(2), _HALVES[1], staged["split", 1])


def test_one_group_that_fails_ends_all_groups_of_the_epoch(stack: ExitStack) -> None:
    fleet = _Fleet(stack, {"split": _HALVES, "one": (WHOLE,)})
    fleet.form()
    waiting = [fleet.pool.submit(fleet.workers[key].stage, 1) for key in fleet.workers]
    fleet.workers["split", 1].abort("a test")
    with pytest.raises(WeightSyncError):
        fleet.sender.broadcast(buffer_of(_weights()), 1, _NEVER)
    for worker in fleet.workers.values():  # as the trainer asks of them; else by their deadline
        worker.abort("the epoch is over")
    for one in waiting:
        assert isinstance(one.exception(_WAIT_S), WeightSyncError | NotReadyError | None)
    with pytest.raises(NotReadyError, match="abandoned"):
        fleet.sender.broadcast(buffer_of(_weights()), 2, _NEVER)


def test_a_worker_with_another_share_than_the_trainer_knows_is_refused(stack: ExitStack) -> None:
    fleet = _Fleet(stack, {"split": _HALVES})
    specs = fleet.sender.form_group(1, ["split"], _SPECS, {"split": _HALVES})
    with pytest.raises(InvalidRequestError, match="plan digest"):
        fleet.workers["split", 0].join(specs["split"].of_worker(1))


def test_a_part_that_is_damaged_in_one_worker_is_named_with_its_place(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = _Fleet(stack, {"split": _HALVES})
    fleet.form()
    received = transfer.broadcast_buckets

    def damaged(group: TransferGroup, *rest: Any) -> WeightDigests:
        found = received(group, *rest)
        if group.spec.group == 0:
            return found
        return WeightDigests(found.names, (bytes(16), *found.parts[1:]))

    monkeypatch.setattr(receiver, "broadcast_buckets", damaged)
    staging = [fleet.pool.submit(worker.stage, 1) for worker in fleet.workers.values()]
    fleet.sender.broadcast(buffer_of(_weights()), 1, _NEVER)
    staging[0].result(_WAIT_S)
    with pytest.raises(
        WeightSyncError, match=r"tensor embed\[0:48\+48\] differs from what was sent"
    ):
        staging[1].result(_WAIT_S)


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ((("nothing", (Cut(0, ((0, 1),)),)),), "nothing is none of the weights"),
        ((("norm", (Cut(0, ((0, 1),)),)), ("embed", (Cut(0, ((0, 1),)),))), "embed follows norm"),
        ((("norm", (Cut(0, ((0, 1),)),)),) * 2, "norm follows norm"),
        ((("norm", ()),), r"cuts of dimensions \[\]"),
        ((("norm", (Cut(1, ((0, 1),)),)),), r"cuts of dimensions \[1\]; send rising ones of 1"),
        ((("embed", (Cut(1, ((0, 1),)), Cut(0, ((0, 1),)))),), r"dimensions \[1, 0\]"),
        ((("steps", (Cut(0, ((0, 1),)),)),), "rising ones of 0"),
        ((("norm", (Cut(0, ()),)),), "0 ranges of dimension 0"),
        ((("norm", (Cut(0, ((0, 1),) * 2000),)),), "2000 ranges"),
        (
            (("embed", (Cut(0, _every_second(96)), Cut(1, _every_second(64)))),),
            "1536 blocks, the product of the ranges of its cuts; send cuts of at most 1024",
        ),
        ((("norm", (Cut(0, ((0, 34),)),)),), "the range of 34 from 0 in dimension 0 of 33"),
        ((("norm", (Cut(0, ((-1, 2),)),)),), "the range of 2 from -1"),
        ((("norm", (Cut(0, ((3, 0),)),)),), "the range of 0 from 3"),
        ((("norm", (Cut(0, ((3, 2), (5, 1))),)),), "the range of 1 from 5"),
        ((("norm", (Cut(0, ((1 << 62, 1 << 62),)),)),), "send rising ranges"),
    ],
)
def test_a_share_that_is_none_of_these_weights_is_refused_with_words(
    cuts: tuple[tuple[str, tuple[Cut, ...]], ...], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"worker 3: .*{words}"):
        check_share(WeightShare(cuts), _SPECS, "worker 3")
    for share in _HALVES:
        check_share(share, _SPECS, "worker 3")


def test_a_packed_part_returns_to_its_place() -> None:
    tensor = torch.arange(6 * 10 * 8).view(6, 10, 8)
    cuts = dict(_HALVES[1].cuts)["experts"]
    part = pack(tensor, cuts)
    assert tuple(part.shape) == part_shape(tensor.shape, cuts) == (3, 4, 8)
    found = torch.zeros_like(tensor)
    unpack(part, cuts, found)
    assert torch.equal(pack(found, cuts), part)
    assert int((found != 0).sum()) == part.numel()
    assert part_name("experts", cuts) == "experts[0:3+3;1:1+2,6+2]"
