"""A launch that does not fit is given the smallest change that does, within what may be changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.memory.devices import device_kind
from sluice.config.memory.shape import shape_of
from sluice.config.memory.training import guessed_memory, training_layout
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.plan.dry_run import PassBytes
from sluice.plan.launch_plan import PlannedLaunch, launch_plan, planned_model
from tests.support.counted_launch import answer_dry_runs

LAUNCHES = Path(__file__).resolve().parents[2] / "data" / "launches"
DEVICES = json.loads((LAUNCHES / "devices.json").read_text(encoding="utf-8"))
FREE = (
    "actor_rollout_ref.actor.fsdp_config.",
    "actor_rollout_ref.model.enable_gradient_checkpointing=",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=",
    "trainer.nnodes=",
    "trainer.n_gpus_per_node=",
    "sluice.rollout.replicas=",
    "sluice.placement=auto",
)
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RECOMPUTE = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
SEPARATE = (
    "trainer.n_gpus_per_node=8",
    "sluice.rollout.replicas=4",
    f"{ROLLOUT}.name=vllm",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
)
"""A launch whose devices are divided already."""


@pytest.fixture
def estimating(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Dry runs that answer by the guess; the configurations they were asked about."""
    return answer_dry_runs(monkeypatch, counted)


def counted(config: RunConfig, model: Mapping[str, object]) -> PassBytes:
    shape = shape_of(model)
    layout = training_layout(config)
    memory = guessed_memory(shape, layout)
    parameters = round(memory.state / (4 if layout.moments_on_device else 2))
    return PassBytes(
        parameters=parameters,
        gradients=parameters,
        moments=2 * parameters,
        log_prob=parameters,
        kept=0,
        forward=2 * parameters,
        backward=2 * parameters + round(memory.rest),
        step=4 * parameters,
        moved={},
    )


def plan_of(name: str, *overrides: str, gib: int = 0) -> PlannedLaunch:
    row = DEVICES[name]
    device = device_kind(f"{gib or row['device_gib']}GB")
    return launch_plan(
        LAUNCHES / f"{name}.overrides", overrides, planned_model(row["model"]), device
    )


def separate(model: str, *overrides: str, gib: int = 80) -> PlannedLaunch:
    return launch_plan(None, [*SEPARATE, *overrides], planned_model(model), device_kind(f"{gib}GB"))


def test_a_launch_that_fits_is_left_as_it_is(estimating: Sequence[RunConfig]) -> None:
    found = plan_of("dapo-qwen3-32b-fsdp2-npu")
    assert found.fits
    assert found.fits_with == ()
    assert len(estimating) == 1


def test_recompute_is_the_smallest_change_for_long_rows(estimating: Sequence[RunConfig]) -> None:
    found = plan_of("grpo-8xa100")
    assert not found.fits
    assert found.fits_with == (*found.split.overrides, RECOMPUTE)
    assert found.trainer.peak <= found.device.usable_bytes
    assert "backward takes" in found.lacks["trainer"]
    assert "rollout" not in found.lacks


def test_an_engine_that_is_too_small_gets_more_devices(estimating: Sequence[RunConfig]) -> None:
    found = plan_of("dapo-qwen3-32b-fsdp2-npu", gib=24)
    assert found.fits_with is not None
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size=8" in found.fits_with
    assert found.engine.fits(found.device)


