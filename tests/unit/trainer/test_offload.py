"""Moments and activations that are offloaded or recomputed change no number and free memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs
from transformers.modeling_layers import GradientCheckpointingLayer

from services.trainer.learner.learner import Learner
from services.trainer.learner.model import optimizer as optimizer_module
from services.trainer.learner.model.host_memory import HostMemory
from services.trainer.learner.model.passes import TokenPasses, ValuePasses
from services.trainer.learner.model.recompute import (
    keep_inputs_on_host,
    recompute_as_configured,
    recompute_layers,
)
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.sharded_state import StateFiles
from services.trainer.learner.tensor_layouts import local_part
from services.trainer.learner.update.critic import Critic
from services.trainer.learner.update.policy_update import PolicyUpdate
from services.trainer.learner.update.reference import ReferencePolicy
from sluice.config.loading.loader import load_config
from sluice.config.schema.actor import TransformerOverrides
from sluice.errors import ConfigError
from tests.support.tiny_policy import (
    adapting,
    make_batch,
    make_config,
    make_model,
    save_model,
    with_critic,
)

GROUPS = 2
TOKENS = torch.arange(2, 42)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "_PART_BYTES", 10_000)


def make_learner(folder: Path, **precision: object) -> Learner:
    config = make_config(folder, GROUPS, fsdp_config={"dtype": "float32", **precision})
    return Learner(config, ParallelContext(), total_steps=10)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in learner.named_weights()}


def moment_bytes(learner: Learner) -> Iterator[int]:
    """Of each moment on the device."""
    for state in learner._optimizer._adamw.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            moment = state[name]
            local = moment.to_local() if hasattr(moment, "to_local") else moment
            yield local.untyped_storage().nbytes()


@pytest.mark.parametrize("passes", ["float32", "bfloat16"])  # bfloat16 has sharded parameters
def test_moments_on_the_host_give_the_same_weights_and_checkpoints(
    folder: Path, tmp_path: Path, passes: str
) -> None:
    usual = make_learner(folder, dtype=passes)
    offloaded = make_learner(folder, dtype=passes, optimizer_offload=True)
    for learner in (usual, offloaded):
        learner.train_step(make_batch(GROUPS, seed=1), 1)
    assert set(moment_bytes(offloaded)) == {0}
    assert min(moment_bytes(usual)) > 0
    for learner in (usual, offloaded):
        learner.save(tmp_path / str(learner is usual) / "actor")
    assert set(moment_bytes(offloaded)) == {0}
    found, expected = (one._optimizer.state_tensors() for one in (offloaded, usual))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    resumed = make_learner(folder, dtype=passes, optimizer_offload=True)
    resumed.load(tmp_path / "True" / "actor")
    assert set(moment_bytes(resumed)) == {0}
    for learner in (usual, offloaded, resumed):
        learner.train_step(make_batch(GROUPS, seed=2), 2)
    assert set(moment_bytes(resumed)) == {0}
    expected = weights(usual)
    for learner in (offloaded, resumed):
        found = weights(learner)
        assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize("passes", ["float32", "bfloat16"])
def test_a_fraction_of_the_moments_on_the_host_changes_no_number(
    folder: Path, tmp_path: Path, passes: str
) -> None:
    half = {"optimizer_offload": True, "optimizer_offload_fraction": 0.5}
    usual, divided = make_learner(folder, dtype=passes), make_learner(folder, dtype=passes, **half)
    for learner in (usual, divided):
        learner.train_step(make_batch(GROUPS, seed=1), 1)
    divided.save(tmp_path / "actor")
    resumed = make_learner(folder, dtype=passes, **half)
    resumed.load(tmp_path / "actor")
    whole = sum(moment_bytes(usual))
    for learner in (divided, resumed):
        assert 0 < sum(moment_bytes(learner)) <= whole / 2
        learner.train_step(make_batch(GROUPS, seed=2), 2)
        assert sum(moment_bytes(learner)) <= whole / 2
    usual.train_step(make_batch(GROUPS, seed=2), 2)
    expected = weights(usual)
    for learner in (divided, resumed):
        found = weights(learner)
        assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_the_next_moments_come_before_those_just_changed_leave(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(folder, optimizer_offload=True)
    learner.train_step(make_batch(GROUPS), 1)
    changed: list[int] = []  # bytes on the device during each part's change
    leaving: list[int] = []  # and when it leaves, with the next part there
    step, move_out = torch.optim.AdamW.step, HostMemory.move_out

    def noting_step(self: torch.optim.AdamW) -> None:
        changed.append(sum(moment_bytes(learner)))
        step(self)

    def noting_move(self: HostMemory, tensors: Iterable[torch.Tensor], *, wait: bool) -> None:
        assert not wait
        leaving.append(sum(moment_bytes(learner)))
        move_out(self, tensors, wait=wait)

    monkeypatch.setattr(torch.optim.AdamW, "step", noting_step)
    monkeypatch.setattr(HostMemory, "move_out", noting_move)
    learner.train_step(make_batch(GROUPS, seed=1), 2)
    parts = len(learner._optimizer._adamw.param_groups)
    assert parts > 3
    for step_begin in range(0, len(changed), parts):
        in_step = [*changed[step_begin : step_begin + parts], 0]
        assert leaving[step_begin : step_begin + parts] == [a + b for a, b in pairwise(in_step)]


def test_a_resume_brings_the_moments_of_one_parameter_at_a_time_to_the_device(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(folder, optimizer_offload=True)
    learner.train_step(make_batch(GROUPS), 1)
    learner.save(tmp_path / "actor")
    fill = StateFiles.fill
    held: list[int] = []  # of the parameters before

    def noting(state: StateFiles, *arguments: Any) -> None:
        held.append(sum(moment_bytes(learner)))
        fill(state, *arguments)

    monkeypatch.setattr(StateFiles, "fill", noting)
    learner.load(tmp_path / "actor")
    assert set(held) == {0}
    assert len(held) > 10


def overrides(**keys: Any) -> TransformerOverrides:
    found = {f"recompute_{name}": value for name, value in keys.items()}
    return msgspec.convert(found, TransformerOverrides)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model(input_ids=TOKENS, use_cache=False).logits.square().sum().backward()
    return {name: one.grad for name, one in model.named_parameters()}


def kept_bytes(model: Any) -> int:
    """That a forward pass keeps for the backward pass."""
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(input_ids=TOKENS, use_cache=False)
    del outputs
    return sum(sizes.values())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_what_is_recomputed_is_not_kept_and_changes_no_gradient(family: str) -> None:
    kept: dict[str, int] = {}
    expected = gradients(make_model(family))
    for name, keys in {
        "nothing": {},
        "core_attn": {"granularity": "selective"},
        "layernorm": {"granularity": "selective", "modules": ["layernorm"]},
        "mlp": {"granularity": "selective", "modules": ["mlp" if family == "qwen3" else "moe"]},
        "one layer": {"granularity": "full", "method": "block", "num_layers": 1},
        "layers": {"granularity": "full", "method": "uniform", "num_layers": 1},
    }.items():
        model = make_model(family)
        recompute_as_configured(model, overrides(**keys))
        found = gradients(model)
        for parameter, gradient in expected.items():
            assert torch.equal(found[parameter], gradient), (name, parameter)
        kept[name] = kept_bytes(model)
    assert kept["core_attn"] == kept["nothing"]
    assert kept["layers"] < kept["one layer"] < kept["nothing"]
    assert kept["layernorm"] < kept["nothing"] > kept["mlp"]


def test_megatrons_keys_override_those_of_fsdp() -> None:
    model = make_model()
    recompute_layers(model)
    everything = kept_bytes(model)
    recompute_as_configured(model, overrides())
    assert kept_bytes(model) == everything
    recompute_as_configured(model, overrides(granularity="selective"))
    assert kept_bytes(model) > everything


def test_inputs_of_layers_wait_on_the_host() -> None:
    expected = gradients(make_model())
    alive: dict[bool, int] = {}
    for offloads in (False, True):
        model = make_model()
        recompute_layers(model)
        if offloads:
            keep_inputs_on_host(model)
        seen: list[Any] = []

        def note(_: object, given: Any, seen: list[Any] = seen) -> None:
            seen.append(weakref.ref(given[0]))

        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.register_forward_pre_hook(note)
        outputs = model(input_ids=TOKENS, use_cache=False)
        gc.collect()
        alive[offloads] = sum(one() is not None for one in seen)
        outputs.logits.square().sum().backward()
        found = {name: one.grad for name, one in model.named_parameters()}
        assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert alive == {False: 2, True: 0}


def test_a_learner_takes_the_keys_and_adapters_with_them(folder: Path) -> None:
    metrics = []
    for keys in (
        {},
        {"enable_gradient_checkpointing": True, "enable_activation_offload": True},
    ):
        config = adapting(make_config(folder, GROUPS), lora_rank=4, **keys)
        learner = Learner(config, ParallelContext(), total_steps=10)
        metrics.append([learner.train_step(make_batch(GROUPS, seed=s), s) for s in (1, 2)])
    for found, expected in zip(*metrics, strict=True):
        assert found["actor/grad_norm"] == expected["actor/grad_norm"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"granularity": "full", "method": "block"}, r"block needs recompute_num_layers"),
        (
            {"granularity": "selective", "modules": ["moe_act"]},
            r"moe_act cannot be recomputed alone; give some of core_attn, layernorm, mlp, moe",
        ),
    ],
)
def test_words_that_name_nothing_to_recompute_are_refused(
    keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recompute_as_configured(make_model(), overrides(**keys))


def test_inputs_of_layers_that_are_not_recomputed_cannot_wait_on_the_host() -> None:
    with pytest.raises(ConfigError, match=r"set .*enable_gradient_checkpointing=true too"):
        keep_inputs_on_host(make_model())


def test_the_policys_weights_are_away_while_its_reference_and_its_critic_compute(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    found: list[dict[str, float]] = []

    def noting(kind: type[Any], method: str) -> None:
        original = getattr(kind, method)

        def note(self: Any, *arguments: Any) -> Any:
            local = [one.to_local() for one in current._policy.parameters.values()]
            held.append(sum(one.untyped_storage().nbytes() for one in local))
            return original(self, *arguments)

        monkeypatch.setattr(kind, method, note)

    for kind, method in ((ReferencePolicy, "logprobs"), (Critic, "values"), (Critic, "update")):
        noting(kind, method)
    for offloads in (False, True):
        held.clear()
        precision = {"dtype": "bfloat16", "param_offload": offloads}
        config = with_critic(make_config(folder, GROUPS, use_kl_loss=True, fsdp_config=precision))
        current = Learner(config, ParallelContext(), total_steps=10)
        found += [current.train_step(make_batch(GROUPS, seed=step), step) for step in (1, 2)]
        assert len(held) == 6
        assert all((size == 0) == offloads for size in held)
    usual, offloaded = found[:2], found[2:]
    for ours, theirs in zip(offloaded, usual, strict=True):
        for name in ("actor/grad_norm", "actor/kl_loss", "critic/vf_loss"):
            assert ours[name] == theirs[name]


def test_adapters_reference_computes_before_the_policys_weights_leave_for_the_critic(
    folder: Path,
) -> None:
    found: list[list[dict[str, float]]] = []
    for offloads in (False, True):
        precision = {"dtype": "bfloat16", "param_offload": offloads}
        config = make_config(folder, GROUPS, use_kl_loss=True, fsdp_config=precision)
        learner = Learner(with_critic(adapting(config, lora_rank=4)), ParallelContext(), 10)
        found.append([learner.train_step(make_batch(GROUPS, seed=step), step) for step in (1, 2)])
    for ours, theirs in zip(*found, strict=True):
        for name in ("actor/grad_norm", "actor/kl_loss", "critic/vf_loss"):
            assert ours[name] == theirs[name]


def with_offloading_critic(folder: Path, *, offloads: bool) -> Learner:
    config = with_critic(make_config(folder, GROUPS, use_kl_loss=True))
    keys = {"dtype": "bfloat16", "param_offload": offloads, "optimizer_offload": offloads}
    fsdp = structs.replace(config.critic.fsdp, **keys)
    config = structs.replace(config, critic=structs.replace(config.critic, fsdp=fsdp))
    return Learner(config, ParallelContext(), total_steps=10)


def critic_bytes(learner: Learner) -> int:
    """Of the critic's weights on the device."""
    assert learner._critic is not None
    local = [local_part(one) for one in learner._critic.trained.parameters.values()]
    return sum(one.untyped_storage().nbytes() for one in local)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # nothing is done in place to its values
