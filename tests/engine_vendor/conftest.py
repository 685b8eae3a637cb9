"""These tests take vLLM or SGLang, which `make test-vllm` and `make test-sglang` install; without
one none is collected.
"""

from __future__ import annotations

from tests.engine_vendor.vendor import VENDOR

collect_ignore_glob = [] if VENDOR else ["test_*.py"]
