"""A policy update on a GPU is the update of a CPU, up to the rounding of its dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from services.trainer.learner.learner import Learner
from services.trainer.learner.model import attention, experts, optimizer
from services.trainer.learner.ranks import ParallelContext
from sluice.algorithm.token_statistics import LinearHead, token_statistics
from sluice.config.run import RunConfig
from tests.support.accelerator import accelerator, is_rehearsal
from tests.support.tiny_policy import FAMILIES, make_batch, make_config, on_device, save_model

Weights = dict[str, torch.Tensor]
SaveModel = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SaveModel:
    return lambda family: save_model(tmp_path_factory.mktemp(family), family)


def updated(config: RunConfig, device: str) -> tuple[Weights, dict[str, float]]:
    """The change of each weight in one update, on the CPU, and the update's metrics."""
    learner = Learner(on_device(config, device), ParallelContext(device), total_steps=10)
    before = whole(learner)
    metrics = learner.train_step(make_batch(), 1)
    return {name: weight - before[name] for name, weight in whole(learner).items()}, metrics


def whole(learner: Learner) -> Weights:
    found = {}
    for name, weight in learner.named_weights():
        full = getattr(weight, "full_tensor", None)
        found[name] = (weight if full is None else full()).detach().float().cpu().clone()
    return found


def difference(found: Weights, expected: Weights) -> float:
    """The length of the difference of two changes over the length of the expected one."""
    gap = sum(float((found[name] - one).square().sum()) for name, one in expected.items())
    return float((gap / sum(float(one.square().sum()) for one in expected.values())) ** 0.5)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"bloom"}))  # refused: ALiBi
def test_an_update_in_float32_is_the_cpus(saved: SaveModel, family: str) -> None:
    config = make_config(saved(family))
    expected, metrics = updated(config, "cpu")
    found, on_gpu = updated(config, accelerator())
    assert difference(found, expected) < 2e-3
    for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm"):
        assert on_gpu[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-5), name