def test_a_critics_weights_are_on_the_device_only_while_it_computes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[str, set[int]] = {}

    def noting(kind: type[Any], method: str) -> None:
        original = getattr(kind, method)

        def note(self: Any, *arguments: Any, **options: Any) -> Any:
            held.setdefault(f"{kind.__name__}.{method}", set()).add(critic_bytes(current))
            return original(self, *arguments, **options)

        monkeypatch.setattr(kind, method, note)

    for kind, method in (
        (ValuePasses, "_run_last"),
        (ReferencePolicy, "logprobs"),
        (TokenPasses, "train"),
        (PolicyUpdate, "_optimizer_step"),
    ):
        noting(kind, method)
    usual = with_offloading_critic(folder, offloads=False)
    offloaded = with_offloading_critic(folder, offloads=True)
    whole = critic_bytes(usual)
    assert critic_bytes(offloaded) == 0
    current = usual
    expected = [current.train_step(make_batch(GROUPS, seed=1), 1)]
    held.clear()
    current = offloaded
    found = [current.train_step(make_batch(GROUPS, seed=1), 1)]
    assert held.pop("ValuePasses._run_last") == {whole}
    assert list(held.values()) == [{0}] * 3
    offloaded.save(tmp_path / "actor")
    assert critic_bytes(offloaded) == 0
    usual.load(tmp_path / "actor")
    current = resumed = with_offloading_critic(folder, offloads=True)
    resumed.load(tmp_path / "actor")
    assert critic_bytes(resumed) == 0
    found.append(resumed.train_step(make_batch(GROUPS, seed=2), 2))
    current = usual
    expected.append(usual.train_step(make_batch(GROUPS, seed=2), 2))
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("critic/vf_loss", "critic/grad_norm", "critic/vpred_mean", "actor/grad_norm"):
            assert ours[name] == theirs[name]


