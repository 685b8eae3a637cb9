"""Which rank of a transfer group each of vLLM's workers takes, also where they share experts.

Workers are vLLM's ranks from 0 to `tensor_model_parallel_size` - 1. Expert parallelism adds none:
the same workers hold whole experts in place of a part of every one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest

from services.rollout.engines.vendor_engines.weight_worker import WeightWorker
from services.rollout.engines.vllm.settings import vllm_settings
from sluice.config.derived import replica_devices
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.device.cpu import CpuDevice
from sluice.types import TensorSpec, TransferGroupSpec
from sluice.weight_share import WHOLE
from sluice.weights.sender import WeightSender

_ROLLOUT = "actor_rollout_ref.rollout"
_EXPERTS = (TensorSpec("model.layers.0.mlp.experts.down_proj", "float32", (8, 4, 6)),)


class _Inbox:
    """Notes the groups that it is to join."""

    def __init__(self) -> None:
        self.joined: list[TransferGroupSpec] = []

    def join(self, spec: TransferGroupSpec) -> None:
        self.joined.append(spec)


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    sender = WeightSender(device=CpuDevice(), bucket_bytes=4096, timeout_s=60.0)
    yield sender
    sender.close()


def _config(*overrides: str) -> RunConfig:
    wanted = [f"{_ROLLOUT}.{one}" for one in ("name=vllm", *overrides)]
    return load_config(None, wanted)


def _joined(spec: TransferGroupSpec, vllm_rank: int) -> TransferGroupSpec:
    worker = WeightWorker()
    worker.rank, inbox = vllm_rank, _Inbox()
    worker.sluice_inbox = cast("Any", inbox)
    assert worker.sluice_join(msgspec.msgpack.encode(spec)) == {}
    (joined,) = inbox.joined
    return joined


@pytest.mark.parametrize(
    ("overrides", "workers", "shares_experts"),
    [
        ([], 1, False),
        (["tensor_model_parallel_size=2"], 2, False),
        (["tensor_model_parallel_size=2", "expert_parallel_size=2"], 2, True),
        (["tensor_model_parallel_size=4", "expert_parallel_size=4"], 4, True),
    ],
)
def test_each_worker_of_each_replica_has_a_rank_of_its_own_and_all_weights_in_it(
    sender: WeightSender, overrides: list[str], workers: int, shares_experts: bool
) -> None:
    config = _config(*overrides)
    settings = vllm_settings(config)
    arguments = settings.engine_arguments(on_cpu=False)
    assert arguments["enable_expert_parallel"] is shares_experts
    assert arguments["tensor_parallel_size"] == settings.workers == replica_devices(config)
    names = ["first", "second"]
    shares = dict.fromkeys(names, (WHOLE,) * replica_devices(config))
    specs = sender.form_group(1, names, _EXPERTS, shares)
    joined = [_joined(specs[name], rank) for name in names for rank in range(workers)]
    assert [(one.rank, one.ranks) for one in joined] == [
        (rank, 1) for rank in range(1, 2 * workers + 1)
    ]
    assert {one.world_size for one in joined} == {1 + 2 * workers}
    assert {one.tensors for one in joined} == {_EXPERTS}


def test_a_worker_that_the_replica_did_not_register_is_refused(sender: WeightSender) -> None:
    config = _config("tensor_model_parallel_size=2", "expert_parallel_size=2")
    spec = sender.form_group(1, ["one"], _EXPERTS, {"one": (WHOLE,) * replica_devices(config)})[
        "one"
    ]
    worker = WeightWorker()
    worker.rank, worker.sluice_inbox = 2, cast("Any", _Inbox())
    refused = cast("Any", worker.sluice_join(msgspec.msgpack.encode(spec)))
    assert refused["kind"] == "WeightSyncError"
    assert "2 rank(s) for this replica and none for its worker 2" in refused["error"]
