"""The host waits for no value of a dense model from a mini-batch's first pass to its last, and for
only one of a layer whose experts ranks divide.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from services.trainer.learner.learner import Learner
from services.trainer.learner.model import passes as model_passes
from services.trainer.learner.model.experts import routing_tape
from services.trainer.learner.model.passes import TokenPasses
from services.trainer.learner.ranks import ParallelContext
from sluice.types import TrainBatch
from tests.support.host_reads import HostReads
from tests.support.tiny_policy import make_batch, make_config, recomputing, save_model

CASES: dict[str, dict[str, Any]] = {
    "DAPO": {},
    "entropy bonus and divergence": {"entropy_coeff": 0.01, "use_kl_loss": True},
    "bfloat16": {"fsdp_config": {"dtype": "bfloat16"}},
}


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("case", CASES)
def test_no_value_is_read_inside_a_micro_batch(
    case: str, recomputes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(save_model(tmp_path), **CASES[case])
    learner = Learner(
        recomputing(config) if recomputes else config, ParallelContext(), total_steps=10
    )
    reads, passes = watched_step(learner, monkeypatch)
    assert passes > 3
    assert reads == []


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("mode", "choosing"),
    [
        ("disabled", 2 + 2 * 4),  # of old logprobs, and of two epochs over four micro-batches
        ("R2", 4),  # the first pass of each: later ones take its experts
    ],
)
def test_a_layer_of_divided_experts_reads_once_where_it_chooses_and_never_where_it_repeats(
    mode: str, choosing: int, recomputes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, parallel = save_model(tmp_path, "qwen3_moe"), ParallelContext()
    config = make_config(folder, 4, router_replay={"mode": mode}, ppo_epochs=2)
    learner = Learner(recomputing(config) if recomputes else config, parallel, total_steps=10)
    mesh, tape = parallel.shard_mesh(1), routing_tape(learner._model)
    assert mesh is not None
    assert tape is not None
    tape.group = mesh.get_group()
    reads, passes = watched_step(learner, monkeypatch, make_batch(4))
    parallel.close()
    assert passes == 2 + 2 * 4
    assert reads == [str(Tensor.tolist)] * choosing * tape.num_layers


def watched_step(
    learner: Learner, monkeypatch: pytest.MonkeyPatch, batch: TrainBatch | None = None
) -> tuple[list[str], int]:
    """Train a batch; return what the host read inside micro-batches, and the number of passes."""
    reads, passes = HostReads(), []

    run = model_passes.token_outputs

    def begun(*arguments: Any, **options: Any) -> Any:
        reads.is_watching = True
        passes.append(None)
        return run(*arguments, **options)

    def ended(call: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            call(*arguments)
            reads.is_watching = False

        return run

    monkeypatch.setattr(model_passes, "token_outputs", begun)
    for name in ("forward", "train"):
        monkeypatch.setattr(TokenPasses, name, ended(getattr(TokenPasses, name)))
    with reads:
        learner.train_step(batch or make_batch(), 1)
    return reads.found, len(passes)
