"""A whole replica with vLLM: its process, weights over gRPC, generation through the client."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine_replica import check_replica

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]  # vLLM's own


async def test_a_replica_with_vllm_takes_weights_and_serves_clients(tmp_path: Path) -> None:
    await check_replica("vllm", tmp_path)
