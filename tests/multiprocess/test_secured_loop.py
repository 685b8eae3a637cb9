"""A whole run whose processes speak mTLS with tokens, and who else may speak to it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.api.trainer.v1 import trainer_pb2
from sluice.client.run_monitor import RunMonitor
from sluice.config.addresses import peer_address
from sluice.config.schema.service import SecurityConfig
from sluice.errors import AccessDeniedError, DeadlineError, HandshakeError
from sluice.rpc.client import open_channel
from sluice.rpc.credentials import OPEN, client_credentials
from tests.support.certified import (
    CLIENT_TOKEN,
    SERVICE_TOKEN,
    client_key,
    mutual,
    write_pair,
    write_security,
)
from tests.support.small_run import ENDLESS, SLOWLY, WAIT_S, Assets, LiveRun, Record, run_to_end


@dataclass
class Seen:
    """What callers met while the run trained."""

    refused: dict[str, str] = field(default_factory=dict)
    health: dict[str, int] = field(default_factory=dict)
    status: subprocess.CompletedProcess[str] | None = None
    steering: str = ""


@pytest.fixture(scope="module")
def secured(
    small_assets: Assets, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Record, Seen, Path]:
    """One run, secured from end to end."""
    folder, seen = tmp_path_factory.mktemp("secured"), Seen()
    settings = write_security(folder)
    client = write_client(folder)

    async def look(run: LiveRun) -> None:
        await run.until_step(1)
        await knock(run, settings, seen)
        await look_and_steer(run, client, seen)
        await run.trainer.Stop(trainer_pb2.StopRequest(reason="seen enough"), timeout=240)

    record = run_to_end(
        small_assets,
        folder / "run",
        [
            *ENDLESS,
            SLOWLY,
            *(f"sluice.security.{key}={value}" for key, value in settings.items()),
        ],
        look,
    )
    return record, seen, folder


def write_client(folder: Path) -> dict[str, str]:
    certificate, key = write_pair(folder, "client", client_key())
    token_file = folder / "client.token"
    token_file.write_text(f"client {CLIENT_TOKEN}\n", encoding="ascii")
    token_file.chmod(0o600)
    return {
        "SLUICE_CERT_FILE": certificate,
        "SLUICE_KEY_FILE": key,
        "SLUICE_TOKEN_FILE": str(token_file),
    }


async def knock(run: LiveRun, settings: Mapping[str, str], seen: Seen) -> None:
    services = run.config.sluice
    trainer = peer_address(services.trainer.endpoint, "trainer")
    reward = peer_address(services.reward.endpoint, "reward")
    replica = (await run.status()).replicas[0].replica.address
    tokenless = client_credentials(SecurityConfig(**{**settings, "token_file": None}), {})
    callers = {"open": OPEN, "uncertified": mutual(None), "tokenless": tokenless}
    for name, credentials in callers.items():
        async with RunMonitor(trainer, reward, credentials=credentials) as monitor:
            await run.until(partial(is_answered, monitor, name, seen), f"an answer to {name}")
    for address in (trainer, reward, replica):
        async with open_channel(
            address, max_message_bytes=1 << 20, credentials=tokenless
        ) as channel:
            health: grpc.aio.UnaryUnaryCall = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=240
            )
            seen.health[address] = (await health).status


async def is_answered(monitor: RunMonitor, name: str, seen: Seen) -> bool:
    """Call the trainer; note how it refuses. A busy one may not answer in the call's time."""
    try:
        await monitor.snapshot()
    except (HandshakeError, AccessDeniedError) as error:
        seen.refused[name] = f"{type(error).__name__}: {error}"
    except DeadlineError:
        return False
    return True


async def look_and_steer(run: LiveRun, client: Mapping[str, str], seen: Seen) -> None:
    """As a client: the command that looks, and a call that would hold the run."""
    services = run.config.sluice
    addresses = (
        peer_address(services.trainer.endpoint, "trainer"),
        peer_address(services.reward.endpoint, "reward"),
    )
    words = ["status", services.run_dir, "--json"]
    seen.status = await asyncio.to_thread(sluice, words, client)
    credentials = client_credentials(services.security, client)
    async with RunMonitor(*addresses, credentials=credentials) as monitor:
        try:
            async with monitor.held(1.0):
                pass
        except AccessDeniedError as error:
            seen.steering = str(error)


def sluice(words: list[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sluice.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={**os.environ, **variables},
    )


def test_a_secured_run_trains_to_its_end(secured: tuple[Record, Seen, Path]) -> None:
    record = secured[0]
    assert record.end.exit_code == 0, record.lines[-20:]
    assert len(record.steps) > 0


def test_who_lacks_a_certificate_or_a_token_is_refused(
    secured: tuple[Record, Seen, Path],
) -> None:
    refused = secured[1].refused
    assert refused["open"].startswith("HandshakeError: trainer: failed while asking")
    assert refused["uncertified"].startswith("HandshakeError: trainer: failed while asking")
    assert refused["tokenless"].startswith("AccessDeniedError: trainer: refused while asking")


def test_health_of_every_service_answers_without_a_token(
    secured: tuple[Record, Seen, Path],
) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    assert list(secured[1].health.values()) == [serving] * 3


def test_a_client_may_look_and_not_steer(secured: tuple[Record, Seen, Path]) -> None:
    looked = secured[1].status
    assert looked is not None
    assert looked.returncode == 0, looked.stderr
    assert json.loads(looked.stdout)["replicas"]
    assert "a token of the role client may not call" in secured[1].steering
    assert "TrainerService/Pause" in secured[1].steering


def test_no_secret_is_in_any_file_or_line_of_the_run(secured: tuple[Record, Seen, Path]) -> None:
    record, _, _ = secured
    written = [file for file in record.run_dir.rglob("*") if file.is_file()]
    assert record.run_dir / "config.yaml" in written
    for secret in (SERVICE_TOKEN, CLIENT_TOKEN):
        assert not [file for file in written if secret.encode() in file.read_bytes()]
        assert not [line for _, line in record.lines if secret in line]
