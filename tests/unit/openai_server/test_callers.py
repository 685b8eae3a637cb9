"""Keys identify the callers of the front, and no caller takes all capacity."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from sluice.errors import ExhaustedError
from sluice.openai_server.web_app import KEYLESS, CallerQuotas, OpenAIServerSettings
from sluice.security.token_file import TokenFile
from tests.support.http_front import HttpFront, http_front
from tests.support.token_replica import TokenReplica, token_replicas, until

COMPLETION = "/v1/completions"
FIRST, SECOND = "first-key-of-the-test", "second-key-of-the-test"


def keys(folder: Path) -> TokenFile:
    file = folder / "keys"
    file.write_text(f"{FIRST}\nclient {SECOND}\n")
    return TokenFile(file, "--key-file")


async def posted(front: HttpFront, key: str, n: int) -> tuple[int, Any]:
    body, shown = {"model": "policy", "prompt": "a", "n": n}, {"Authorization": f"Bearer {key}"}
    url = f"{front.base_url}{COMPLETION}"
    async with front.session.post(url, json=body, headers=shown) as answer:
        return answer.status, await answer.json()


async def test_one_key_cannot_take_the_choices_of_another(tmp_path: Path) -> None:
    replica = TokenReplica(hangs_after=0)
    settings = OpenAIServerSettings(keys=keys(tmp_path), max_choices=4, max_key_choices=2)
    async with (
        token_replicas(replica) as addresses,
        http_front(*addresses, settings=settings) as front,
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
    ):
        waiting = tasks.create_task(posted(front, FIRST, 2))
        await until(lambda: bool(replica.requests))
        status, refused = await posted(front, FIRST, 1)
        assert (status, refused["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "--max-key-choices" in refused["error"]["message"]
        assert FIRST not in refused["error"]["message"]
        replica.hangs_after = None
        assert (await posted(front, SECOND, 2))[0] == 200
        assert (await posted(front, SECOND, 3))[0] == 400  # never, so there is nothing to wait for
        waiting.cancel()


def test_a_caller_is_a_digest_of_its_key(tmp_path: Path) -> None:
    callers = CallerQuotas(keys(tmp_path), 4, 2)
    names = [callers.name(f"{scheme} {FIRST}") for scheme in ("Bearer", "bearer")]
    names.append(callers.name(f"Bearer {SECOND}"))
    assert names[0] == names[1] != names[2]
    assert FIRST not in str(names[0])
    for unknown in ("", FIRST, "Bearer ", f"Bearer {FIRST}x", f"Basic {FIRST}"):
        assert callers.name(unknown) is None
    assert CallerQuotas(None, 4, 2).name("") == KEYLESS


def test_all_callers_together_have_a_limit_too(tmp_path: Path) -> None:
    callers = CallerQuotas(keys(tmp_path), 3, 2)
    with callers.generating("first", 2):
        with pytest.raises(ExhaustedError, match="--max-choices"), callers.generating("second", 2):
            pass
        with callers.generating("second", 1):
            pass
    with callers.generating("second", 2):
        pass


def test_without_keys_the_limit_of_one_key_binds_nobody() -> None:
    callers = CallerQuotas(None, 3, 2)
    assert callers.limit == (3, "--max-choices")
    with callers.generating(KEYLESS, 3):
        pass
