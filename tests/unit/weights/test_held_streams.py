"""Weights that several trainer ranks hold: what reaches workers, and what is refused."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, closing
from typing import Any
from unittest import mock

import grpc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.learner.sending_ranks import SendingRank, SendingRankClient
from sluice.device.cpu import CpuDevice
from sluice.errors import DeadlineError, InvalidRequestError, WeightSyncError
from sluice.types import TransferCertificates, TransferGroupSpec
from sluice.weight_share import WHOLE, Cut, Holding, WeightShare
from sluice.weights.digest import combined_digest
from sluice.weights.holdings import check_holdings
from sluice.weights.plan import tensor_specs
from sluice.weights.rank_sender import JoinOrder
from sluice.weights.receiver import StagedWeights, WeightReceiver
from sluice.weights.sender import BroadcastReport, WeightSender
from sluice.weights.share import (
    common_cuts,
    cuts_within,
    overlapping_ranks,
    pack,
    part_name,
    part_shape,
)
from sluice.weights.snapshot import SnapshotBuffers
from tests.support.certified import mutual, service_key

_NEVER = threading.Event()
_WAIT_S, _KEY = 60.0, b"k" * 32


def _weights(version: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = {
        "embed": torch.randn(97, 64, generator=generator),
        "down": torch.randn(32, 128, generator=generator).to(torch.bfloat16),
        "experts": torch.randn(6, 10, 8, generator=generator),
        "norm": torch.randn(33, generator=generator),
        "steps": torch.tensor(12),
        "none": torch.zeros(0, 3),
    }
    for tensor in weights.values():
        tensor.view(-1)[: max(1, tensor.numel() // 50) if version > 1 else 0] += version
    return weights


_SPECS = tensor_specs(_weights().items())


def _rows(*sizes: int) -> list[tuple[Cut, ...]]:
    """Cuts of dimension 0 into these many rows."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [(Cut(0, ((start, size),)),) for start, size in zip(starts, sizes, strict=True)]


def _expert(ranks: int, rows: int) -> tuple[Cut, ...]:
    return Cut(0, ((3 * ranks, 3),)), Cut(1, ((5 * rows, 5),))


# Four ranks: experts are divided in two and their rows in two, other tensors by rows.
_LAYOUT: dict[str, Sequence[tuple[Cut, ...] | None]] = {
    "embed": _rows(25, 25, 25, 22),
    "down": _rows(8, 8, 8, 8),
    "experts": [_expert(0, 0), _expert(1, 0), _expert(0, 1), _expert(1, 1)],
    "norm": [*_rows(9, 9, 15), None],
    "steps": [(), None, None, None],
    "none": [(), None, None, None],
}
_HOLDINGS = tuple(
    Holding(
        rank,
        tuple((n, cuts) for n, given in _LAYOUT.items() if (cuts := given[index]) is not None),
    )
    for index, rank in enumerate((0, 1, 4, 5))
)


def _half(rank: int) -> WeightShare:
    cuts = {
        "down": (Cut(1, ((64 * rank, 64),)),),
        "embed": (Cut(0, ((48 * rank, 48),)),),
        "experts": (Cut(0, ((3 * rank, 3),)), Cut(1, ((rank, 2), (5 + rank, 2)))),
    }
    return WeightShare(tuple(cuts.items()))


