"""Try sluice on one GPU of 80 GB, without a network, in under ten minutes; `make gpu-smoke`.

Each part is a process of its own with a deadline, so that one that fails ends no other. The last
line is one JSON object, which is also written to ``report.json``, with date and device:

passed, failed, missing  the parts; what they printed is in ``NAME.log``, and why one was left out
            in ``missing``
rules       tests/gpu: learner in float32 and bfloat16 against the CPU in float32, the experts'
            grouped products, the engine contract, memory of the head
updates     updates of random models of three shapes: tokens/s, model FLOPs over the GPU's peak,
            bytes at the peak over what `sluice plan` predicts
engine      tokens/s of the embedded engine and of transformers, seconds to the first token, ms
            without a token for an update
quickstart  held-out accuracy before and after, seconds

``--rehearse`` tries the same parts on the CPU, with tiny models; its figures mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gpu_smoke.parts import PYTEST, PYTHON, Part, main

_ENGINE = (*PYTHON, "benchmarks.engine", "--sequences", "128")
_PARTS: Mapping[str, Part] = {
    "rules": Part(170, (*PYTEST, "tests/gpu")),
    "updates": Part(
        210,
        (*PYTHON, "benchmarks.gpu_smoke.update", "1.7b", "8b", "30b-a3b"),
        (*PYTHON, "benchmarks.gpu_smoke.update", "tiny", "tiny-experts", "--no-compile"),
    ),
    "engine": Part(
        110,
        (
            *_ENGINE,
            *("--device", "cuda", "--models", "0.5b", "--new-tokens", "128"),
            *("--repeats", "2", "--updates", "3"),
        ),
        (*_ENGINE, "--models", "tiny", "--new-tokens", "16", "--repeats", "1", "--updates", "1"),
    ),
    "quickstart": Part(110, (*PYTHON, "benchmarks.gpu_smoke.quickstart", "one_gpu")),
}


if __name__ == "__main__":
    main(__doc__, "gpu_smoke", _PARTS)