def test_an_update_with_the_engines_logprobs_is_the_cpus(saved: SaveModel) -> None:
    config = make_config(saved("qwen3"))
    correction = structs.replace(
        config.algorithm.rollout_correction, bypass_mode=True, rollout_is="token"
    )
    algorithm = structs.replace(config.algorithm, rollout_correction=correction)
    config = structs.replace(config, algorithm=algorithm)
    expected, metrics = updated(config, "cpu")
    found, on_gpu = updated(config, accelerator())
    assert difference(found, expected) < 2e-3
    for name in ("actor/pg_loss", "actor/grad_norm", "rollout_corr/kl"):
        assert on_gpu[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_an_update_in_bfloat16_is_the_cpus_of_float32_but_for_rounding(
    saved: SaveModel, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(family)
    expected, metrics = updated(make_config(folder), "cpu")
    mixed = {"dtype": "bfloat16", "model_dtype": "float32"}
    flash = mock.Mock(wraps=attention._attend_ragged)
    monkeypatch.setattr(attention, "_attend_ragged", flash)
    found, on_gpu = updated(make_config(folder, fsdp_config=mixed), accelerator())
    assert difference(found, expected) < 0.15
    assert on_gpu["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=0.1)
    if not is_rehearsal():
        assert flash.called == ("window_size" in attention._VARLEN_OPTIONS)


def test_a_checkpoint_of_a_gpu_continues_on_a_cpu_as_on_the_gpu(
    saved: SaveModel, tmp_path: Path
) -> None:
    config = make_config(saved("qwen3"))
    first = Learner(
        on_device(config, accelerator()), ParallelContext(accelerator()), total_steps=10
    )
    first.train_step(make_batch(), 1)
    first.save(tmp_path / "actor")
    again = Learner(config, ParallelContext(), total_steps=10)
    again.load(tmp_path / "actor")
    first.train_step(make_batch(seed=1), 2)
    again.train_step(make_batch(seed=1), 2)
    torch.testing.assert_close(whole(again), whole(first), atol=2e-4, rtol=2e-3)


def test_moments_that_move_beside_the_step_change_no_bit(
    saved: SaveModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "_PART_BYTES", 10_000)
    found = []
    for is_offloaded in (False, True):
        config = make_config(saved("qwen3"), fsdp_config={"optimizer_offload": is_offloaded})
        config = on_device(config, accelerator())
        learner = Learner(config, ParallelContext(accelerator()), total_steps=10)
        for step in (1, 2, 3):
            learner.train_step(make_batch(seed=step), step)
        learner.save(tmp_path / str(is_offloaded))
        found.append(whole(learner))
    assert all(torch.equal(found[1][name], one) for name, one in found[0].items())
    moments = [load_file(tmp_path / str(one) / "optimizer.safetensors") for one in (False, True)]
    assert all(torch.equal(moments[1][name], one) for name, one in moments[0].items())


@pytest.mark.real_gpu
def test_logits_never_exist_as_a_whole() -> None:
    """16,384 tokens of a vocabulary of 151,936: 9.3 GiB of float32 logits."""
    tokens, width, vocabulary = 16_384, 256, 151_936
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16)
    weight = (weight / width**0.5).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = token_statistics(
        hidden,
        LinearHead(weight, None, 1.0),
        labels,
        1.0,
        with_entropy=True,
        entropy_gradient=True,
    )
    assert found.entropy is not None
    (found.logprobs.mean() + found.entropy.mean()).backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * tokens * vocabulary / 4


@pytest.mark.real_gpu
def test_the_gradients_of_a_heads_blocks_add_up_whether_compiled_or_not() -> None:
    tokens, width, vocabulary = 1000, 256, 32_000
    hidden = torch.randn(tokens, width, device="cuda").bfloat16()
    weight = (torch.randn(vocabulary, width, device="cuda") / width**0.5).bfloat16()
    labels = torch.randint(vocabulary, (tokens,), device="cuda")
    wide = [one.float().requires_grad_() for one in (hidden, weight)]
    logprobs = (wide[0] @ wide[1].t()).log_softmax(-1)
    expected = [logprobs.gather(-1, labels[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)]
    (expected[0].sum() + expected[1].sum()).backward()
    for is_compiled in (False, True):
        halves = [one.clone().requires_grad_() for one in (hidden, weight)]
        found = token_statistics(
            halves[0],
            LinearHead(halves[1], is_compiled=is_compiled),
            labels,
            with_entropy=True,
            entropy_gradient=True,
            block_tokens=128,
        )
        assert found.entropy is not None
        (found.logprobs.sum() + found.entropy.sum()).backward()
        torch.testing.assert_close(found.logprobs, expected[0], atol=0.05, rtol=0.02)
        torch.testing.assert_close(found.entropy, expected[1], atol=0.05, rtol=0.02)
        for half, one in zip(halves, wide, strict=True):
            assert half.grad is not None
            assert one.grad is not None
            gap = (half.grad.float() - one.grad).norm() / one.grad.norm()
            assert gap < 0.02


def test_grouped_products_in_bfloat16_are_each_experts_own_in_float32() -> None:
    """Experts without rows included; sizes that kernels pad are not all multiples of 16."""
    width, inner, counts = 64, 96, (17, 0, 128, 1, 46)
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), width, device=accelerator(), dtype=torch.bfloat16)
    weights = torch.randn(len(counts), inner, width, device=accelerator(), dtype=torch.bfloat16)
    weights = weights / width**0.5
    ends = torch.tensor(counts, device=accelerator()).cumsum(0).int()
    grouped = [one.clone().requires_grad_() for one in (rows, weights)]
    found = experts._expert_products(grouped[0], grouped[1], ends)
    wide = [one.float().requires_grad_() for one in (rows, weights)]
    parts = zip(wide[0].split(counts), wide[1], strict=True)
    expected = torch.cat([part @ weight.t() for part, weight in parts])
    torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0.02)
    slope = torch.randn_like(found)
    found.backward(slope)
    expected.backward(slope.float())
    for half, one in zip(grouped, wide, strict=True):
        assert half.grad is not None
        assert one.grad is not None
        assert (half.grad.float() - one.grad).norm() / one.grad.norm() < 0.01


def test_experts_without_any_row_have_gradients_of_zero() -> None:
    """As on a rank whose experts no token of a pass has chosen."""
    rows = torch.empty(0, 64, device=accelerator(), dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(4, 96, 64, device=accelerator(), dtype=torch.bfloat16).requires_grad_()
    ends = torch.zeros(4, device=accelerator(), dtype=torch.int32)
    found = experts._expert_products(rows, weights, ends)
    assert found.shape == (0, 96)
    found.sum().backward()
    assert weights.grad is not None
    assert not weights.grad.any()