class _Fleet:
    """Four ranks that send, each with snapshots of its own, and replicas of some workers."""

    def __init__(
        self,
        stack: ExitStack,
        shares: Mapping[str, Sequence[WeightShare]],
        certificates: TransferCertificates | None = None,
        beside: _Fleet | None = None,
    ) -> None:
        self.shares, self.epoch, self.certificates = shares, 0, certificates
        self.servers: list[SendingRank] = []
        self.others: list[SendingRankClient] = []
        if beside is None:
            self.snapshots = [SnapshotBuffers(_SPECS, holding=one) for one in _HOLDINGS]
            self._start_ranks(stack)
        else:  # replicas of the same ranks
            self.epoch, self.others, self.snapshots = beside.epoch, beside.others, beside.snapshots
        self.sender = stack.enter_context(
            closing(
                WeightSender(
                    device=CpuDevice(),
                    bucket_bytes=1 << 14,
                    timeout_s=60.0,
                    certificates=certificates,
                    holdings=_HOLDINGS,
                    other_ranks=self.others,
                )
            )
        )
        self.workers = {
            (name, number): stack.enter_context(
                closing(WeightReceiver(CpuDevice(), share=share, in_place=name == "in place"))
            )
            for name, given in shares.items()
            for number, share in enumerate(given)
        }
        self.pool = stack.enter_context(ThreadPoolExecutor(len(self.workers)))

    def _start_ranks(self, stack: ExitStack) -> None:
        certificates = self.certificates
        for number, holding in enumerate(_HOLDINGS[1:], 1):
            server = SendingRank(
                number,
                _HOLDINGS,
                _SPECS,
                self.snapshots[number],
                device=CpuDevice(),
                timeout_s=60.0,
                keeps_base=True,
                host="127.0.0.1",
                key=_KEY,
                certificates=certificates,
            )
            self.servers.append(stack.enter_context(closing(server)))
            other = SendingRankClient(holding.rank, "127.0.0.1", server.port, _KEY, certificates)
            self.others.append(stack.enter_context(closing(other)))

    def form(self) -> dict[str, TransferGroupSpec]:
        self.epoch += 1
        specs = self.sender.form_group(self.epoch, list(self.shares), _SPECS, self.shares)
        joined = [
            self.pool.submit(
                worker.join,
                dataclasses.replace(specs[name].of_worker(number), certificates=self.certificates),
            )
            for (name, number), worker in self.workers.items()
        ]
        self.sender.join(_NEVER)
        for one in joined:
            one.result(_WAIT_S)
        return specs

    def freeze(self, version: int) -> None:
        weights = _weights(version)
        for snapshots, holding in zip(self.snapshots, _HOLDINGS, strict=True):
            parts = [(name, pack(weights[name], cuts)) for name, cuts in holding.parts]
            snapshots.write(parts, version, 60.0)

    def send(
        self, version: int, since: BroadcastReport | None = None
    ) -> tuple[BroadcastReport, dict[tuple[str, int], StagedWeights]]:
        staging = {
            key: self.pool.submit(worker.stage, version) for key, worker in self.workers.items()
        }
        with self.snapshots[0].read(version) as new:
            update = None
            if since is not None:
                with self.snapshots[0].read(since.version) as old:
                    update = self.sender.encode_update(
                        since.bases, old.weights, new.weights, _NEVER, version
                    )
                assert update is not None
            report = self.sender.broadcast(new.weights, version, _NEVER, update)
        return report, {key: one.result(_WAIT_S) for key, one in staging.items()}

    def check(self, staged: Mapping[tuple[str, int], StagedWeights], version: int) -> None:
        for (name, number), one in staged.items():
            cuts = dict(self.shares[name][number].cuts)
            for tensor, whole in _weights(version).items():
                expected = pack(whole, cuts.get(tensor, ()))
                assert torch.equal(one.tensors[tensor], expected), (name, number, tensor)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


_SHARES = {"one": (WHOLE,), "split": (_half(0), _half(1)), "in place": (_half(0), _half(1))}


def test_every_worker_receives_its_share_from_the_ranks_that_hold_it(stack: ExitStack) -> None:
    fleet = _Fleet(stack, _SHARES)
    fleet.form()
    fleet.freeze(1)
    report, staged = fleet.send(1)
    fleet.check(staged, 1)
    held = [one.plan.total_bytes for one in fleet.snapshots]
    # The class of whole replicas gets each holding once, that of the halves about as much.
    sent = zip(report.rank_bytes, held, strict=True)
    assert all(0.8 * mine < by_rank - mine < 1.2 * mine for by_rank, mine in sent)
    assert sum(report.rank_bytes) == report.sent_bytes == report.dense_bytes


def test_a_replicas_digest_is_that_of_the_parts_that_all_ranks_sent(stack: ExitStack) -> None:
    fleet = _Fleet(stack, _SHARES)
    fleet.form()
    fleet.freeze(1)
    report, staged = fleet.send(1)
    assert report.digests["one"] == staged["one", 0].digest
    parts = [staged["split", number].digests.by_name for number in (0, 1)]
    assert report.digests["split"] == combined_digest(parts[0] | parts[1])
    assert report.digests["split"] == report.digests["in place"]
    assert "embed[0:25+25]" in staged["one", 0].digests.by_name
    assert "down[0:8+8;1:64+64]" in parts[1]


def test_changes_are_found_where_the_weights_are_and_give_the_same_bytes(stack: ExitStack) -> None:
    fleet = _Fleet(stack, _SHARES)
    fleet.form()
    fleet.freeze(1)
    first, staged = fleet.send(1)
    for key, one in staged.items():
        fleet.workers[key].keep(one)
    fleet.freeze(2)
    second, staged = fleet.send(2, since=first)
    fleet.check(staged, 2)
    assert second.sent_bytes < 0.3 * second.dense_bytes
    assert second.digests["one"] == staged["one", 0].digest != first.digests["one"]


