"""Adapters travel beside frozen weights; what is computed with is merged from the same weights."""

from __future__ import annotations

import torch

from sluice.weights.adapters import merge_adapters, merged_shapes

W, A, B = "layer.weight", "layer.lora_A.weight", "layer.lora_B.weight"


def test_weights_without_adapters_are_passed_as_they_are() -> None:
    weights = {W: torch.ones(3, 2)}
    assert merge_adapters(weights) is weights


def test_a_merged_weight_is_rounded_once_and_depends_on_no_earlier_version() -> None:
    torch.manual_seed(0)
    weight, other = torch.randn(48, 32).bfloat16(), torch.randn(5)
    before = weight.clone()
    halves = [(torch.randn(4, 32).bfloat16(), torch.randn(48, 4).bfloat16()) for _ in range(20)]
    for a, b in [*halves, halves[0]]:
        found = merge_adapters({W: weight, "norm.weight": other, A: a, B: b})
        exact = weight.double() + b.double() @ a.double()
        # One rounding to bfloat16, of a sum in float32.
        assert torch.all((found[W].double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5)
        assert found.keys() == {W, "norm.weight"}
        assert found["norm.weight"] is other
    first = merge_adapters({W: weight, A: halves[0][0], B: halves[0][1]})[W]
    assert torch.equal(found[W], first)
    assert torch.equal(weight, before)


def test_only_adapters_that_fit_a_weight_are_taken_for_some() -> None:
    fitting = {W: (6, 4), A: (2, 4), B: (6, 2)}
    assert merged_shapes(fitting) == {W: (6, 4)}
    for change in (
        {A: (2, 5)},
        {A: (3, 4)},
        {B: (5, 2)},
        {B: (6, 2, 1)},
        {W: (6, 4, 1)},
        {A: (7, 4), B: (6, 7)},  # of a higher rank than any matrix of that shape
    ):
        shapes = fitting | change
        assert merged_shapes(shapes) == shapes
    for missing in (W, A, B):
        shapes = {name: shape for name, shape in fitting.items() if name != missing}
        assert merged_shapes(shapes) == shapes


def test_each_experts_adapter_changes_its_rows_of_the_weight_of_all() -> None:
    torch.manual_seed(0)
    weights = {
        "mlp.experts.gate_up_proj": torch.randn(3, 10, 4).bfloat16(),
        "mlp.experts.down_proj": torch.randn(3, 4, 5).bfloat16(),
    }
    halves = {
        f"mlp.experts.each.{name}.lora_{half}.weight": torch.randn(3, *shape).bfloat16()
        for name, (rows, columns) in {"up_proj": (5, 4), "down_proj": (4, 5)}.items()
        for half, shape in (("A", (2, columns)), ("B", (rows, 2)))
    }
    before = {name: one.clone() for name, one in weights.items()}
    found = merge_adapters(weights | halves)
    assert found.keys() == weights.keys()
    shapes = {name: tuple(one.shape) for name, one in (weights | halves).items()}
    assert merged_shapes(shapes) == {name: tuple(one.shape) for name, one in weights.items()}
    for expert in range(3):
        for weight, name, first in (
            ("gate_up_proj", "up_proj", 5),
            ("down_proj", "down_proj", 0),
        ):
            a, b = (halves[f"mlp.experts.each.{name}.lora_{h}.weight"][expert] for h in "AB")
            whole = before[f"mlp.experts.{weight}"][expert]
            exact = whole[first:].double() + b.double() @ a.double()
            its = found[f"mlp.experts.{weight}"][expert]
            assert torch.all((its[first:].double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5)
            assert torch.equal(its[:first], whole[:first])
    assert all(torch.equal(weights[name], one) for name, one in before.items())


def test_only_adapters_that_fit_experts_are_taken_for_some() -> None:
    weight, up = "x.experts.gate_up_proj", "x.experts.each.up_proj"
    a, b = f"{up}.lora_A.weight", f"{up}.lora_B.weight"
    fitting: dict[str, tuple[int, ...]] = {weight: (3, 10, 4), a: (3, 2, 4), b: (3, 5, 2)}
    assert merged_shapes(fitting) == {weight: (3, 10, 4)}
    changes: list[dict[str, tuple[int, ...]]] = [
        {a: (2, 2, 4)},
        {b: (3, 10, 2)},
        {weight: (3, 9, 4)},
        {weight: (10, 4), a: (2, 4), b: (5, 2)},
        {a: (3, 6, 4), b: (3, 5, 6)},
    ]
    for change in changes:
        assert merged_shapes(fitting | change) == fitting | change
    other = {name.replace("up_proj", "odd_proj"): shape for name, shape in fitting.items()}
    assert merged_shapes(other) == other
