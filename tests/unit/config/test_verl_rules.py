"""One broken variant of each of verl's rules; what a violation proposes mends it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.config.catalogue.table import catalogue
from sluice.config.check import check_report
from sluice.config.loading.loader import KeySettings, load_config, read_run, read_settings
from sluice.config.memory.shape import ModelShape, published_shape
from sluice.config.problems import Problem, Severity, errors
from sluice.config.rules.batch import verl_problems
from sluice.config.rules.checks import all_problems
from sluice.config.run import RunConfig, changed
from sluice.config.verl_sizes import VerlSizes, verl_sizes

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REF, MODEL = "actor_rollout_ref.ref", "actor_rollout_ref.model"
MEGATRON, FSDP = f"{ACTOR}.megatron", f"{ACTOR}.fsdp_config"
DENSE, MIXED = published_shape("Qwen3-32B"), published_shape("Qwen3-30B-A3B")

# 512 rows; 8 ranks; 64 rows of a train batch and 32 of a mini-batch on each.
SOUND = (
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=4",
    "data.train_batch_size=64",
    f"{ROLLOUT}.n=8",
    f"{ACTOR}.ppo_mini_batch_size=32",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
    f"{REF}.log_prob_micro_batch_size_per_gpu=4",
    f"{ACTOR}.use_kl_loss=true",
)
DYNAMIC = (
    f"{ACTOR}.use_dynamic_bsz=true",
    "data.max_prompt_length=1000",
    "data.max_response_length=3000",
    f"{ACTOR}.ppo_max_token_len_per_gpu=4000",
)
PPO = ("algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=4")
NO_CRITIC = ("algorithm.adv_estimator=grpo",)
CUT = (f"{ACTOR}.strategy=megatron", f"{MEGATRON}.tensor_model_parallel_size=2")


def broken(*overrides: str, shape: ModelShape | None = None) -> list[Problem]:
    texts = [*SOUND, *overrides]
    config = load_config(None, texts)
    return all_problems(
        config, KeySettings(config, read_settings(None, texts).by_key()), shape=shape, files=False
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_run_does_not_start_where_its_engine_cannot_cut_the_models_heads(engine: str) -> None:
    settings = (f"{ROLLOUT}.name={engine}", f"{ROLLOUT}.tensor_model_parallel_size=6")
    assert "tp-heads" in [one.rule for one in errors(broken(*settings, shape=DENSE))]


NULL = "critic.ppo_micro_batch_size_per_gpu=null"


@pytest.mark.parametrize(
    "more",
    [
        (),
        DYNAMIC,
        CUT,
        PPO,
        (*DYNAMIC, *PPO),
        (PPO[0], NULL, "critic.ppo_micro_batch_size=16"),
    ],
)
def test_the_sound_variants_break_no_rule(more: tuple[str, ...]) -> None:
    assert broken(*more, shape=DENSE) == []


@pytest.mark.parametrize(
    ("rule", "overrides", "named"),
    [
        (
            "world-divides",
            [*CUT, f"{MEGATRON}.pipeline_model_parallel_size=3"],
            "8 ranks cannot be divided into groups of 6 ranks",
        ),
        (
            "parallel-layout",
            [f"{ACTOR}.fsdp_config.fsdp_size=3"],
            "does not divide the 8 trainer ranks",
        ),
        (
            "parallel-layout",
            [f"{ACTOR}.ulysses_sequence_parallel_size=3"],
            "ulysses_sequence_parallel_size = 3 does not divide the 8 trainer ranks",
        ),
        (
            "parallel-layout",
            [f"{ACTOR}.fsdp_config.fsdp_size=4", f"{ACTOR}.fsdp_config.expert_parallel_size=8"],
            "expert_parallel_size = 8 does not divide the 4 ranks that share one copy",
        ),
        (
            "real-batch",
            ["data.train_batch_size=9", f"{ACTOR}.ppo_mini_batch_size=9", f"{ROLLOUT}.n=5"],
            "9 * 5 = 45 rows are no multiple of 8",
        ),
        (
            "real-batch",
            [*CUT, f"{ACTOR}.ppo_micro_batch_size_per_gpu=3"],
            "512 rows are no multiple of 12",
        ),
        (
            "log-prob-micro",
            [f"~{ROLLOUT}.log_prob_micro_batch_size_per_gpu"],
            "rollout.log_prob_micro_batch_size_per_gpu = null",
        ),
        (
            "log-prob-micro",
            [f"~{REF}.log_prob_micro_batch_size_per_gpu"],
            "ref.log_prob_micro_batch_size_per_gpu = null",
        ),
        (
            "log-prob-micro",
            [f"{ROLLOUT}.log_prob_micro_batch_size=32"],
            "log_prob_micro_batch_size = 32 are both set",
        ),
        ("mini-in-train", [f"{ACTOR}.ppo_mini_batch_size=128"], "= 128 is more than"),
        (
            "mini-in-train",
            [*DYNAMIC, f"{ACTOR}.ppo_mini_batch_size=128"],
            "data.train_batch_size = 64",
        ),
        (
            "micro-batch",
            [f"{ACTOR}.ppo_micro_batch_size=32"],
            "ppo_micro_batch_size_per_gpu = 4 and the deprecated",
        ),
        ("micro-batch", [f"~{ACTOR}.ppo_micro_batch_size_per_gpu"], "= null while"),
        (
            "global-micro-batch",
            [f"~{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size=24"],
            "= 24 (deprecated) must divide",
        ),
        (
            "global-micro-batch",
            [f"~{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size=4"],
            "give each of 8 ranks a row",
        ),
        (
            "sp-needs-packing",
            [f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{MODEL}.use_remove_padding=false"],
            "only packed sequences can be cut",
        ),
        (
            "dynamic-alike",
            [f"{ROLLOUT}.log_prob_use_dynamic_bsz=true"],
            "log_prob_use_dynamic_bsz = true differs from",
        ),
        (
            "mini-rows",
            [f"{ACTOR}.ppo_mini_batch_size=1", f"{ROLLOUT}.n=4", "data.train_batch_size=32"],
            "1 * 4 = 4 rows cannot be divided among 8 data-parallel ranks",
        ),
        (
            "micro-divides-mini",
            [f"{ACTOR}.ppo_micro_batch_size_per_gpu=5"],
            "256 rows / 8 data-parallel ranks = 32 is no multiple of",
        ),
        ("whole-mini-batches", [f"{ACTOR}.ppo_mini_batch_size=24"], "is no multiple of"),
        (
            "log-prob-divides",
            [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=5"],
            "64 rows per data-parallel rank",
        ),
        (
            "log-prob-divides",
            [f"{REF}.log_prob_micro_batch_size_per_gpu=48"],
            "ref.log_prob_micro_batch_size_per_gpu = 48",
        ),
        (
            "token-budget",
            [*DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu=3999"],
            "ppo_max_token_len_per_gpu = 3999 cannot hold the longest row of 4000",
        ),
        (
            "token-budget",
            [
                *DYNAMIC,
                f"{ACTOR}.ppo_max_token_len_per_gpu=1999",
                f"{ACTOR}.ulysses_sequence_parallel_size=2",
            ],
            "= 1999 * 2 ranks that share a row",
        ),
        (
            "token-budget",
            [*DYNAMIC, f"{REF}.log_prob_max_token_len_per_gpu=100"],
            "ref.log_prob_max_token_len_per_gpu = 100",
        ),
        (
            "token-budget",
            [*DYNAMIC, *PPO, "critic.ppo_max_token_len_per_gpu=3999"],
            "critic.ppo_max_token_len_per_gpu = 3999 cannot hold",
        ),
        (
            "token-budget",
            [
                *DYNAMIC,
                *PPO,
                "critic.ppo_max_token_len_per_gpu=1999",
                "critic.ulysses_sequence_parallel_size=2",
            ],
            "critic.ppo_max_token_len_per_gpu = 1999 * 2 ranks",
        ),
        (
            "critic-micro-batch",
            [PPO[0]],
            "critic.ppo_micro_batch_size_per_gpu = null while critic.use_dynamic_bsz is false",
        ),
        (
            "critic-micro-batch",
            [*PPO, "critic.ppo_micro_batch_size=32"],
            "critic.ppo_micro_batch_size = 32 is deprecated",
        ),
        (
            "critic-micro-batch",
            [PPO[0], "critic.ppo_micro_batch_size=32"],
            "verl then sees both keys set; set critic.ppo_micro_batch_size=null",
        ),
        (
            "critic-micro-batch",
            [PPO[0], NULL, "critic.ppo_micro_batch_size=4"],
            "must divide critic.ppo_mini_batch_size = 32 and give each of 8 ranks a row",
        ),
        (
            "critic-world-divides",
            [*PPO, "critic.ulysses_sequence_parallel_size=3"],
            "groups of critic.ulysses_sequence_parallel_size = 3 ranks",
        ),
        (
            "sp-needs-packing",
            [
                *PPO,
                "critic.ulysses_sequence_parallel_size=2",
                "critic.model.use_remove_padding=false",
            ],
            "critic.model.use_remove_padding = false",
        ),
        (
            "rows-divide",
            [
                *DYNAMIC,
                "data.train_batch_size=9",
                f"{ACTOR}.ppo_mini_batch_size=9",
                f"{ROLLOUT}.n=5",
            ],
            "45 rows cannot be divided among 8",
        ),
        ("generation-batch", ["data.gen_batch_size=128"], "is refused by verl 0.9"),
        (
            "group-size",
            ["algorithm.adv_estimator=adpo", "algorithm.num_generations=6"],
            "differs from actor_rollout_ref.rollout.n = 8",
        ),
        (
            "sp-heads",
            ["trainer.n_gpus_per_node=12", f"{ACTOR}.ulysses_sequence_parallel_size=3"],
            "cannot cut 64 attention heads and 8 key-value heads",
        ),
        ("tp-heads", [f"{ROLLOUT}.tensor_model_parallel_size=6"], "= 6 cannot cut 64"),
        (
            "engine-experts",
            [f"{ROLLOUT}.expert_parallel_size=4", f"{ROLLOUT}.tensor_model_parallel_size=2"],
            "must be tensor_model_parallel_size * data_parallel_size = 2 * 1",
        ),
        (
            "engine-replicas",
            [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.data_parallel_size=4"],
            "data_parallel_size = 4 with name = vllm, but a replica is one engine",
        ),
        (
            "engine-tokens",
            [f"{ROLLOUT}.enable_chunked_prefill=false", f"{ROLLOUT}.max_num_batched_tokens=1000"],
            "less than the context of 1024",
        ),
    ],
)
def test_a_broken_rule_is_named_and_its_remedy_mends_it(
    rule: str, overrides: list[str], named: str
) -> None:
    found = [one for one in broken(*overrides, shape=DENSE) if one.rule == rule]
    assert any(named in one.text for one in found), found
    remedies = [text for one in found for text in one.overrides]
    assert remedies
    assert all(text in " ".join(one.text for one in found) for text in remedies)
    mended = broken(*overrides, *remedies, shape=DENSE)
    assert rule not in {one.rule for one in mended}


def test_rows_must_reach_groups_of_ranks_and_not_each_rank() -> None:
    few = ("data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=1", f"{ROLLOUT}.n=2")
    cuts = [f"{FSDP}.tensor_parallel_size=2", f"{FSDP}.pipeline_parallel_size=2"]
    assert not [one for one in broken(*few, *cuts) if one.rule == "idle-ranks"]
    (one,) = [one for one in broken(*few, cuts[0]) if one.rule == "idle-ranks"]
    assert "of 2 rows leaves some of 4 groups of 2 trainer ranks without work" in one.text
    (all_ranks,) = [one for one in broken(*few) if one.rule == "idle-ranks"]
    assert "of 2 rows leaves some of 8 trainer ranks without work" in all_ranks.text


def test_rows_are_divided_among_the_ranks_that_stages_and_tensor_ranks_leave() -> None:
    rows = ("data.train_batch_size=6", f"{ACTOR}.ppo_mini_batch_size=3", f"{ROLLOUT}.n=2")
    cuts = f"{FSDP}.tensor_parallel_size=2", f"{FSDP}.pipeline_parallel_size=2"
    refused = {"mini-rows", "rows-divide"}
    assert refused <= {one.rule for one in broken(*rows)}
    assert not refused & {one.rule for one in broken(*rows, *cuts)}


def test_what_tensor_ranks_do_not_cut_is_refused_before_the_start() -> None:
    stages, ranks = f"{FSDP}.pipeline_parallel_size=2", f"{FSDP}.tensor_parallel_size=2"
    compiled = f"{FSDP}.use_torch_compile=true", "critic.fsdp.use_torch_compile=true"
    assert not errors(broken(*NO_CRITIC, stages, ranks, compiled[1]))
    assert not errors(broken(*PPO, stages, ranks))
    both = errors(broken(*PPO, ranks, *compiled))
    assert [one.overrides for one in both] == [
        (f"{FSDP}.use_torch_compile=false",),
        ("critic.fsdp.use_torch_compile=false",),
    ]


@pytest.mark.parametrize("key", [f"{FSDP}.tensor_parallel_size", CUT[1].partition("=")[0]])
def test_ranks_share_the_heads_that_a_cut_of_layers_leaves(key: str) -> None:
    shape = replace(DENSE, heads=28, kv_heads=4)
    two = f"{FSDP}.ulysses_sequence_parallel_size=2"
    assert not errors(broken(two, f"{key}=2", shape=shape))
    (one,) = errors(broken(two, f"{key}=4", shape=shape))
    left = r"cannot cut 7 attention heads and 1 key-value heads that \S*tensor_parallel_size = 4 "
    assert re.search(left, one.text)


def test_stages_that_ranks_do_not_make_are_the_only_size_named() -> None:
    both = f"{FSDP}.pipeline_parallel_size=3", f"{FSDP}.tensor_parallel_size=4"
    (one,) = [one for one in broken(*both) if one.rule == "parallel-layout"]
    assert "pipeline_parallel_size = 3 does not divide the 8 trainer ranks" in one.text


def test_the_critics_shards_divide_what_tensor_ranks_leave() -> None:
    three = "critic.fsdp.fsdp_size=3"
    assert not errors(broken(*NO_CRITIC, three))
    (one,) = errors(broken(*PPO, three, f"{FSDP}.tensor_parallel_size=2"))
    left = "fsdp_size=3 does not divide the 4 trainer ranks that tensor and pipeline sizes leave"
    assert f"critic.fsdp.{left}; give 2 or 4" in one.text


def test_experts_must_divide_by_their_parallel_size() -> None:
    sizes = [*CUT, f"{MEGATRON}.expert_tensor_parallel_size=1"]
    sizes.append("sluice.rollout.batch_invariant=false")
    six = f"{MEGATRON}.expert_model_parallel_size=6"
    (one,) = [found for found in broken(*sizes, six, shape=MIXED) if found.rule == "experts"]
    assert (one.rule, one.overrides) == ("experts", (f"{MEGATRON}.expert_model_parallel_size=4",))
    assert broken(*sizes, six, *one.overrides, shape=MIXED) == []
    (dense, *_) = broken(*sizes, six, shape=DENSE)
    assert "for a model without experts" in dense.text


def test_sizes_that_cannot_divide_experts_or_heads_are_refused_before_the_start() -> None:
    ranks = ["trainer.n_gpus_per_node=12"]
    for shape, size, stated, nearest in (
        (MIXED, "fsdp_config.expert_parallel_size=12", "the 128 experts of a layer", 8),
        (DENSE, "fsdp_config.expert_parallel_size=4", "for a model without experts", 1),
        (DENSE, "ulysses_sequence_parallel_size=3", "cannot cut 64 attention heads", 2),
    ):
        found = errors(broken(*ranks, f"{ACTOR}.{size}", shape=shape))
        (one,) = [one for one in found if one.rule in {"experts", "sp-heads"}]
        assert stated in one.text
        assert one.overrides[0].endswith(f"={nearest}")
    three = broken(*CUT, f"{MEGATRON}.expert_model_parallel_size=3", shape=MIXED)
    assert [one.severity for one in three if one.rule == "experts"] == [Severity.ERROR]


@pytest.mark.parametrize(("engine", "here"), [("torch", False), ("vllm", True), ("sglang", True)])
def test_what_an_engine_refuses_counts_here_where_sluice_drives_it(engine: str, here: bool) -> None:
    (one,) = broken(f"{ROLLOUT}.name={engine}", f"{ROLLOUT}.expert_parallel_size=4")
    assert (one.rule, one.severity is Severity.ERROR) == ("engine-experts", here)


@pytest.mark.parametrize("prompts", [1, 16, 64])
def test_a_generation_batch_divides_the_train_batch_as_verl_needs_it(prompts: int) -> None:
    assert broken("data.train_batch_size=64", f"data.gen_batch_size={prompts}") == []


def test_all_broken_rules_are_reported_at_once() -> None:
    found = broken(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=5",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=5",
        "data.gen_batch_size=128",
        "sluice.trainer.replica_ttl_s=1.5",
    )
    assert {one.rule for one in found} == {
        "micro-divides-mini",
        "log-prob-divides",
        "generation-batch",
        "heartbeats",
    }


def test_a_critic_without_rows_is_one_problem_with_an_override_that_mends_it() -> None:
    unset = (PPO[0], f"{ACTOR}.ppo_micro_batch_size_per_gpu=null", f"{ACTOR}.use_dynamic_bsz=true")
    rows = (*unset, "critic.use_dynamic_bsz=false", f"{ROLLOUT}.log_prob_use_dynamic_bsz=true")
    (found,) = broken(*rows)
    assert (found.rule, found.severity) == ("algorithm", Severity.ERROR)
    assert found.overrides == ("critic.ppo_micro_batch_size_per_gpu=4",)
    assert found.overrides[0] in found.text
    assert broken(*rows, *found.overrides) == []


@pytest.mark.parametrize("more", [(), CUT, (*DYNAMIC, *PPO), PPO])
def test_no_size_below_1_ends_a_check_in_an_exception(more: tuple[str, ...]) -> None:
    nulls = [f"{key}=null" for key in catalogue() if key.endswith("micro_batch_size_per_gpu")]
    keys = [key for key in catalogue() if re.search(r"size|nnodes|gpus|\.n$|epochs|num_|max_", key)]
    for texts, key, size in product(((), nulls), keys, (0, -1)):
        run = read_run(None, [*SOUND, *more, *texts, f"{key}={size}"])
        check_report(run.config, run.settings, shape=MIXED, dataset_rows=100, files=False)


def test_rules_of_the_critic_hold_only_where_there_is_one() -> None:
    alone = ("critic.ppo_max_token_len_per_gpu=10", "critic.ulysses_sequence_parallel_size=3")
    assert broken(*DYNAMIC, *NO_CRITIC, *alone) == []
    rows = "critic.use_dynamic_bsz=false"
    assert {one.rule for one in broken(*DYNAMIC, *PPO, *alone, rows)} == {"critic-world-divides"}


def test_sizes_decide_for_megatron_only_without_a_strategy() -> None:
    pipeline = f"{MEGATRON}.pipeline_model_parallel_size=3"
    assert [one.rule for one in broken(pipeline)] == ["world-divides", "parallel-layout"]
    fsdp = broken(pipeline, f"{ACTOR}.strategy=fsdp2")
    assert [one.rule for one in fsdp] == ["parallel-layout"]


@settings(max_examples=60)
@given(
    prompts=st.integers(1, 300),
    mini=st.integers(1, 300),
    n=st.integers(1, 20),
    micro=st.integers(1, 20),
    log_micro=st.integers(1, 20),
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 9),
    sp=st.sampled_from([1, 2, 4]),
)
def test_following_the_remedies_ends_in_a_run_without_violations(
    prompts: int, mini: int, n: int, micro: int, log_micro: int, nodes: int, ranks: int, sp: int
) -> None:
    keys = {
        "data.train_batch_size": prompts,
        f"{ACTOR}.ppo_mini_batch_size": mini,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": log_micro,
        "trainer.n_gpus_per_node": ranks,
        "data.gen_batch_size": prompts,
        f"{ROLLOUT}.n": n,
        "trainer.nnodes": nodes,
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": sp,
    }
    for _ in range(8):
        found = verl_problems(_sizes_of(keys))
        if not found:
            return
        # One at a time: a remedy may change what another rule starts from.
        parts = (text.partition("=") for text in found[0].overrides)
        keys |= {key: int(value) for key, _, value in parts}
    pytest.fail(f"still broken: {found}")


def _sizes_of(keys: dict[str, int]) -> VerlSizes:
    # The schema has no key for the rows of a pass without gradients.
    typed = [f"{key}={value}" for key, value in keys.items() if "log_prob" not in key]
    config = changed(RunConfig(), typed)
    return verl_sizes(config, KeySettings(config, keys))


@pytest.mark.parametrize(
    ("overrides", "shape", "named"),
    [
        ((f"{ACTOR}.router_replay.mode=R2",), DENSE, "mode = R2: the model has no experts"),
        ((f"{ACTOR}.router_replay.mode=R3",), DENSE, "mode = R3: the model has no experts"),
        (
            (f"{ACTOR}.router_replay.mode=R3", "data.max_response_length=260000"),
            MIXED,
            "max_message_mb = 64 with actor_rollout_ref.actor.router_replay.mode = R3: a sample of",
        ),
    ],
)
def test_a_routing_replay_that_cannot_work_is_mended_by_what_it_proposes(
    overrides: tuple[str, ...], shape: ModelShape, named: str
) -> None:
    small = ("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8", f"{ROLLOUT}.n=1")
    small = small if "R3" in overrides[0] and shape is MIXED else ()
    found = [one for one in broken(*overrides, *small, shape=shape) if one.rule == "routing"]
    (problem,) = found
    assert named in problem.text
    mended = broken(*overrides, *small, *problem.overrides, shape=shape)
    assert "routing" not in {one.rule for one in mended}


def test_the_stages_of_a_critic_of_another_model_are_checked(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 24, "num_attention_heads": 8, "hidden_size": 64}
    sizes |= {"intermediate_size": 64, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    first = f"{MEGATRON}.override_transformer_config.num_layers_in_first_pipeline_stage=40"
    cut = (f"{FSDP}.pipeline_parallel_size=2", first)
    critic = f"critic.model.path={tmp_path}"
    assert "stages" not in {one.rule for one in broken(*PPO, *cut, shape=DENSE)}
    assert "stages" not in {one.rule for one in broken(critic, *cut, shape=DENSE)}
    (found,) = [one for one in broken(*PPO, critic, *cut, shape=DENSE) if one.rule == "stages"]
    assert found.text.startswith(f"{critic}: {first} with {FSDP}.pipeline_parallel_size=2: ")
    assert "of 24 layers" in found.text
