"""Try on 2 to 8 GPUs what one GPU cannot show: NCCL, vLLM, tensor parallelism; `make gpu-day1`.

Each part is a process of its own with a deadline. The last line is one JSON object, which is also
written to ``report.json``, with date and device. A part that lacks something, such as a third GPU
or vLLM, is in ``missing`` with the reason and has not passed.

ranks       2 and 4 ranks that divide a model by shards, experts, layers cut or stages have one
            rank's losses and saved weights; a rank that is killed in an exchange of tokens is named
            in time, and the others end
weights     from a GPU into an embedded engine on another, and into vLLM on two, by NCCL: bit-equal;
            a replica that is killed in a transfer ends the epoch alone
vllm        the engine contract and the other tests of vLLM, on CUDA
quickstart  trainer and embedded engine on a GPU each
quickstart_vllm     trainer and vLLM on a GPU each
quickstart_shards   two trainer ranks with half of the model each, vLLM on two GPUs

``--rehearse`` tries the same parts on the CPU, with Gloo; it proves nothing about GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gpu_smoke.parts import PYTEST, PYTHON, Part, main

_QUICKSTART = (*PYTHON, "benchmarks.gpu_smoke.quickstart")
# Triton's attention, the one that vLLM has for float32, would multiply in TF32 otherwise.
_EXACT = {"TRITON_F32_DEFAULT": "ieee"}
_VLLM = "tests/engine_vendor"
_PARTS: Mapping[str, Part] = {
    "ranks": Part(700, (*PYTEST, "tests/gpu/test_gpu_ranks.py"), devices=2),
    "weights": Part(500, (*PYTEST, "tests/gpu/test_gpu_weights.py"), None, 2, None, _EXACT),
    "vllm": Part(
        3600,  # about thirty starts of vLLM, which compiles and captures graphs at each
        (*PYTEST, _VLLM),
        # `make test-vllm` runs all of them on the CPU.
        (*PYTEST, f"{_VLLM}/test_contract.py", "-k", "qwen3 and greedy"),
        devices=2,
        package="vllm",
        environment=_EXACT,
    ),
    "quickstart": Part(200, (*_QUICKSTART, "nccl"), devices=2),
    "quickstart_vllm": Part(400, (*_QUICKSTART, "vllm"), devices=2, package="vllm"),
    "quickstart_shards": Part(400, (*_QUICKSTART, "shards"), devices=4, package="vllm"),
}


if __name__ == "__main__":
    main(__doc__, "gpu_smoke.day1", _PARTS)
