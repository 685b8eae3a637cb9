"""Snapshots: converted copies, two at a time, never overwritten under a reader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sluice.errors import DeadlineError, InvalidRequestError, NotReadyError
from sluice.types import TensorSpec
from sluice.weights.plan import tensor_specs
from sluice.weights.snapshot import SnapshotBuffers
from tests.support.second_device import SECOND, second_device


def _buffers() -> SnapshotBuffers:
    return SnapshotBuffers([TensorSpec("w", "float32", (3,))])


def _value(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("w", torch.full((3,), value))]


def test_a_snapshot_holds_the_weights_in_their_wire_dtype() -> None:
    weights = {"embed": torch.tensor([1.5, 0.1]), "steps": torch.tensor(3)}
    buffers = SnapshotBuffers(tensor_specs(weights.items(), torch.bfloat16))
    snapshot = buffers.write(weights.items(), version=4, timeout_s=0.0)
    expected = weights["embed"].to(torch.bfloat16)
    weights["embed"].zero_()
    assert snapshot.version == buffers.version == 4
    assert torch.equal(snapshot.weights.tensors["embed"], expected)
    assert snapshot.weights.tensors["steps"].item() == 3


class _CopiedBytes(TorchDispatchMode):
    """Counts the bytes that copies read."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket is torch.ops.aten.copy_:
            self.total += args[1].nbytes
        return func(*args, **(kwargs or {}))


def test_weights_of_a_device_leave_it_in_their_wire_dtype() -> None:
    weight = torch.randn(1000)
    buffers = SnapshotBuffers([TensorSpec("w", "bfloat16", (1000,))])
    with second_device():
        there = weight.to(SECOND)
        with _CopiedBytes() as copied:
            snapshot = buffers.write([("w", there)], version=1, timeout_s=0.0)
    assert copied.total == 2000
    assert torch.equal(snapshot.weights.tensors["w"], weight.bfloat16())


def test_a_version_stays_readable_while_the_next_is_written() -> None:
    buffers = _buffers()
    buffers.write(_value(1), version=1, timeout_s=0.0)
    with buffers.read() as first:
        buffers.write(_value(2), version=2, timeout_s=0.0)
        assert first.weights.tensors["w"].tolist() == [1, 1, 1]
        with buffers.read() as second:
            assert second.version == 2
            assert second.weights.tensors["w"].tolist() == [2, 2, 2]


def test_a_version_that_is_read_is_not_overwritten() -> None:
    buffers = _buffers()
    buffers.write(_value(1), version=1, timeout_s=0.0)
    with buffers.read() as first:
        buffers.write(_value(2), version=2, timeout_s=0.0)
        with pytest.raises(DeadlineError, match="version 1"):
            buffers.write(_value(3), version=3, timeout_s=0.01)
        assert first.weights.tensors["w"].tolist() == [1, 1, 1]
    buffers.write(_value(3), version=3, timeout_s=0.0)
    assert buffers.version == 3


def test_memory_is_reused_between_versions() -> None:
    buffers = _buffers()
    addresses = {
        buffers.write(_value(v), version=v, timeout_s=0.0).weights.tensors["w"].data_ptr()
        for v in range(6)
    }
    assert len(addresses) == 2


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([], "'w'"),
        ([("v", torch.zeros(3))], "v is not planned"),
        ([("w", torch.zeros(4))], r"w has shape \(4,\)"),
        (_value(1) * 2, "given twice"),
    ],
)
def test_weights_that_do_not_fit_leave_the_newest_version(
    given: list[tuple[str, torch.Tensor]], named: str
) -> None:
    buffers = _buffers()
    buffers.write(_value(1), version=1, timeout_s=0.0)
    with pytest.raises(InvalidRequestError, match=named):
        buffers.write(given, version=2, timeout_s=0.0)
    with buffers.read() as snapshot:
        assert snapshot.version == 1
        assert snapshot.weights.tensors["w"].tolist() == [1, 1, 1]


def test_constant_weights_are_written_once_and_are_in_every_version() -> None:
    specs = [TensorSpec("w", "float32", (3,)), TensorSpec("frozen", "float32", (1,))]
    buffers = SnapshotBuffers(specs, {"frozen"})
    with pytest.raises(InvalidRequestError, match=r"\['frozen'\] are planned but were not given"):
        buffers.write(_value(1), version=1, timeout_s=0.0)
    buffers.write([*_value(1), ("frozen", torch.tensor([7.0]))], version=1, timeout_s=0.0)
    for version in (2, 3, 4):
        snapshot = buffers.write(_value(version), version=version, timeout_s=0.0)
        assert snapshot.weights.tensors["frozen"].tolist() == [7.0]
        assert snapshot.weights.tensors["w"].tolist() == [version] * 3
    with pytest.raises(InvalidRequestError, match=r"\['w'\] are planned but were not given"):
        buffers.write([], version=5, timeout_s=0.0)


def test_reading_before_the_first_version_is_refused() -> None:
    with pytest.raises(NotReadyError), _buffers().read():
        pass
