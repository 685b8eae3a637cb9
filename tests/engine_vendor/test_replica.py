"""A whole replica with the vendor's engine: its process, weights over gRPC, generation through the
client.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_vendor.vendor import VENDOR
from tests.support.engine_replica import check_replica

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]  # the vendor's own


async def test_a_replica_takes_weights_and_serves_clients(tmp_path: Path) -> None:
    await check_replica(str(VENDOR), tmp_path)
