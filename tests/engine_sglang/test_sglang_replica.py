"""A whole replica with SGLang: its process, weights over gRPC, generation through the client."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine_replica import check_replica

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]  # SGLang's own


async def test_a_replica_with_sglang_takes_weights_and_serves_clients(tmp_path: Path) -> None:
    await check_replica("sglang", tmp_path)
