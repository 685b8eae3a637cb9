"""What a plan counts for a rank without memory is what a real rank of a gloo group holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.trainer.dry_run.__main__ import with_adapters
from sluice.config.loading.loader import load_config
from sluice.config.memory.shape import shape_of
from sluice.plan import launch_plan
from sluice.plan.dry_run import DryRunRequest, PassBytes
from tests.support.layer_parity import random_adapter
from tests.support.plan_parity import (
    DENSE,
    EXPERTS,
    counted_and_planned,
    trained_and_planned,
)
from tests.support.preloaded import PreloadedProcess
from tests.support.saved_adapter import write_adapter
from tests.support.tiny_policy import make_model, save_model

ENDS = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}
"""Of eight layers in four stages, 1, 2, 2 and 3."""
STAGES_OF_EXPERTS = {"pipeline_parallel_size": 2, "expert_parallel_size": 2}


@pytest.mark.parametrize(
    ("ranks", "recompute", "sharding"),
    [
        (4, True, {"fsdp_size": 2, "ulysses_sequence_parallel_size": 4}),
        (2, False, {"fsdp_size": 1, "dtype": "float32"}),
    ],
)
def test_a_plan_counts_the_bytes_and_the_collectives_of_a_real_rank(
    ranks: int, recompute: bool, sharding: dict[str, Any]
) -> None:
    (real,), planned = counted_and_planned(DENSE, ranks, recompute=recompute, **sharding)
    assert planned == [real]
    assert real["backward"] > real["kept"] > 0
    # Gradients of a model that each rank holds whole are there in passes without any.
    stays = real["gradients"] if sharding.get("fsdp_size") == 1 else 0
    assert real["log_prob"] > real["parameters"] + stays
    assert ("all_to_all" in real["moved"]) == ("ulysses_sequence_parallel_size" in sharding)


@pytest.mark.parametrize(
    ("layers", "recompute", "sharding"),
    [
        (2, True, {"expert_parallel_size": 4, "tensor_parallel_size": 2}),
        (1, False, {"expert_parallel_size": 2, "ulysses_sequence_parallel_size": 2}),
    ],
)
def test_a_plan_counts_experts_that_ranks_divide(
    layers: int, recompute: bool, sharding: dict[str, Any]
) -> None:
    model = EXPERTS | {"num_hidden_layers": layers}
    real, planned = counted_and_planned(model, 4, recompute=recompute, **sharding)
    assert planned == real
    assert all(one["moved"]["all_to_all"] > 0 for one in real)


@pytest.mark.parametrize(
    ("model", "ranks", "recompute", "sharding", "cut"),
    [
        (DENSE, 4, False, {"pipeline_parallel_size": 4}, ENDS),
        (EXPERTS | {"num_hidden_layers": 1}, 4, True, STAGES_OF_EXPERTS, {}),
        (DENSE, 2, True, {"use_no_sync_for_gradient_accumulation": True}, {}),
    ],
)
def test_a_plan_counts_each_stage_with_its_layers_in_flight_and_the_peak_of_a_real_step(
    model: dict[str, Any],
    ranks: int,
    recompute: bool,
    sharding: dict[str, Any],
    cut: dict[str, int],
) -> None:
    real, peaks, planned = trained_and_planned(
        model, ranks, recompute=recompute, cut=cut, **sharding
    )
    assert planned == real
    if cut:
        assert real[0]["kept"] > real[-1]["kept"] > 0
    # A step has all micro-batches and all stages at once, and sums gradients last.
    assert [max(one["forward"], one["backward"]) for one in planned] == pytest.approx(
        peaks, rel=0.01
    )


def test_config_check_counts_a_trainer_in_a_process_of_its_own(tmp_path: Path) -> None:
    model = {**DENSE, "hidden_size": 256, "head_dim": 32, "vocab_size": 32_768}
    (tmp_path / "config.json").write_text(json.dumps(model), encoding="utf-8")
    actor = "actor_rollout_ref.actor"
    given = [
        f"actor_rollout_ref.model.path={tmp_path}",
        f"{actor}.ppo_micro_batch_size_per_gpu=1",
        f"{actor}.fsdp_config.dtype=float32",
    ]
    command = [sys.executable, "-m", "sluice", "config", "check", "--json", "--no-files"]
    done = subprocess.run(
        [*command, "--rules", "here", *given], capture_output=True, text=True, check=True
    )
    assert "counting the trainer's memory" in done.stderr
    trainer = json.loads(done.stdout)["memory"]["trainer"]
    weights = 4 * shape_of(model).total_parameters
    # Beside them: buffers, tokens, and the counts of AdamW.
    for name, copies in {"weights": 1, "gradients": 1, "moments": 2}.items():
        assert 1 <= trainer["parts"][name] / (copies * weights) < 1.01
    assert trainer["phases"]["backward"] > 4 * weights


def preloaded_dry_run(
    _command: str, asked: DryRunRequest, kind: type[list[PassBytes]], **_: object
) -> tuple[list[PassBytes], str]:
    """As `ask_module`, in a fork of a process that has the imports."""
    text = msgspec.json.encode(asked).decode()
    alone = PreloadedProcess("tests.support.counted_rank", [text, "fake"], {})
    try:
        return msgspec.json.decode(alone.stdout.readline(), type=kind), ""
    finally:
        alone.close()


def test_a_compiled_head_of_a_gpu_is_counted_with_its_larger_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_plan, "ask_module", preloaded_dry_run)
    model_text = json.dumps({**DENSE, "vocab_size": 151_936, "num_hidden_layers": 1})
    (tmp_path / "config.json").write_text(model_text, encoding="utf-8")
    actor = "actor_rollout_ref.actor"
    given = [
        f"actor_rollout_ref.model.path={tmp_path}",
        *("data.max_response_length=4096", "trainer.device=cuda"),
        *(f"{actor}.ppo_micro_batch_size_per_gpu=1", f"{actor}.fsdp_config.dtype=bfloat16"),
    ]
    peaks = []
    for how in ("false", "true"):
        config = load_config(None, [*given, f"{actor}.fsdp_config.use_torch_compile={how}"])
        model = launch_plan.local_model(str(tmp_path))
        assert model is not None
        peaks.append(launch_plan.trainer_as_written(config, model).phases["backward"])
    # 384 tokens of 10 bytes a logit, and 1 GiB.
    assert 0.3 * 2**30 < peaks[1] - peaks[0] < 0.5 * 2**30


def test_adapters_to_continue_and_layers_named_by_number_count_like_new_ones_of_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_plan, "ask_module", preloaded_dry_run)
    adapter = random_adapter(make_model())
    write_adapter(tmp_path / "adapter", adapter)
    model = launch_plan.local_model(str(save_model(tmp_path / "model")))
    assert model is not None
    actor, policy = "actor_rollout_ref.actor", "actor_rollout_ref.model"
    ends = sorted({name.rpartition(".")[2] for name in adapter.layers})
    asked = (
        [f"lora_rank={adapter.rank}", f"target_modules=[{','.join(ends)}]"],
        [f"lora_adapter_path={tmp_path / 'adapter'}"],
        [f"lora_rank={adapter.rank}", f"target_modules=[{','.join(sorted(adapter.layers))}]"],
    )
    configs = [
        load_config(
            None,
            [
                *(f"{policy}.{one}" for one in (f"path={model.name}", *adapters)),
                f"{actor}.ppo_micro_batch_size_per_gpu=1",
            ],
        )
        for adapters in asked
    ]
    new, continued = (launch_plan.trainer_as_written(config, model) for config in configs[:2])
    assert new.parts["gradients"] > 0
    assert continued.phases == new.phases
    first, second = (with_adapters(config).actor_rollout_ref.model for config in configs[1:])
    assert (second.lora_rank, second.target_modules) == (first.lora_rank, first.target_modules)
