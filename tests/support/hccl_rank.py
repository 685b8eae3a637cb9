"""One trainer rank whose gradients would be on an NPU, with a stand-in for HCCL."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.backend_registration import rename_privateuse1_backend

from services.trainer.learner.ranks import TorchDistributed
from sluice.device.cpu import CpuDevice


class _Npu(CpuDevice):
    name = "npu:0"
    collective_backend = "hccl"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("npu", 0)


def _create(options: Any, _: object) -> object:
    return dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, options.timeout
    )


def main() -> int:
    rename_privateuse1_backend("npu")
    dist.Backend.register_backend("hccl", _create, extended_api=True, devices=["npu"])
    parallel = TorchDistributed(_Npu(), 240.0)
    total = torch.tensor([parallel.rank + 1.0])
    parallel.all_reduce_sum([total], "summing")
    # On the CPU, so that it is Gloo's: but by sends alone, which HCCL has too.
    parts = torch.zeros(3)
    if parallel.rank:
        parallel.exchange([(torch.full((3,), 7.0), 0)], [], "sending")
    else:
        parallel.exchange([], [(parts, 1)], "sending")
    answer = {
        "backends": dist.get_backend_config(),
        "total": total.item(),
        "parts": parts.tolist(),
        "commands": parallel.all_gather([float(parallel.rank)], "gathering numbers"),
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    parallel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
