"""`sluice serve-openai`: who may use it, and what it needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.cli.policy.serve_openai import KEY_VARIABLE
from tests.support.threaded_run import folder_of, threaded_run
from tests.support.token_replica import TokenReplica


def refusal(*arguments: str) -> str:
    return str(CliRunner().invoke(commands, ["serve-openai", *arguments]).exception)


def test_an_open_interface_without_a_key_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert "--host 0.0.0.0: others could use it; give --key-file" in refusal("--host", "0.0.0.0")
    absent = refusal("--host", "0.0.0.0", "--key-file", str(tmp_path / "none"))
    assert "--key-file" in absent
    assert "does not exist" in absent
    monkeypatch.setenv(KEY_VARIABLE, "short")
    assert f"{KEY_VARIABLE}: a token of 5 characters" in refusal()


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1"])
def test_a_deadline_that_is_no_time_is_refused(seconds: str) -> None:
    assert "--deadline" in refusal("--deadline", seconds)


def test_without_its_package_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "sluice.openai_server.web_app", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert "pip install 'sluice[openai-front]'" in refusal()


def test_it_serves_until_a_signal_ends_it(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    with threaded_run(TokenReplica()) as address:
        words = ["serve-openai", str(folder_of(address, tmp_path)), "--port", "0"]
        with subprocess.Popen(
            [sys.executable, "-m", "sluice.cli.main", *words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split(" at ")[1].strip()
                with urllib.request.urlopen(f"{url}/models", timeout=60) as answer:
                    assert b'"id":"policy"' in answer.read()
                # The run's prompts and responses have 512 + 512 tokens.
                asked = {"model": "policy", "prompt": "hi", "max_tokens": 100_000}
                with pytest.raises(urllib.error.HTTPError, match="400"):
                    urllib.request.urlopen(f"{url}/completions", json.dumps(asked).encode(), 20)
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
            finally:
                process.kill()
