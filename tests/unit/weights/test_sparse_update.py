"""Updates sent as their changes over Gloo, with threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from sluice.device.cpu import CpuDevice
from sluice.errors import InvalidRequestError
from sluice.types import TensorSpec
from sluice.weights.delta import ChangeReceivingPort, encode_update
from sluice.weights.plan import WeightBuffer, plan_transfer, tensor_specs
from sluice.weights.receiver import StagedWeights, WeightReceiver
from sluice.weights.sender import WeightSender
from sluice.weights.transfer import BaseVersion
from tests.support.weight_digest import plain_digest

_NEVER = threading.Event()
_CPU = torch.device("cpu")


def _weights(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(40_000, generator=generator).to(torch.bfloat16)
    large[number::200] *= 1.5
    large[100 + number] = torch.nan
    return {
        "large": large,
        "small": torch.full((5,), -0.0 if number % 2 else 0.0),
        "none": torch.zeros(0, 2),
        "steps": torch.tensor(number),
    }


_SPECS = tensor_specs(_weights(0).items())


def _buffer(number: int, specs: tuple[TensorSpec, ...] = _SPECS) -> WeightBuffer:
    buffer = WeightBuffer(plan_transfer(specs, 4096))
    for name, tensor in _weights(number).items():
        buffer.tensors[name].copy_(tensor)
    return buffer


class _Ends:
    """A sender and a receiver in one epoch."""

    def __init__(self, sender: WeightSender, receiver: WeightReceiver) -> None:
        self.sender, self.receiver = sender, receiver
        self.pool = ThreadPoolExecutor(2)
        spec = sender.form_group(1, ["r0"], _SPECS)["r0"]
        joined = self.pool.submit(receiver.join, spec)
        sender.join(_NEVER)
        joined.result(60)

    def transfer(self, number: int, since: BaseVersion | None = None) -> StagedWeights:
        staging = self.pool.submit(self.receiver.stage, number)
        new = _buffer(number)
        update = None
        if since is not None:
            update = self.sender.encode_update([since], _buffer(since.version), new, _NEVER)
            assert update is not None
        report = self.sender.broadcast(new, number, _NEVER, update)
        staged = staging.result(60)
        assert staged.digest == report.bases[0].digest == plain_digest(_weights(number))
        assert plain_digest(staged.tensors) == staged.digest
        assert staged.received_bytes == report.sent_bytes
        assert (report.sent_bytes < report.dense_bytes) == (since is not None)
        return staged


@pytest.fixture
def ends() -> Iterator[_Ends]:
    with (
        closing(WeightSender(device=CpuDevice(), bucket_bytes=4096, timeout_s=60.0)) as sender,
        closing(WeightReceiver(CpuDevice())) as receiver,
    ):
        made = _Ends(sender, receiver)
        yield made
        made.pool.shutdown()


def _base(staged: StagedWeights) -> BaseVersion:
    return BaseVersion(staged.version, staged.digest)


def test_a_chain_of_changes_ends_at_the_weights_that_were_meant(ends: _Ends) -> None:
    staged = ends.transfer(1)
    ends.receiver.keep(staged)
    for number in range(2, 6):
        staged = ends.transfer(number, since=_base(staged))
        ends.receiver.keep(staged)


def test_what_is_held_stays_as_it_is_while_later_versions_are_staged_and_thrown_away(
    ends: _Ends,
) -> None:
    held = ends.transfer(1)
    ends.receiver.keep(held)
    for number in (2, 3):
        ends.receiver.recycle(ends.transfer(number, since=_base(held)))
        assert plain_digest(held.tensors) == held.digest


def test_two_sets_of_weights_take_turns(ends: _Ends) -> None:
    addresses = set()
    base: BaseVersion | None = None
    for number in range(1, 7):
        staged = ends.transfer(number, since=base)
        ends.receiver.keep(staged)
        addresses.add(staged.tensors["large"].data_ptr())
        base = _base(staged)
    assert len(addresses) == 2


def test_coding_ends_when_it_is_not_worth_it_or_when_asked_to() -> None:
    plan = plan_transfer(_SPECS, 4096)
    old, other = _buffer(1), _buffer(1)
    other.tensors["large"].mul_(1.7)
    assert encode_update(plan, BaseVersion(1, "00"), old, other, _NEVER) is None
    assert encode_update(plan, BaseVersion(1, "00"), old, _buffer(2), _NEVER) is not None
    stop = threading.Event()
    stop.set()
    assert encode_update(plan, BaseVersion(1, "00"), old, _buffer(2), stop) is None


def test_buffers_of_other_tensors_are_not_compared() -> None:
    plan = plan_transfer(_SPECS, 4096)
    other_order = _buffer(1, tuple(reversed(_SPECS)))
    for old, new in ((other_order, _buffer(2)), (_buffer(2), other_order)):
        with pytest.raises(InvalidRequestError, match="the epoch's tensors"):
            encode_update(plan, BaseVersion(1, "00"), old, new, _NEVER)


@pytest.mark.parametrize("size", [0, 1 << 40])
def test_memory_is_not_taken_for_sizes_that_cannot_be(size: int) -> None:
    staging = WeightBuffer(plan_transfer(_SPECS, 4096))
    sizes = [20] * len(staging.plan.buckets)
    sizes[2] = size
    with pytest.raises(ValueError, match=f"bucket 3 claims changes of {size} bytes"):
        ChangeReceivingPort(staging.plan, staging, staging, sizes, _CPU, "trainer", "a test")
