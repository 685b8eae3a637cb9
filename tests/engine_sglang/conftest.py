"""These tests take SGLang, which `make test-sglang` installs; without it none is collected."""

from __future__ import annotations

from services.rollout.engines.sglang.client import installed_sglang

collect_ignore_glob = [] if installed_sglang() else ["test_*.py"]
