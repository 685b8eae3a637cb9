"""Figures of the engine benchmark: shapes, ratios, the memory's share, the contract's record."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.bench_engine import ENGINES, Measured, Workload, summary
from benchmarks.contract_record import contract_record
from benchmarks.engine_shapes import SHAPES, Shape, bandwidth_share

PAGE = Path(__file__).resolve().parents[3] / "docs" / "engines.md"
WORKLOAD = Workload((1, 128), 128, 3, 1, "bfloat16", "cpu")


@pytest.mark.parametrize("name", ["tiny", "10m"])
def test_a_shape_has_as_many_parameters_as_transformers_makes_of_it(
    name: str, tmp_path: Path
) -> None:
    SHAPES[name].save_config(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sum(each.numel() for each in model.parameters()) == SHAPES[name].num_parameters


def test_a_ratio_is_the_median_of_neighbouring_runs() -> None:
    found = Measured(rates={128: {"torch": [10.0, 40.0, 90.0], "vllm": [10.0, 10.0, 30.0]}})
    assert found.ratio("torch", "vllm", 128) == 3.0
    assert found.ratio("torch", "hf", 128) is None
    assert found.ratio("torch", "vllm", 64) is None


def test_a_slow_engine_is_compared_with_the_runs_it_has() -> None:
    found = Measured(rates={128: {"torch": [10.0, 40.0], "sglang": [2.0]}})
    assert found.ratio("torch", "sglang", 128) == 5.0


def test_the_share_of_the_memorys_speed_counts_weights_and_caches_of_a_step() -> None:
    shape = Shape(8, 2, 1, heads=1, kv_heads=1, intermediate=4, head_dim=2)
    weights = 2 * (8 * 2 + 2 * 2 * 2 * 2 + 3 * 2 * 4 + 2 * 2 + 2 * 2 + 2)
    cache = 2 * 1 * 1 * 2 * 2
    share = bandwidth_share(shape, "bfloat16", 4, 10.0, 400.0, 1e6)
    assert share == pytest.approx((weights + 4 * 10 * cache) * 100 / 1e6)


def test_the_last_line_holds_the_figures_for_each_model() -> None:
    rates = {128: {"torch": [8.0], "vllm": [4.0], "hf": [2.0]}}
    tiny = Measured({"torch": 1.0}, rates, {"torch": 0.5})
    big = Measured({"torch": 2.0}, rates, {"torch": 0.7})
    found = summary({"tiny": tiny, "10m": big}, {"torch": "1/1"}, WORKLOAD)
    assert found["torch_vs_vllm_128"] == {"tiny": 2.0, "10m": 2.0}
    assert found["torch_vs_hf_128"] == {"tiny": 4.0, "10m": 4.0}
    assert found["startup_s"] == {"torch": 2.0}
    assert found["update_stall_ms"] == {"torch": 0.7}
    assert found["contract"] == {"torch": "1/1"}


def test_the_contracts_record_counts_cases_that_were_run() -> None:
    page = """<!-- rules: begin -->
| rule | torch | vllm |
|---|---|---|
| one | kept (4) | not run |
| two | **broken** (1 of 3) | kept (2) |

Run with:

* torch: 2026-11-22, 66d7b37, torch 2.13.0
<!-- rules: end -->"""
    assert contract_record(page, ("torch", "vllm", "sglang")) == {
        "torch": "6/7",
        "vllm": "2/2",
        "sglang": "not run: docs/engines.md has no column for it",
    }


def test_the_page_of_engines_has_a_record_of_the_embedded_one() -> None:
    passed, _, total = contract_record(PAGE.read_text("utf-8"), ENGINES)["torch"].partition("/")
    assert 0 < int(passed) <= int(total)


def test_a_page_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table"):
        contract_record("nothing", ("torch",))
