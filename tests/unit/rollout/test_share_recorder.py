"""What a vendor's loader reads of the weights, and how it gets that part back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from services.rollout.engines.vendor_engines.share_recorder import (
    ShareLoading,
    _cuts,
    meta_copy,
    record_share,
)
from sluice.types import TensorSpec
from sluice.weight_share import WHOLE, Cut, WeightShare
from sluice.weights.adapters import A_SUFFIX, B_SUFFIX, merge_adapters
from sluice.weights.plan import WeightBuffer, plan_transfer, tensor_specs
from sluice.weights.share import cuts_by_name, pack

Named = Iterator[tuple[str, torch.Tensor]]
_SPECS = (
    TensorSpec("w", "float32", (8, 6)),
    TensorSpec("experts", "float32", (4, 8, 3)),
    TensorSpec("norm", "float32", (5,)),
)


def _same(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return weights


def _reads(*reads: Callable[[Mapping[str, torch.Tensor]], object]) -> WeightShare:
    """The share of a loader that reads these, each into memory of its own."""

    def load(weights: Named) -> None:
        tensors = dict(weights)
        for read in reads:
            read(tensors)

    return record_share(load, _SPECS, _same)


def _copy(view: torch.Tensor) -> torch.Tensor:
    return torch.empty(view.shape).copy_(view)


@pytest.mark.parametrize(
    ("view", "cuts"),
    [
        (lambda w: w.narrow(0, 2, 4), (Cut(0, ((2, 4),)),)),
        (lambda w: w.narrow(1, 4, 2), (Cut(1, ((4, 2),)),)),
        (lambda w: w.t().narrow(0, 0, 3), (Cut(1, ((0, 3),)),)),
        (lambda w: w[3], (Cut(0, ((3, 1),)),)),
        (lambda w: w.chunk(2)[1].chunk(3, 1)[2], (Cut(0, ((4, 4),)), Cut(1, ((4, 2),)))),
        (lambda w: w.view(2, 4, 6)[1, :2], (Cut(0, ((4, 2),)),)),
        (lambda w: w[::3], (Cut(0, ((0, 7),)),)),
        (lambda w: w.narrow(0, 2, 4).flatten(), ()),
        (lambda w: w, ()),
    ],
)
def test_a_view_that_is_read_is_the_share(
    view: Callable[[torch.Tensor], torch.Tensor], cuts: tuple[Cut, ...]
) -> None:
    share = _reads(lambda tensors: _copy(view(tensors["w"])))
    assert cuts_by_name(share).get("w", ()) == cuts


def test_several_reads_of_a_tensor_are_one_share_with_gaps() -> None:
    gate_and_up = [
        lambda tensors, expert=expert, first=first: _copy(tensors["experts"][expert, first:][:2])
        for expert in range(4)
        for first in (0, 4)
    ]
    assert cuts_by_name(_reads(*gate_and_up))["experts"] == (Cut(1, ((0, 2), (4, 2))),)
    own_experts = (lambda tensors: _copy(tensors["experts"][2:]),)
    assert cuts_by_name(_reads(*own_experts))["experts"] == (Cut(0, ((2, 2),)),)


@pytest.mark.parametrize(
    "read",
    [
        lambda tensors: (tensors["w"] * 2).narrow(0, 0, 4),
        lambda tensors: tensors["w"].contiguous().float().clone()[:4],
        lambda tensors: tensors["w"].view(torch.uint8)[:1].clone(),
        lambda tensors: None,
        lambda tensors: tensors["w"][:4].zero_() and tensors["w"].clone(),
    ],
)
def test_what_computes_with_a_tensor_or_reads_nothing_of_it_needs_all(
    read: Callable[[Mapping[str, torch.Tensor]], object],
) -> None:
    assert "w" not in cuts_by_name(_reads(read))


def test_a_share_of_too_many_blocks_is_cut_in_fewer_dimensions() -> None:
    rows, columns = range(0, 96, 2), range(0, 64, 2)
    boxes = {((row, row + 1), (column, column + 1)) for row in rows for column in columns}
    (cut,) = _cuts(boxes, (96, 64))
    assert (cut.dimension, len(cut.ranges)) == (1, 32)


def test_a_loader_that_needs_values_takes_all_weights() -> None:
    assert _reads(lambda tensors: bool(tensors["norm"].sum() > 0)) == WHOLE


def test_recording_writes_to_no_real_memory() -> None:
    live = torch.ones(4, 6)
    share = _reads(
        lambda tensors: live.copy_(tensors["w"][:4]),
        lambda tensors: live.fill_(0.0),
    )
    assert bool((live == 1).all())
    assert cuts_by_name(share)["w"] == (Cut(0, ((0, 4),)),)


class _Half(torch.nn.Module):
    """A layer with one half of the rows of its weight, loaded as vendors do."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.weight = torch.nn.Parameter(torch.ones(4, 6), requires_grad=False)

    def load_weights(self, weights: Named) -> None:
        for name, tensor in weights:
            if name == "w":
                self.weight.data.copy_(tensor.narrow(0, 4 * self.rank, 4))


