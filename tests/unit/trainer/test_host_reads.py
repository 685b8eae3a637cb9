"""The host waits for no value from a mini-batch's first pass to its last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import DataParallel
from services.trainer.learner.update import policy_update
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
    learner = Learner(recomputing(config) if recomputes else config, DataParallel(), total_steps=10)
    reads, passes = HostReads(), []

    def watched(call: Callable[..., Any], *, begins: bool) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            reads.is_watching = begins
            passes.append(begins)
            return call(*arguments, **options)

        return run

    for owner, name, begins in (
        (policy_update, "token_outputs", True),
        (learner._update._passes, "end_forward_only", False),
        (learner._optimizer, "step", False),
    ):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name), begins=begins))
    with reads:
        learner.train_step(make_batch(), 1)
    assert passes.count(True) > passes.count(False) == 3
    assert reads.found == []