def test_a_rank_that_ends_in_front_of_a_version_is_named(stack: ExitStack) -> None:
    fleet = _Fleet(stack, {"one": (WHOLE,)})
    fleet.form()
    fleet.freeze(1)
    fleet.servers[1].close()
    with pytest.raises((WeightSyncError, DeadlineError), match="trainer rank 4"):
        fleet.send(1)
    with pytest.raises((WeightSyncError, DeadlineError), match="trainer rank 4"):
        fleet.sender.probe_others(_WAIT_S)


def test_ranks_are_steered_over_tls_and_refuse_callers_without_it(stack: ExitStack) -> None:
    fleet = _Fleet(stack, {"one": (WHOLE,)}, mutual(service_key()).for_transfers())
    fleet.form()
    fleet.freeze(1)
    report, staged = fleet.send(1)
    assert report.bases[0].digest == staged["one", 0].digest
    plain = SendingRankClient(1, "127.0.0.1", fleet.servers[0].port, _KEY)
    with closing(plain), pytest.raises(WeightSyncError, match="trainer rank 1"):
        plain.probe(_WAIT_S)


def test_a_stranger_without_the_runs_key_steers_no_rank(stack: ExitStack) -> None:
    fleet = _Fleet(stack, {"one": (WHOLE,)})
    stranger = SendingRankClient(1, "127.0.0.1", fleet.servers[0].port, b"x" * 32)
    with closing(stranger), pytest.raises(WeightSyncError, match="not its key"):
        stranger.probe(_WAIT_S)


def test_holdings_that_do_not_make_the_weights_are_refused_by_name(stack: ExitStack) -> None:
    fleet = _Fleet(stack, {"one": (WHOLE,)})
    spec = fleet.sender.form_group(1, ["one"], _SPECS)["one"]
    part = dataclasses.replace(spec, holdings=spec.holdings[:3])
    with pytest.raises(InvalidRequestError, match="do not make embed: 1408 of its elements"):
        fleet.workers["one", 0].join(part)
    unknown = Holding(3, (("other", ()),))
    with pytest.raises(InvalidRequestError, match="trainer rank 3: other is none of the weights"):
        check_holdings([unknown], _SPECS)


def test_holdings_with_an_overlap_and_a_gap_of_the_same_size_are_refused() -> None:
    check_holdings(_HOLDINGS, _SPECS)
    # Rank 4 holds the rows from 49 instead of 50, so nobody holds row 74.
    shifted = dict(_HOLDINGS[2].parts, embed=(Cut(0, ((49, 25),)),))
    holdings = [*_HOLDINGS[:2], Holding(4, tuple(shifted.items())), _HOLDINGS[3]]
    with pytest.raises(InvalidRequestError, match="make embed: ranks 1 and 4 both hold some"):
        check_holdings(holdings, _SPECS)


def test_a_rank_ends_an_older_epoch_of_the_same_workers_although_no_call_to_leave_came(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = _Fleet(stack, {"one": (WHOLE,)})
    fleet.freeze(1)
    fleet.form()
    monkeypatch.setattr(SendingRankClient, "leave", lambda *_: None)
    fleet.form()
    with pytest.raises(WeightSyncError, match=r"trainer rank 1.*epoch 1 is over"):
        fleet.others[0].send(1, 1, (), _WAIT_S, _NEVER, has_changes=False)
    _, staged = fleet.send(1)
    fleet.check(staged, 1)


def _order(spec: TransferGroupSpec) -> JoinOrder:
    return JoinOrder(spec, (WHOLE,), ({1: "one"},))


def test_a_rank_refuses_an_epoch_older_than_one_of_the_same_workers(stack: ExitStack) -> None:
    fleet = _Fleet(stack, {"one": (WHOLE,)})
    fleet.freeze(1)
    fleet.epoch = 6
    older = dataclasses.replace(fleet.form()["one"], epoch=6)
    with pytest.raises(WeightSyncError, match=r"trainer rank 1.*the epoch is over"):
        fleet.others[0].join(_order(older), _NEVER)
    _, staged = fleet.send(1)
    fleet.check(staged, 1)


def test_the_second_call_to_join_an_epoch_ends_the_first(stack: ExitStack) -> None:
    fleet = _Fleet(stack, {"one": (WHOLE,)})
    client = fleet.others[0]
    order = _order(fleet.sender.form_group(1, ["one"], _SPECS)["one"])
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(client.join, order, _NEVER) for _ in range(2)]
        first = next(as_completed(calls, _WAIT_S))
        client.leave(1, "the test is over")
        with pytest.raises(WeightSyncError, match="the epoch is over"):
            first.result()


