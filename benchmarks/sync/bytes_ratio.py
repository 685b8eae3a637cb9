"""How much of the weights one optimizer step changes, as bytes on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.reporting import ROOT
from sluice.config.schema.service import WeightsConfig
from sluice.weights.delta import encode_change
from sluice.weights.plan import TransferPlan, WeightBuffer, plan_transfer, tensor_specs

_PRETRAIN_LR = 1e-3
_PRETRAIN_STEPS, _WARM_UP_STEPS, _MEASURED_STEPS = 60, 30, 5
_BYTES = 256


def bytes_ratios(rates: Sequence[float]) -> dict[str, float]:
    """Median bytes of an update over bytes of all weights, by learning rate.

    A Llama of a few million parameters learns to predict the bytes of this project's documentation
    for 60 steps at a high rate. From there, for each rate: a new AdamW (PyTorch's defaults) on
    float32 weights, 30 steps so that its moments are those of a run under way, then 5 steps whose
    weights, rounded to bfloat16, are compared with those before.
    """
    torch.manual_seed(0)
    model = _model()
    text = _text()
    _train(model, text, _PRETRAIN_LR, _PRETRAIN_STEPS)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ratios = {}
    for rate in rates:
        model.load_state_dict(start)
        ratios[f"{rate:.0e}".replace("e-0", "e-")] = median(_updates(model, text, rate))
    return ratios


def _updates(model: LlamaForCausalLM, text: torch.Tensor, rate: float) -> Iterator[float]:
    bucket_bytes = WeightsConfig().bucket_mb << 20
    plan = plan_transfer(tensor_specs(model.named_parameters(), torch.bfloat16), bucket_bytes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    _train(model, text, rate, _WARM_UP_STEPS, optimizer)
    before = _rounded(plan, model)
    for _ in range(_MEASURED_STEPS):
        _train(model, text, rate, 1, optimizer)
        after = _rounded(plan, model)
        yield _change_bytes(plan, before, after) / plan.total_bytes
        before = after


def _change_bytes(plan: TransferPlan, before: WeightBuffer, after: WeightBuffer) -> int:
    return sum(
        encode_change(
            plan, bucket, before.bucket(bucket).numpy(), after.bucket(bucket).numpy()
        ).nbytes
        for bucket in plan.buckets
    )


def _rounded(plan: TransferPlan, model: LlamaForCausalLM) -> WeightBuffer:
    buffer = WeightBuffer(plan)
    for name, parameter in model.named_parameters():
        buffer.tensors[name].copy_(parameter.detach())
    return buffer


def _model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_BYTES,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=128,
        )
    )


def _text() -> torch.Tensor:
    pages = b"".join(page.read_bytes() for page in sorted((ROOT / "docs").glob("*.md")))
    return torch.from_numpy(np.frombuffer(pages, dtype=np.uint8).astype(np.int64))


def _train(
    model: LlamaForCausalLM,
    text: torch.Tensor,
    rate: float,
    steps: int,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        starts = torch.randint(0, text.numel() - 64, (16,))
        batch = torch.stack([text[start : start + 64] for start in starts])
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
