"""The start of rank 0: the port it reserves, and the warning about truncated sampling."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from services.trainer import leader
from services.trainer.start import sampling_notice
from sluice.config.loading.loader import load_config
from sluice.errors import ConfigError
from sluice.rpc.ports import bound_socket

WAIT_S = 20.0
HOST = "127.0.0.1"
ROLLOUT = "actor_rollout_ref.rollout"
WEIGHTS = "algorithm.rollout_correction.rollout_is=token"
BEHAVIOR = "actor_rollout_ref.actor.use_rollout_log_probs=true"


def test_a_reserved_port_answers_no_peer_and_is_served_once_it_is_released() -> None:
    with socket.create_server((HOST, 0)) as server:
        port = int(server.getsockname()[1])
    with bound_socket(HOST, port) as reserved:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=5)
        reserved.close()
        with socket.create_server((HOST, port)):
            pass


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


def notice(*overrides: str) -> str | None:
    return sampling_notice(load_config(None, overrides))


@pytest.mark.parametrize("correction", [(), (WEIGHTS,), (BEHAVIOR,)])
def test_whole_sampling_needs_no_warning(correction: tuple[str, ...]) -> None:
    assert notice(*correction) is None


def test_truncated_validation_needs_no_warning() -> None:
    assert notice(WEIGHTS, f"{ROLLOUT}.val_kwargs.top_p=0.7") is None


@pytest.mark.parametrize(
    ("cut", "named"), [("top_p=0.9", "top_p = 0.9"), ("top_k=20", "top_k = 20")]
)
@pytest.mark.parametrize(
    ("correction", "effect"),
    [
        (WEIGHTS, "importance weights (rollout_correction.rollout_is = token) are below 1"),
        (BEHAVIOR, "ratio (use_rollout_log_probs = true) starts below 1"),
        ("trainer.seed=0", "old logprobs are recomputed over all tokens"),
    ],
)
def test_truncated_training_sampling_is_reported_with_its_effect_and_a_remedy(
    cut: str, named: str, correction: str, effect: str
) -> None:
    text = notice(f"{ROLLOUT}.{cut}", correction) or ""
    assert named in text
    assert effect in text
    assert "set top_p=1 and top_k=-1" in text


def test_both_cuts_are_named() -> None:
    text = notice(f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=5") or ""
    assert "top_p = 0.9 and top_k = 5" in text
