"""The vendor's engine of this environment: vLLM and SGLang never share one, and all tests of this
folder run with either.
"""

from __future__ import annotations

from pathlib import Path

import torch

from services.rollout.engines.sglang.client import installed_sglang
from services.rollout.engines.sglang.engine import SglangEngine
from services.rollout.engines.sglang.settings import SglangSettings
from services.rollout.engines.vllm.client import installed_vllm
from services.rollout.engines.vllm.engine import VllmEngine
from services.rollout.engines.vllm.settings import VllmSettings
from tests.support.accelerator import is_rehearsal
from tests.support.engine_contract_world import MAX_MODEL_LEN

VLLM, SGLANG = "vllm", "sglang"
VENDOR = VLLM if installed_vllm() else SGLANG if installed_sglang() else None
VendorsEngine = VllmEngine | SglangEngine
ON_GPU = torch.cuda.is_available() and not is_rehearsal()
ROUNDING = 2e-5 if ON_GPU else 5e-6 if VENDOR == SGLANG else 0.0
"""By how much repeated logprobs differ: samples of a group do not always enter SGLang at the same
steps, and a GPU's products of other batches are rounded otherwise."""
_LIVENESS_S = 60.0


def make_engine(
    folder: Path,
    *,
    slots: int = 16,
    max_model_len: int = MAX_MODEL_LEN,
    recompute_kv: bool = True,
    workers: int = 1,
    shares_prompts: bool = True,
    serves_model_files: bool = False,
    sleeps: bool = False,
    **more: object,
) -> VendorsEngine:
    """An engine that is not started.

    Args:
        shares_prompts: samples of a prompt share its cache.
        serves_model_files: it serves the weights of the folder.
        sleeps: vLLM may sleep.
        more: arguments by the vendor's own names.
    """
    # With the memory and over gloo, two engines of a module share a GPU and their trainer has none.
    # On the CPU neither changes anything.
    if VENDOR == VLLM:
        arguments = {
            "gpu_memory_utilization": 0.3,
            "tensor_parallel_size": workers,
            "enable_prefix_caching": shares_prompts,
            "max_num_batched_tokens": 2 * MAX_MODEL_LEN,
        }
        return VllmEngine(
            VllmSettings(
                str(folder),
                device=None if ON_GPU else "cpu",
                slots=slots,
                max_model_len=max_model_len,
                recompute_kv=recompute_kv,
                weights_backend="gloo",
                serves_model_files=serves_model_files,
                sleeps=sleeps,
                arguments=arguments | more,
            )
        )
    arguments = {
        "tp_size": workers,
        "disable_radix_cache": not shares_prompts,
        "chunked_prefill_size": 2 * MAX_MODEL_LEN,
        "load_snapshot_publish_interval": 1,
    }
    return SglangEngine(
        SglangSettings(
            str(folder),
            slots=slots,
            max_model_len=max_model_len,
            recompute_kv=recompute_kv,
            serves_model_files=serves_model_files,
            arguments=arguments | more,
        )
    )


async def worker_processes(engine: VendorsEngine) -> tuple[int, ...]:
    """The processes that hold the model, by rank."""
    thread, core = engine._in_thread()
    return await thread.call(core.workers.processes(), "looking")


class VendorInsight:
    """See `Insight`."""

    def __init__(self, engine: VendorsEngine) -> None:
        self._engine = engine

    async def running_samples(self) -> int:
        thread, core = self._engine._in_thread()
        if VENDOR == VLLM:
            return await thread.call(core.check_alive(_LIVENESS_S), "ending a step")

        async def published() -> int:
            for _ in range(3):  # steps until the scheduler has published its load
                await core.check_alive(_LIVENESS_S)
            (load,) = await core.client._manager.get_loads()
            return int(load.num_running_reqs)

        return await thread.call(published(), "asking for its load")
