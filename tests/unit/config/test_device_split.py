"""The devices of a launch are divided into whole replicas and a trainer, by how long each takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.config.device_split import DeviceSplit, device_split, seconds_per_token, splits
from sluice.config.loading.loader import KeySettings, load_config, read_run
from sluice.config.memory.devices import device_kind
from sluice.config.memory.shape import published_model, published_shape
from sluice.config.parallel_layout import trainer_layout
from sluice.errors import ConfigError

LAUNCHES = Path(__file__).resolve().parents[2] / "data" / "launches"
DEVICES = json.loads((LAUNCHES / "devices.json").read_text(encoding="utf-8"))
ROLLOUT = "actor_rollout_ref.rollout"
SHAPE, DEVICE = published_shape("Qwen3-8B"), device_kind("80GB")
EIGHT = (
    "trainer.n_gpus_per_node=8",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
)
VLLM = f"{ROLLOUT}.name=vllm"


def split(*overrides: str) -> DeviceSplit:
    run = read_run(None, [*EIGHT, VLLM, *overrides])
    assert not run.problems
    settings = KeySettings(run.config, run.settings.by_key())
    return device_split(run.config, settings, SHAPE, DEVICE)


def test_every_device_has_one_purpose_and_replicas_are_whole() -> None:
    found = split()
    assert found.trainer + found.rollout == 8
    assert found.rollout == 2 * found.replicas
    assert found.overrides == (
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={found.trainer}",
        f"sluice.rollout.replicas={found.replicas}",
    )


def test_longer_responses_and_filtered_groups_move_devices_to_the_rollouts() -> None:
    short = split("data.max_response_length=1024")
    long = split("data.max_response_length=32768")
    filtered = split(
        "data.max_response_length=1024",
        "algorithm.filter_groups.enable=true",
        "data.train_batch_size=64",
        "data.gen_batch_size=512",
    )
    assert short.rollout < long.rollout
    assert short.rollout < filtered.rollout


def test_a_reference_model_makes_training_take_longer() -> None:
    run = read_run(None, [*EIGHT, VLLM]).config
    with_kl = read_run(None, [*EIGHT, VLLM, "actor_rollout_ref.actor.use_kl_loss=true"]).config
    plain, more = (seconds_per_token(one, SHAPE, DEVICE)[0] for one in (run, with_kl))
    assert more > plain


def test_a_trainer_takes_whole_machines_or_a_part_of_one() -> None:
    for trainer in {
        split("trainer.nnodes=4", f"data.max_response_length={n}").trainer
        for n in (512, 4096, 32768)
    }:
        assert trainer < 8 or trainer % 8 == 0


def test_a_placement_is_obeyed() -> None:
    found = split('sluice.placement="trainer:6,rollout:2"')
    assert (found.trainer, found.rollout, found.replicas) == (6, 2, 1)


@pytest.mark.parametrize("placement", ["trainer:5,rollout:3", "trainer:8,rollout:8", "half"])
def test_a_placement_that_is_not_possible_names_those_that_are(placement: str) -> None:
    with pytest.raises(
        ConfigError, match=r"8 devices .* replicas of 2; .*: \"trainer:2,rollout:6\"; "
    ):
        split(f'sluice.placement="{placement}"')


def test_a_placement_is_taken_as_the_error_names_it() -> None:
    with pytest.raises(ConfigError) as caught:
        split('sluice.placement="half"')
    for choice in str(caught.value).rpartition(": ")[2].split("; "):
        assert split(f"sluice.placement={choice}").placement == choice.strip('"')
    assert split('sluice.placement="trainer:6, rollout: 2"').trainer == 6


def test_the_keys_of_a_placed_split_take_the_placement_s_place() -> None:
    placed = split('sluice.placement="trainer:6,rollout:2"')
    again = split('sluice.placement="trainer:6,rollout:2"', *placed.overrides)
    assert (again.trainer, again.rollout) == (6, 2)


@pytest.mark.parametrize("size", ["fsdp_size=8", "fsdp_size=3", "expert_parallel_size=4"])
def test_the_layout_s_sizes_divide_every_trainer_that_is_possible(size: str) -> None:
    config = load_config(
        None, [*EIGHT, VLLM, "trainer.nnodes=4", f"actor_rollout_ref.actor.fsdp_config.{size}"]
    )
    found = [one.trainer for one in splits(config)]
    assert found
    for trainer in found:
        trainer_layout(config, trainer)


def test_a_size_that_divides_no_trainer_is_named_with_the_trainers() -> None:
    size = "ulysses_sequence_parallel_size=8"
    with pytest.raises(ConfigError, match=rf"trainer 2 or 4 or 6, but with 6: .*{size} does not"):
        split(f"actor_rollout_ref.actor.{size}")
    five = (f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.data_parallel_size=5")
    with pytest.raises(ConfigError, match=r"do not divide .* whole machines of 2"):
        split("trainer.n_gpus_per_node=2", "trainer.nnodes=4", *five)


def test_no_machines_for_rollouts_are_a_colocated_launch() -> None:
    assert split(f"{ROLLOUT}.nnodes=0") == split()
    assert split(f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=4").trainer == 8


def test_ranks_that_share_a_sequence_stay_together() -> None:
    found = split("actor_rollout_ref.actor.ulysses_sequence_parallel_size=4")
    assert found.trainer == 4


def test_devices_that_a_launch_names_for_rollouts_alone_are_not_taken_from_the_trainer() -> None:
    found = split("sluice.rollout.replicas=3")
    assert (found.trainer, found.rollout) == (8, 6)


def test_too_few_devices_are_an_error_with_how_many_there_must_be() -> None:
    with pytest.raises(ConfigError, match=r"2 device.* too few .* replica of 2 .*at least 3"):
        split("trainer.n_gpus_per_node=2")


@pytest.mark.parametrize("name", DEVICES)
def test_a_published_launch_is_divided(name: str) -> None:
    run = read_run(LAUNCHES / f"{name}.overrides", [])
    settings = KeySettings(run.config, run.settings.by_key())
    row = DEVICES[name]
    shape, device = published_shape(row["model"]), device_kind(f"{row['device_gib']}GB")
    found = device_split(run.config, settings, shape, device)
    assert found.trainer + found.rollout == row["devices"]
    # Float32 weights and gradients, and two moments unless they are on the host.
    is_away = run.config.actor_rollout_ref.actor.fsdp_config.optimizer_offload
    state = (8 if is_away else 16) * shape.total_parameters / found.trainer
    assert state <= device.usable_bytes


def test_a_published_model_is_found_by_the_end_of_its_path() -> None:
    assert published_model("/models/Qwen3-VL-30B-A3B-Instruct") == published_model(
        "Qwen3-VL-30B-A3B"
    )
    with pytest.raises(ConfigError, match=r"'mine' is neither a folder .*Qwen3-8B"):
        published_model("mine")


@pytest.mark.parametrize("text", ["large", "-3", "0", "80TB"])
def test_a_device_is_named_by_its_memory(text: str) -> None:
    assert device_kind("64 GiB").gib == 64
    with pytest.raises(ConfigError, match="is no size of memory; give one such as 80GB"):
        device_kind(text)
