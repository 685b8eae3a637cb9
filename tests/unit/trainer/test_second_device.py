"""An update on a device brings all tensors that meet there to it, whatever is configured."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import adam

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from sluice.algorithm.losses.objective import LossAggregation
from sluice.algorithm.registry import BATCH_ESTIMATORS, POLICY_OBJECTIVES
from sluice.algorithm.rollout_correction.settings import REJECTION_OPTIONS
from tests.support.second_device import SECOND, SecondDevice, second_device
from tests.support.tiny_policy import make_batch, save_model
from tests.unit.trainer.test_learner_algorithms import configured, with_baselines

_ALL_REJECTIONS = {"rollout_rs": ",".join(REJECTION_OPTIONS), "rollout_rs_threshold": 1e6}
_WEIGHED = {"rollout_is": "token", "rollout_is_batch_normalize": True}
_BAND = {"rollout_is": "sequence", "rollout_is_threshold": "0.01_100.0"}
CASES: Mapping[str, dict[str, Any]] = {
    # Each estimator, each loss and each aggregation; what one of them does depends on no other.
    **{
        f"{estimator}, {loss}, {mode}": {
            "algorithm": {"adv_estimator": estimator, "gdpo_reward_keys": ["acc"]},
            "policy_loss": {"loss_mode": loss, "dro_beta": 0.1},
            "loss_agg_mode": mode,
        }
        for estimator, loss, mode in islice(
            zip(
                cycle(BATCH_ESTIMATORS),
                cycle(POLICY_OBJECTIVES),
                cycle(LossAggregation),
                strict=True,
            ),
            max(len(BATCH_ESTIMATORS), len(POLICY_OBJECTIVES), len(LossAggregation)),
        )
    },
    "weights of the baseline": {
        "algorithm": {"adv_estimator": "optimal_token_baseline"},
        "correction": _WEIGHED,
    },
    "band and rejections": {
        "correction": {**_BAND, **_ALL_REJECTIONS},
        "algorithm": {"adv_estimator": "opo"},
    },
    "bypass": {"correction": {"bypass_mode": True, **_WEIGHED, **_ALL_REJECTIONS}},
    "bypass by REINFORCE": {
        "correction": {"bypass_mode": True, "loss_type": "reinforce", **_BAND, **_ALL_REJECTIONS}
    },
    "entropy bonus and divergences": {
        "entropy_coeff": 0.01,
        "use_kl_loss": True,
        "algorithm": {"use_kl_in_reward": True},
    },
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Moving a model there would separate embeddings that are tied.
    return save_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)


@pytest.mark.parametrize("case", CASES)
def test_no_tensor_of_an_update_stays_behind_on_the_host(
    model_folder: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda *_: None)
    small: dict[str, Any] = {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 8}
    config = configured(model_folder, **small, **CASES[case])
    batch = with_baselines(make_batch(2))
    expected = Learner(config, ParallelContext(), total_steps=10).train_step(batch, 1)
    with second_device():
        learner = Learner(config, ParallelContext(), total_steps=10, device=SecondDevice())
        found = learner.train_step(batch, 1)
    assert found.keys() == expected.keys()
    if "critic/vf_loss" not in found:  # transformers draws a new value head otherwise there
        assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-3)


def test_host_tensors_do_not_meet_those_of_a_second_device() -> None:
    with second_device():
        there, here = torch.ones(2, device=SECOND), torch.ones(2)
        assert (there + torch.tensor(1.0)).cpu().tolist() == [2.0, 2.0]
        assert (there.cpu() + here.to(SECOND).cpu()).tolist() == [2.0, 2.0]
        with pytest.raises(RuntimeError, match="same device"):
            _ = there + here
        with pytest.raises(RuntimeError, match="same device"):
            torch.stack([there[0], here[0]])
