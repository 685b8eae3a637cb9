"""Both pools of a run: bytes by phase, and what a step takes at least."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from sluice.config.loading.loader import load_config
from sluice.config.memory.devices import device_kind
from sluice.config.memory.shape import (
    ImageEncoder,
    image_encoder,
    published_encoder,
    published_shape,
)
from sluice.config.memory.training import group_flops
from sluice.plan.dry_run import PassBytes
from sluice.plan.pools import (
    TrainerPool,
    engine_pool,
    extrapolate_layers,
    largest_pool,
    layer_counts,
    trainer_pool,
)

ACTOR = "actor_rollout_ref.actor"
SHAPE, DEVICE = published_shape("Qwen3-8B"), device_kind("80GB")
COUNTED = PassBytes(
    parameters=10,
    gradients=10,
    moments=20,
    log_prob=15,
    kept=7,
    forward=30,
    backward=33,
    step=40,
    moved={"all_gather": 100},
)
ADAPTERS = 3


def _published() -> ImageEncoder:
    found = image_encoder(published_encoder("Qwen3-VL-30B-A3B"))
    assert found is not None
    return found


ENCODER = _published()


def pool(*overrides: str, encoder: ImageEncoder | None = None) -> TrainerPool:
    config = load_config(None, [f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", *overrides])
    return trainer_pool(config, SHAPE, DEVICE, COUNTED, encoder)


def test_bytes_of_all_layers_follow_from_those_of_a_few() -> None:
    more = msgspec.structs.replace(COUNTED, backward=35, moved={"all_gather": 110})
    found = extrapolate_layers({3: COUNTED, 4: more}, 36)
    assert (found.backward, found.parameters) == (33 + 33 * 2, 10)
    assert found.moved == {"all_gather": 100 + 33 * 10}
    assert extrapolate_layers({2: COUNTED}, 2) == COUNTED


def test_a_model_of_a_few_layers_is_counted_as_it_is() -> None:
    assert list(layer_counts(load_config(None, []), 2)) == [2]
    assert list(layer_counts(load_config(None, []), 64)) == [3, 4]


def test_the_stage_that_takes_most_is_the_pool_and_the_first_one_has_the_encoder() -> None:
    sizes = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", "trainer.n_gpus_per_node=8"]
    config = load_config(None, [*sizes, f"{ACTOR}.fsdp_config.pipeline_parallel_size=4"])
    between = msgspec.structs.replace(COUNTED, backward=COUNTED.backward + 7)
    stages = {0: COUNTED, 1: between, 3: COUNTED}
    found = largest_pool(config, SHAPE, DEVICE, stages)
    assert found.phases == trainer_pool(config, SHAPE, DEVICE, between).phases
    assert found.stages == {0: found.peak - 7, 1: found.peak, 3: found.peak - 7}
    assert found.stage_name == "stage 2 of 4"
    assert "backward on stage 2 of 4 takes" in (
        found.shortfall(dataclasses.replace(DEVICE, gib=1e-9)) or ""
    )
    seeing = largest_pool(config, SHAPE, DEVICE, stages, ENCODER)
    assert seeing.stage_name == "stage 1 of 4"
    assert {number: seeing.stages[number] for number in (1, 3)} == {
        number: found.stages[number] for number in (1, 3)
    }
    # Its micro-batches in flight keep pixels and activations; a pass for logprobs is alone.
    pixels = config.data.max_prompt_length * ENCODER.pixel_bytes
    kept = config.data.max_prompt_length * ENCODER.saved_bytes(recomputes=False, dtype_bytes=2)
    state = seeing.phases["logprobs"] - found.phases["logprobs"] - pixels
    trained = seeing.parts["gradients"] - COUNTED.gradients
    more = seeing.phases["backward"] - (found.phases["backward"] - 7)
    assert more == pytest.approx(state + trained + 4 * (pixels + kept))


def test_all_layers_are_counted_if_only_the_first_are_recomputed() -> None:
    megatron = f"{ACTOR}.megatron.override_transformer_config"
    block = [f"{megatron}.recompute_granularity=full", f"{megatron}.recompute_method=block"]
    some = load_config(None, [*block, f"{megatron}.recompute_num_layers=6"])
    assert list(layer_counts(some, 64)) == [64]
    assert list(layer_counts(some, 6)) == [3, 4]


def test_all_layers_are_counted_if_adapters_are_of_layers_by_their_numbers() -> None:
    model = "actor_rollout_ref.model"
    one = [f"{model}.lora_rank=8", f"{model}.target_modules='.*layers\\.27\\..*q_proj'"]
    assert list(layer_counts(load_config(None, one), 64)) == [64]
    assert list(layer_counts(load_config(None, one[:1]), 64)) == [3, 4]


def test_offloaded_moments_are_on_the_host_and_adapters_need_no_second_model() -> None:
    phases = pool(f"{ACTOR}.fsdp_config.optimizer_offload=true").phases
    assert phases["backward"] == COUNTED.backward
    assert phases["optimizer step"] == COUNTED.step
    kl = f"{ACTOR}.use_kl_loss=true"
    assert pool(kl).phases["logprobs"] == COUNTED.log_prob + COUNTED.moments + COUNTED.parameters
    assert pool(kl, f"{ACTOR}.fsdp_config.param_offload=true").phases["logprobs"] == (
        COUNTED.log_prob + COUNTED.moments
    )
    adapted = pool(kl, "actor_rollout_ref.model.lora_rank=8")
    assert adapted.phases["logprobs"] == COUNTED.log_prob + COUNTED.moments


def test_a_critic_is_beside_the_policy_but_for_what_its_own_keys_move_to_the_host() -> None:
    keys = ("algorithm.adv_estimator=gae",)
    alone, usual = pool(), pool(*keys)
    whole = COUNTED.parameters + COUNTED.moments
    for phase, size in alone.phases.items():
        assert usual.phases[phase] == size + whole
    assert usual.phases["critic"] == COUNTED.backward + COUNTED.moments + whole
    assert usual.phases["critic's step"] == COUNTED.step + whole
    weights = pool(*keys, "critic.fsdp.param_offload=true")
    assert weights.phases["backward"] == alone.phases["backward"] + COUNTED.moments
    assert weights.phases["critic"] == usual.phases["critic"]
    moments = pool(*keys, "critic.fsdp.optimizer_offload=true")
    assert moments.phases["backward"] == alone.phases["backward"] + COUNTED.parameters
    assert moments.phases["critic"] == usual.phases["critic"] - COUNTED.moments
    assert weights.host - usual.host == COUNTED.parameters
    assert moments.host - usual.host == COUNTED.moments
    without = pool(*keys, f"{ACTOR}.fsdp_config.param_offload=true")
    assert without.phases["critic"] == usual.phases["critic"] - COUNTED.parameters
    assert without.phases["backward"] == usual.phases["backward"]


def test_gradients_of_a_model_that_a_rank_holds_whole_are_there_in_every_phase() -> None:
    keys = ("algorithm.adv_estimator=gae",)
    policy, critic = f"{ACTOR}.fsdp_config.dtype=float32", "critic.fsdp.dtype=float32"
    sharded = pool(*keys).phases
    own, others = pool(*keys, policy).phases, pool(*keys, critic).phases
    both = pool(*keys, policy, critic)
    for phase, size in sharded.items():
        is_critic = phase.startswith("critic")
        # Its own passes and step are counted with gradients.
        assert own[phase] - size == COUNTED.gradients * (is_critic or phase == "idle")
        assert others[phase] - size == COUNTED.gradients * (not is_critic)
        assert both.phases[phase] == own[phase] + others[phase] - size
    assert both.parts["gradients"] == 2 * COUNTED.gradients
    assert pool(*keys, policy, "trainer.n_gpus_per_node=2").phases["critic"] == sharded["critic"]


@pytest.mark.parametrize(
    ("keys", "copied"),
    [
        ((), COUNTED.parameters + COUNTED.moments),
        (("algorithm.adv_estimator=gae",), 2 * (COUNTED.parameters + COUNTED.moments)),
        (("actor_rollout_ref.model.lora_rank=8",), ADAPTERS + COUNTED.moments),
    ],
)
def test_asynchronous_saves_copy_all_of_each_trained_model_or_its_adapters(
    keys: tuple[str, ...], copied: int
) -> None:
    counted = msgspec.structs.replace(COUNTED, gradients=ADAPTERS)
    hosts = []
    for saving in ("false", "true"):
        save = f"{ACTOR}.checkpoint.async_save={saving}"
        config = load_config(None, [f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", save, *keys])
        hosts.append(trainer_pool(config, SHAPE, DEVICE, counted).host)
    assert hosts[1] - hosts[0] == copied


def test_moments_are_there_in_every_phase() -> None:
    phases = pool().phases
    assert phases["idle"] == COUNTED.parameters + COUNTED.moments
    assert phases["backward"] == COUNTED.backward + COUNTED.moments
    assert pool().peak == 53


def test_the_reference_is_on_the_device_while_logprobs_are_computed_and_else_on_the_host() -> None:
    plain, with_kl = pool(), pool(f"{ACTOR}.use_kl_loss=true")
    assert with_kl.phases["logprobs"] - plain.phases["logprobs"] == COUNTED.parameters
    assert with_kl.phases["backward"] == plain.phases["backward"]
    assert with_kl.host > plain.host


@pytest.mark.parametrize(
    ("keys", "dtype", "copies", "away"),
    [
        ((), 4, {"weights": 1, "gradients": 1, "moments": 2}, 0),
        ((f"{ACTOR}.fsdp_config.model_dtype=bfloat16",), 2, {"gradients": 1, "moments": 2}, 0),
        ((f"{ACTOR}.freeze_vision_tower=true",), 4, {"gradients": 0, "moments": 0}, 0),
        (("actor_rollout_ref.model.lora_rank=8",), 2, {"gradients": 0, "moments": 0}, 0),
        ((f"{ACTOR}.fsdp_config.optimizer_offload=true",), 4, {"gradients": 1, "moments": 0}, 2),
        ((f"{ACTOR}.checkpoint.async_save=true",), 4, {"gradients": 1, "moments": 2}, 3),
    ],
)
def test_an_image_encoder_is_trained_as_the_language_model_is(
    keys: tuple[str, ...], dtype: int, copies: dict[str, int], away: int
) -> None:
    plain, seeing = pool(*keys), pool(*keys, encoder=ENCODER)
    one, copies = dtype * ENCODER.parameters, {"weights": 1, **copies}
    for part, number in copies.items():
        assert seeing.parts[part] - plain.parts[part] == number * one
    more = {phase: size - plain.phases[phase] for phase, size in seeing.phases.items()}
    gradients, moments = copies["gradients"] * one, copies["moments"] * one
    # In the dtype of the passes it stays whole, and so do its gradients.
    stays = gradients * any("model_dtype" in key for key in keys)
    assert more["idle"] == one + stays + moments
    config = load_config(None, [])
    pixels = config.data.max_prompt_length * ENCODER.pixel_bytes
    assert more["logprobs"] == one + stays + moments + pixels
    assert more["optimizer step"] == pytest.approx(
        # Of offloaded moments, 512 MiB are on the device at once.
        one + gradients + moments + (512 << 20) * any("optimizer" in key for key in keys),
        abs=COUNTED.moments,
    )
    batch = config.data.train_batch_size * pixels
    assert seeing.host - plain.host == away * one + batch


def test_a_critic_has_no_image_encoder() -> None:
    gae = "algorithm.adv_estimator=gae"
    away = ("critic.fsdp.param_offload=true", "critic.fsdp.optimizer_offload=true")
    seeing, plain = pool(gae, encoder=ENCODER), pool(gae)
    state = 4 * ENCODER.parameters  # weights; two moments
    assert seeing.phases["critic's step"] - plain.phases["critic's step"] == 3 * state
    moved = pool(gae, *away, encoder=ENCODER).host - seeing.host
    assert moved == COUNTED.parameters + COUNTED.moments


def test_ranks_that_share_sequences_divide_images_but_not_one_prompts() -> None:
    keys = ("trainer.n_gpus_per_node=4", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4")
    shared = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
    prompt = load_config(None, []).data.max_prompt_length
    pixels = {}
    state = 4 * ENCODER.parameters / 4  # weights or gradients in shards; two moments
    for size in (1, 2, 4):
        with_images = pool(*keys, f"{shared}={size}", encoder=ENCODER)
        plain = pool(*keys, f"{shared}={size}")
        more = with_images.phases["logprobs"] - plain.phases["logprobs"]
        pixels[size] = more - 3 * state
        frozen = pool(
            *keys, f"{shared}={size}", f"{ACTOR}.freeze_vision_tower=true", encoder=ENCODER
        )
        kept = with_images.phases["backward"] - frozen.phases["backward"]
        of_batch = 4 / size * prompt * ENCODER.saved_bytes(recomputes=False, dtype_bytes=2)
        assert kept == of_batch + 3 * state
    assert pixels == {size: 4 / size * prompt * ENCODER.pixel_bytes for size in (1, 2, 4)}
    alone = pool(keys[0], f"{shared}=4", encoder=ENCODER).parts["activations"]
    assert alone - COUNTED.kept >= prompt * ENCODER.pixel_bytes


def test_the_sizes_of_an_encoder_are_those_of_its_configuration() -> None:
    assert ENCODER.parameters == pytest.approx(538_000_000, rel=0.01)
    patch = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    first = image_encoder({"depth": 2, "embed_dim": 32, "mlp_ratio": 2, "hidden_size": 64, **patch})
    assert first is not None
    assert (first.width, first.inner, first.out, first.projections) == (32, 64, 64, 2)
    second = image_encoder(
        {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
        | {"fullatt_block_indexes": [1], **patch}
    )
    assert second is not None
    assert (second.width, second.inner, second.out, second.projections) == (32, 48, 64, 3)
    assert second.pixel_bytes == 4 * 3 * 2 * 28**2
    assert image_encoder({"hidden_size": 32}) is None


def test_a_step_takes_as_long_as_its_collectives_and_its_operations_at_least() -> None:
    found = pool("data.train_batch_size=32")
    assert found.floor_s == max(found.compute_s, found.moving_s)
    assert pool("data.train_batch_size=64").compute_s == pytest.approx(2 * found.compute_s)
    assert pool("data.train_batch_size=64").micro_batches == 2 * found.micro_batches


def test_a_step_computes_every_epoch_and_the_passes_that_the_run_needs() -> None:
    mini = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64")

    def times(*overrides: str) -> float:
        return pool(*mini, *overrides).compute_s / pool(*mini).compute_s

    assert times(f"{ACTOR}.ppo_epochs=3") == pytest.approx(3)
    assert times(f"{ACTOR}.use_kl_loss=true") == pytest.approx(4 / 3)
    assert times("actor_rollout_ref.model.lora_rank=8") == pytest.approx(2 / 3)
    assert 1 < times("actor_rollout_ref.model.enable_gradient_checkpointing=true") < 4 / 3
    # The first of four mini-batches has the old logprobs from its own forward pass.
    quarter = f"{ACTOR}.ppo_mini_batch_size=16"
    assert times(quarter) == pytest.approx(1 + 3 / 4 / 3)
    assert times(quarter, f"{ACTOR}.use_rollout_log_probs=true") == pytest.approx(1)


def test_prompts_do_not_pass_the_head_and_embeddings_are_only_read() -> None:
    config = load_config(None, [f"{ACTOR}.use_rollout_log_probs=true"])
    data, n = config.data, config.actor_rollout_ref.rollout.n
    tokens = data.max_prompt_length + n * data.max_response_length / 2
    every_weight = 6 * SHAPE.active_parameters * tokens
    attention = (
        12
        * SHAPE.layers
        * SHAPE.query_width
        * tokens
        * (data.max_prompt_length + data.max_response_length)
    )
    assert group_flops(config, SHAPE) < every_weight + attention
    body = SHAPE.active_parameters - SHAPE.vocabulary_parameters
    assert group_flops(config, SHAPE) > 6 * body * tokens


def test_the_workers_of_a_vendors_replica_hold_one_model_together_in_host_memory() -> None:
    def host(name: str, tp: int) -> float:
        keys = [f"actor_rollout_ref.rollout.name={name}"]
        keys.append(f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp}")
        return engine_pool(load_config(None, keys), SHAPE, DEVICE).host

    model = 2 * SHAPE.total_parameters
    for vendor in ("vllm", "sglang"):
        assert host(vendor, 1) == host(vendor, 4) == model
    assert host("torch", 1) == 2 * model


@pytest.mark.parametrize(
    ("keys", "share"),
    [
        ([], 1.0),
        (["trainer.n_gpus_per_node=4", "trainer.nnodes=2"], 0.5),
        (
            ["trainer.n_gpus_per_node=4", "trainer.nnodes=2", f"{ACTOR}.fsdp_config.fsdp_size=2"],
            1.0,
        ),
    ],
    ids=["one machine", "a copy over two", "a copy on each of two"],
)
def test_the_first_machine_holds_two_snapshots_of_what_its_ranks_send(
    keys: list[str], share: float
) -> None:
    narrow = pool(*keys).host
    wide = pool("actor_rollout_ref.rollout.dtype=float32", *keys).host
    assert wide - narrow == 2 * share * SHAPE.total_parameters * (4 - 2)


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_experts_that_passes_replay_lie_on_the_device_and_the_engines_on_the_host_too(
    mode: str,
) -> None:
    moe, row = published_shape("Qwen3-30B-A3B"), 1024 + 512
    shared = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"
    sizes = ["data.max_prompt_length=512", "data.max_response_length=1024", shared]
    sizes += ["data.train_batch_size=32", "actor_rollout_ref.rollout.n=8"]
    sizes += [f"{ACTOR}.ppo_mini_batch_size=32", "trainer.n_gpus_per_node=4"]
    sizes += [f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.name=vllm"]
    found = []
    for replay in ("disabled", mode):
        config = load_config(None, [*sizes, f"{ACTOR}.router_replay.mode={replay}"])
        found.append(trainer_pool(config, moe, DEVICE, COUNTED))
    without, replaying = found
    token = 48 * 8  # layers, and experts a token in a byte each
    packed = token * (32 * 512 + 32 * 8 * 1024) // 4
    assert replaying.phases["backward"] - without.phases["backward"] == packed
    whole = token * 32 * 8 * row // 2  # two ranks share a sequence, and get the same samples
    assert replaying.host - without.host == (4 * (whole + packed) if mode == "R3" else 0)


def test_an_engine_must_hold_weights_and_one_longest_row() -> None:
    rollout = "actor_rollout_ref.rollout"
    fitting = engine_pool(load_config(None, []), SHAPE, DEVICE)
    assert fitting.fits(DEVICE)
    assert fitting.phases["update"] > fitting.phases["generating"] > fitting.phases["start"]
    small = device_kind("24GB")
    full = load_config(None, [f"{rollout}.gpu_memory_utilization=0.5"])
    assert not engine_pool(full, SHAPE, small).fits(small)
    long = load_config(None, ["data.max_response_length=4000000"])
    assert engine_pool(long, SHAPE, DEVICE).longest_rows == 0
    assert not engine_pool(long, SHAPE, DEVICE).fits(DEVICE)
