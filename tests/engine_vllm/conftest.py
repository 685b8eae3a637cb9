"""These tests take vLLM, which `make test-vllm` installs; without it none is collected."""

from __future__ import annotations

from services.rollout.engines.vllm.client import installed_vllm

collect_ignore_glob = [] if installed_vllm() else ["test_*.py"]