def test_verls_spellings_are_read() -> None:
    megatron = "actor_rollout_ref.actor.megatron"
    hybrid = "actor_rollout_ref.actor.optim.override_optimizer_config"
    config = load_config(
        None,
        [
            f"{megatron}.optimizer_offload=true",
            f"+{hybrid}.optimizer_offload_fraction=0.25",
            f"{megatron}.param_offload=true",
            f"+{megatron}.override_transformer_config.recompute_granularity=selective",
            f"+{megatron}.override_transformer_config.recompute_modules=[mlp]",
        ],
    )
    actor = config.actor_rollout_ref.actor
    assert actor.fsdp_config.optimizer_offload
    assert actor.fsdp_config.param_offload
    assert actor.fsdp_config.optimizer_offload_fraction == 0.25
    assert actor.megatron.override_transformer_config.recompute_modules == ["mlp"]
    host = "optim.override_optimizer_config.optimizer_cpu_offload=true"
    hosted = load_config(None, [f"+actor_rollout_ref.actor.{host}"])
    assert hosted.actor_rollout_ref.actor.fsdp_config.optimizer_offload
    assert not hosted.critic.fsdp.optimizer_offload
    for key in (f"+critic.{host}", "critic.megatron.optimizer_offload=true"):
        assert load_config(None, [key]).critic.fsdp.optimizer_offload
    share = "+critic.optim.override_optimizer_config.optimizer_offload_fraction=0.5"
    assert load_config(None, [share]).critic.fsdp.optimizer_offload_fraction == 0.5
    for key in ("critic.megatron.param_offload", "critic.model.fsdp_config.param_offload"):
        assert load_config(None, [f"{key}=true"]).critic.fsdp.param_offload