def test_a_copy_without_memory_loads_like_the_model_and_leaves_it_alone() -> None:
    model = torch.nn.Sequential(layer := _Half(1), layer)
    copy = meta_copy(
        model, lambda module, _: ({n: p.to("meta") for n, p in module._parameters.items()}, {})
    )
    assert copy[0] is copy[1] is not layer
    share = record_share(copy[0].load_weights, _SPECS, _same)
    assert cuts_by_name(share)["w"] == (Cut(0, ((4, 4),)),)
    assert bool((layer.weight == 1).all())
    assert not layer.weight.is_meta


_EXPERTS = "x.experts.gate_up_proj"


def _split(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Files have a tensor for each expert, one that is computed, and the rest by other names."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if name == _EXPERTS:
            halves = [half.contiguous() for half in tensor.chunk(2, 1)]
            for index in range(len(tensor)):
                found[f"experts.{index}.gate"] = halves[0][index]
                found[f"experts.{index}.up"] = halves[1][index]
        elif name == "norm":
            found["doubled"] = 2 * tensor
        else:
            found[f"model.{name}"] = tensor
    return found


@pytest.mark.parametrize("adapted", [False, True])
def test_the_loader_gets_whole_tensors_with_its_share_at_its_place(adapted: bool) -> None:
    torch.manual_seed(1)
    weights = {spec.name: torch.randn(spec.shape) for spec in _SPECS}
    del weights["experts"]
    weights[_EXPERTS] = torch.randn(4, 8, 3)
    weights["d.weight"] = torch.randn(6, 4)
    specs = tensor_specs(weights.items())
    if adapted:
        weights["d" + A_SUFFIX] = torch.randn(2, 4)
        weights["d" + B_SUFFIX] = torch.randn(6, 2)
        weights["x.experts.each.up_proj" + A_SUFFIX] = torch.randn(4, 2, 3)
        weights["x.experts.each.up_proj" + B_SUFFIX] = torch.randn(4, 4, 2)
    cuts = {
        "d.weight": (Cut(0, ((1, 2), (4, 1))),),
        "w": (Cut(1, ((2, 3),)),),
        _EXPERTS: (Cut(0, ((1, 2),)), Cut(1, ((1, 2), (5, 2)))),
    }
    plan = plan_transfer(tensor_specs(weights.items()), 4096, WeightShare(tuple(cuts.items())))
    buffer = WeightBuffer(plan)
    for name, part in buffer.tensors.items():
        part.copy_(pack(weights[name], cuts.get(name, ())))
    before = {name: part.clone() for name, part in buffer.tensors.items()}

    loading = ShareLoading(specs, WeightShare(tuple(cuts.items())), _split)
    found = dict(loading.tensors(buffer.tensors))
    expected = _split({s.name: merge_adapters(weights)[s.name] for s in specs})
    assert found.keys() == expected.keys()
    assert torch.equal(found["model.w"][:, 2:5], expected["model.w"][:, 2:5])
    assert torch.equal(found["doubled"], expected["doubled"])
    for rows in (slice(1, 3), slice(4, 5)):
        assert torch.allclose(found["model.d.weight"][rows], expected["model.d.weight"][rows])
    for name in ("experts.1", "experts.2"):
        for half in (".gate", ".up"):
            assert torch.allclose(found[name + half][1:3], expected[name + half][1:3])
    assert not adapted or not torch.equal(found["experts.1.up"][1:3], weights[_EXPERTS][1, 5:7])
    assert all(torch.equal(before[name], part) for name, part in buffer.tensors.items())


def test_copies_that_files_are_made_of_are_views_unless_they_are_written_to() -> None:
    spec = TensorSpec(_EXPERTS, "float32", (4, 8, 3))

    def load(weights: Named) -> None:
        for _, tensor in weights:
            torch.empty(2, 3).copy_(tensor[:2])

    share = record_share(load, [spec], _split)
    assert cuts_by_name(share)[_EXPERTS] == (Cut(1, ((0, 2), (4, 2))),)

    def changed(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {"doubled": weights[_EXPERTS].clone().mul_(2.0)}

    assert record_share(load, [spec], changed) == WHOLE
    weights = {_EXPERTS: torch.randn(4, 8, 3)}
    found = dict(ShareLoading([spec], WHOLE, changed).tensors(weights))
    assert torch.equal(found["doubled"], 2 * weights[_EXPERTS])
