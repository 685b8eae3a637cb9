"""What rank 0 finds out first."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from services.trainer import leader
from sluice.config.loading.loader import load_config
from sluice.errors import ConfigError

WAIT_S = 20.0


async def test_a_taken_port_is_found_before_anything_is_awaited_or_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(leader, "_load", lambda *given: loaded.append(given))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config = load_config(
            None,
            [
                f"sluice.trainer.endpoint.port={port}",
                "sluice.reward.endpoint.port=1",  # nobody answers there
                "actor_rollout_ref.rollout.top_p=0.9",
            ],
        )
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(ExceptionGroup) as caught,
        ):
            async with asyncio.timeout(WAIT_S):
                await leader.run_leader(config)
    assert caught.group_contains(ConfigError, match=f"port {port} on 127.0.0.1 is in use")
    assert loaded == []
    assert "top_p = 0.9 truncate sampling" in caplog.text