def test_a_rank_sends_in_epochs_of_other_workers_at_the_same_time(stack: ExitStack) -> None:
    fleet = _Fleet(stack, {"one": (WHOLE,)})
    fleet.freeze(1)
    fleet.form()
    newcomer = _Fleet(stack, {"another": (WHOLE,)}, beside=fleet)
    newcomer.form()
    for each in (fleet, newcomer):
        _, staged = each.send(1)
        each.check(staged, 1)


@st.composite
def _some_cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Cut, ...]:
    found = []
    for dimension, size in enumerate(shape):
        taken = [False, *draw(st.lists(st.booleans(), min_size=size, max_size=size)), False]
        edges = [place for place in range(size + 1) if taken[place] != taken[place + 1]]
        ranges = tuple(
            (start, stop - start) for start, stop in zip(edges[::2], edges[1::2], strict=True)
        )
        if ranges and ranges != ((0, size),):
            found.append(Cut(dimension, ranges))
    return tuple(found)


_SHAPE = (5, 4, 3)


@given(st.lists(_some_cuts(_SHAPE), max_size=4))
def test_parts_overlap_if_an_element_is_in_two_of_them(parts: list[tuple[Cut, ...]]) -> None:
    whole = torch.arange(60).view(_SHAPE)
    held = {rank: set(pack(whole, cuts).flatten().tolist()) for rank, cuts in enumerate(parts)}
    pairs = {
        frozenset((one, other)) for one in held for other in range(one) if held[one] & held[other]
    }
    found = overlapping_ranks(list(enumerate(parts)), _SHAPE)
    assert frozenset(found) in pairs or (not pairs and found == ())


@pytest.mark.parametrize("dimension", [0, 1])
def test_hundreds_of_parts_that_lie_apart_in_one_dimension_are_not_compared(
    dimension: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = mock.Mock(return_value=None)
    monkeypatch.setattr("sluice.weights.share.common_cuts", compared)
    # Two ranges each, as in a layer that joins two: between them lie ranges of other ranks.
    parts = [(rank, (Cut(dimension, ((rank, 1), (256 + rank, 1))),)) for rank in range(256)]
    assert overlapping_ranks(parts, (512, 512)) == ()
    assert compared.call_count == 0


@given(_some_cuts(_SHAPE), _some_cuts(_SHAPE))
def test_what_two_parts_have_in_common_is_cut_out_of_either(
    one: tuple[Cut, ...], other: tuple[Cut, ...]
) -> None:
    whole = torch.arange(60).view(_SHAPE)
    common = common_cuts(_SHAPE, one, other)
    values = set(pack(whole, one).flatten().tolist()) & set(pack(whole, other).flatten().tolist())
    assert (common is None) == (not values)
    if common is None:
        return
    expected = pack(whole, common)
    assert sorted(values) == expected.flatten().tolist()
    assert part_shape(_SHAPE, common) == tuple(expected.shape)
    for outer in (one, other):
        within = cuts_within(_SHAPE, common, outer)
        assert torch.equal(pack(pack(whole, outer), within), expected)
    assert part_name("w", common) == part_name("w", common_cuts(_SHAPE, other, one) or ())


def test_an_epoch_is_left_while_its_calls_end() -> None:
    client = SendingRankClient(1, "127.0.0.1", 1, _KEY)
    running = _EndsWithinCancel()
    client._calls.SendVersion = mock.Mock(future=mock.Mock(return_value=running))
    with closing(client), ThreadPoolExecutor(1) as threads:
        running.call = threads.submit(client.send, 7, 1, [], 60.0, _NEVER, has_changes=False)
        running.is_awaited.wait(_WAIT_S)
        client.leave(7, "a member failed")
        with pytest.raises(WeightSyncError, match=r"trainer rank 1\b.*given up by rank 0"):
            running.call.result(_WAIT_S)


class _EndsWithinCancel:
    """A call of gRPC: its waiter has noticed its end before `cancel` returns."""

    call: Future[Any]

    def __init__(self) -> None:
        self.is_awaited, self._is_cancelled = threading.Event(), threading.Event()

    def result(self, timeout: float) -> None:
        self.is_awaited.set()
        if self._is_cancelled.wait(timeout):
            raise grpc.FutureCancelledError
        raise grpc.FutureTimeoutError

    def cancel(self) -> None:
        self._is_cancelled.set()
        wait([self.call], _WAIT_S)