@pytest.mark.parametrize("name", DEVICES)
def test_nothing_but_layout_recompute_dtypes_and_split_is_changed(
    name: str, estimating: Sequence[RunConfig]
) -> None:
    found = plan_of(name, gib=max(24, DEVICES[name]["device_gib"] // 2))
    for override in found.fits_with or ():
        assert override.startswith(FREE), override
    if found.fits_with is not None:
        assert found.split.trainer + found.split.rollout == DEVICES[name]["devices"]
    written = load_config(LAUNCHES / f"{name}.overrides", [])
    for one in estimating:
        assert one.data == written.data
        assert one.algorithm == written.algorithm
        assert one.actor_rollout_ref.rollout.n == written.actor_rollout_ref.rollout.n


@pytest.mark.parametrize(
    ("name", "more", "gib"),
    [
        ("grpo-8xa100", (), 80),
        ("grpo-8xa100", (), 40),
        ("grpo-8xa100", ('sluice.placement="trainer:4,rollout:4"',), 40),
        ("dapo-qwen3-235b-megatron", (), 64),
        ("dapo-qwen3-235b-megatron", ('sluice.placement="trainer:96,rollout:32"',), 64),
        ("dapo-qwen3-32b-fsdp2-npu", (), 24),
    ],
)
def test_the_printed_overrides_are_read_as_the_plan_that_fits(
    name: str, more: tuple[str, ...], gib: int, estimating: Sequence[RunConfig]
) -> None:
    found = plan_of(name, *more, gib=gib)
    assert found.fits_with
    again = plan_of(name, *more, *found.fits_with, gib=gib)
    assert again.fits
    assert again.config == found.config
    parts = ("trainer", "rollout", "replicas")
    assert [getattr(again.split, one) for one in parts] == [
        getattr(found.split, one) for one in parts
    ]


@pytest.mark.parametrize(
    ("model", "size", "change"),
    [
        ("Qwen3-8B", f"{ACTOR}.veomni.fsdp_size=2", "-1"),
        ("Qwen3-8B", f"{ACTOR}.ulysses_sequence_parallel_size=1", "2"),
        ("Qwen3-8B", f"{ACTOR}.megatron.context_parallel_size=1", "2"),
        ("Qwen3-8B", f"{ACTOR}.veomni.ulysses_parallel_size=1", "2"),
    ],
)
def test_a_size_is_changed_under_the_name_that_the_launch_gave_it(
    model: str, size: str, change: str, estimating: Sequence[RunConfig]
) -> None:
    name = size.partition("=")[0]
    long = () if "fsdp_size" in name else ("data.max_response_length=100000",)
    found = separate(model, RECOMPUTE, size, *long, gib=64)
    sequence = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"  # the same key, spelt in full
    own = sequence if name == f"{ACTOR}.ulysses_sequence_parallel_size" else name
    assert found.fits_with == (f"{own}={change}",)
    assert separate(model, RECOMPUTE, size, *long, *found.fits_with, gib=64).fits


def test_a_size_of_two_names_changes_under_both(estimating: Sequence[RunConfig]) -> None:
    names = (f"{ACTOR}.fsdp_config.fsdp_size", f"{ACTOR}.veomni.fsdp_size")
    found = separate("Qwen3-8B", RECOMPUTE, *(f"{name}=2" for name in names), gib=64)
    assert found.fits_with == tuple(f"{name}=-1" for name in names)


def test_larger_engines_are_fewer_on_as_many_devices(estimating: Sequence[RunConfig]) -> None:
    large = ("Qwen3-32B", RECOMPUTE, f"{ROLLOUT}.gpu_memory_utilization=0.7", "trainer.nnodes=2")
    found = separate(*large)
    assert found.fits_with == (
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        "sluice.rollout.replicas=2",
    )
    assert (found.split.trainer, found.split.rollout) == (16, 4)
    assert "weights of 2 bytes a parameter exceed" in found.lacks["rollout"]
    assert separate(*large, "sluice.rollout.replicas=1").fits_with is None


def test_all_layers_are_counted_where_the_first_ones_are_recomputed(
    estimating: Sequence[RunConfig],
) -> None:
    megatron = f"{ACTOR}.megatron.override_transformer_config"
    block = [
        f"{megatron}.recompute_granularity=full",
        f"{megatron}.recompute_method=block",
        f"{megatron}.recompute_num_layers=1",
        "data.max_response_length=30000",
    ]
    uniform = [*block, f"{megatron}.recompute_method=uniform"]
    assert separate("Qwen3-8B", *uniform).fits
    found = separate("Qwen3-8B", *block)
    assert not found.fits
    assert found.fits_with == (f"{megatron}.recompute_method=uniform",)


def test_each_stage_that_differs_is_counted_with_its_own_layers(
    estimating: Sequence[RunConfig],
) -> None:
    found = plan_of("dapo-qwen3-235b-megatron", gib=1000).trainer
    assert list(found.stages) == [0, 1, 7]  # of 11, 12 and 11 layers
    assert found.stages[0] == found.stages[7] < found.stages[1] == found.peak
    assert len(estimating) == 1


def test_selective_recompute_becomes_full(estimating: Sequence[RunConfig]) -> None:
    granularity = f"{ACTOR}.megatron.override_transformer_config.recompute_granularity"
    found = separate("Qwen3-8B", f"{granularity}=selective", "data.max_response_length=30000")
    assert found.fits_with == (f"{granularity}=full",)


def test_what_nothing_makes_fit_is_said(estimating: Sequence[RunConfig]) -> None:
    found = plan_of("dapo-qwen3-235b-megatron", gib=8)
    assert not found.fits
    assert found.fits_with is None
    assert found.trainer.peak > found.device.usable_bytes


def test_a_change_that_the_dry_run_refuses_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(config: RunConfig, model: Mapping[str, object]) -> PassBytes:
        if config.actor_rollout_ref.model.enable_gradient_checkpointing:
            raise ConfigError("the family recomputes nothing")
        return counted(config, model)

    answer_dry_runs(monkeypatch, refusing)
    found = separate(
        "Qwen3-8B", RECOMPUTE.replace("true", "false"), "data.max_response_length=16000"
    )
    assert not found.fits
    assert RECOMPUTE not in (found.fits_with or ())


def test_a_model_is_a_folder_or_a_published_name(tmp_path: Path) -> None:
    content = {**planned_model("Qwen3-8B").content, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": content}), encoding="utf-8")
    assert planned_model(str(tmp_path)).shape.layers == 2
    assert planned_model(str(tmp_path)).encoder_parameters == 0
    found = planned_model("Qwen3-VL-30B-A3B-Instruct").encoder_parameters
    assert found == pytest.approx(538_000_000, rel=0.01)
    with pytest.raises(ConfigError, match=r"neither a folder with a config.json nor one of"):
        planned_model("unknown-8B")


def test_an_encoder_of_another_kind_is_not_counted(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    text = dict(planned_model("Qwen3-8B").content)
    file.write_text(json.dumps({"text_config": text, "vision_config": {"depth": 2}}), "utf-8")
    assert planned_model(str(tmp_path)).encoder_parameters is None
    del text["hidden_size"]
    file.write_text(json.dumps({"text_config": text}), "utf-8")
    with pytest.raises(ConfigError, match=r"config.json: hidden_size = None"):
        planned_model(str(tmp_path))
