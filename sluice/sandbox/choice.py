"""The configured sandbox, which may be a command of the user's, and whether it works here."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from sluice.config.schema.reward import SandboxFusionConfig
from sluice.config.schema.service import BackendKey, SandboxConfig
from sluice.errors import ConfigError, SandboxUnavailableError
from sluice.sandbox.bubblewrap import PROBE_LIMITS, BubblewrapSandbox, with_remedy
from sluice.sandbox.contained import Containment, ProcessSandbox
from sluice.sandbox.run_result import MIB, PYTHON, Limits
from sluice.sandbox.sandbox_fusion import SandboxFusionSandbox

VARIABLE = "SLUICE_SANDBOX"
"""The environment variable that carries the configuration to the workers of environments."""
NO_SANDBOX = (
    "programs need a sandbox, and none is configured; set sluice.sandbox.backend=bubblewrap "
    "(pip install 'sluice[sandbox]'), or command, or reward.sandbox_fusion.url"
)
_WORD = "sluice"
_NO_FUSION = SandboxFusionConfig()


FAILURE_CODE = 125
"""Exit code of the command if it has failed itself, as Docker's."""
_INHERITED = ("PATH", "HOME", "LANG", "XDG_RUNTIME_DIR", "DOCKER_HOST")


class CommandSandbox(ProcessSandbox):
    """Runs programs through a command, which has to contain them.

    The time limit and that of the output hold here; for the others the command's words may hold
    ``{wall_s}``, ``{cpu_s}``, ``{memory_mb}``, ``{tmp_mb}``, ``{processes}`` and ``{open_files}``.
    ``{folder}`` is a folder of this machine with the program's files, which the command has to
    make the program's working folder. The program's command line follows as further words. At a
    limit the command gets SIGTERM, and a second later SIGKILL, with its session.

    Args:
        command: program and arguments.
        limits: of runs that name none.
        python: interpreter inside; ``None``: ``python3``.

    Raises:
        SandboxUnavailableError: the command is not there.
    """

    def __init__(self, command: Sequence[str], limits: Limits, python: str | None = None) -> None:
        if not command or shutil.which(command[0]) is None:
            program = command[0] if command else "[]"
            raise SandboxUnavailableError(
                f"sluice.sandbox.command: {program} cannot be run; give the path of your sandbox's "
                "program and its arguments"
            )
        super().__init__(limits)
        self._command, self._python = list(command), python or PYTHON

    @contextmanager
    def command(
        self, argv: Sequence[str], files: Mapping[str, str], limits: Limits
    ) -> Iterator[Containment]:
        """Give the command line of a program; its folder is there for the length of the block."""
        with tempfile.TemporaryDirectory(prefix="sluice-sandbox-") as folder:
            for name, text in files.items():
                (Path(folder) / name).write_text(text, encoding="utf-8", errors="replace")
            values = {
                "folder": folder,
                "wall_s": f"{limits.wall_s:g}",
                "cpu_s": str(limits.whole_cpu_s),
                "memory_mb": str(limits.memory_bytes // MIB),
                "tmp_mb": str(limits.tmp_bytes // MIB),
                "processes": str(limits.processes),
                "open_files": str(limits.open_files),
            }
            inner_command = [self._python if argv[0] == PYTHON else argv[0], *argv[1:]]
            yield Containment(
                [*(_fill_placeholders(word, values) for word in self._command), *inner_command],
                failure_code=FAILURE_CODE,
                environment={name: os.environ[name] for name in _INHERITED if name in os.environ},
            )


def _fill_placeholders(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def backend_of(
    sandbox: SandboxConfig, fusion: SandboxFusionConfig = _NO_FUSION
) -> BackendKey | None:
    """Return which sandbox is configured; ``None``: none, so programs are refused."""
    if sandbox.backend is None and fusion.url is not None:
        return "sandbox_fusion"
    return sandbox.backend


def limits_of(sandbox: SandboxConfig) -> Limits:
    """Return the limits of a run."""
    return Limits(
        memory_bytes=sandbox.memory_mb * MIB,
        tmp_bytes=sandbox.tmp_mb * MIB,
        processes=sandbox.processes,
    )


def process_sandbox(sandbox: SandboxConfig) -> ProcessSandbox:
    """Return the configured sandbox of this machine.

    Raises:
        ConfigError: none is configured.
        SandboxUnavailableError: it cannot work here.
    """
    if sandbox.backend == "bubblewrap":
        return BubblewrapSandbox(limits_of(sandbox), sandbox.python)
    if sandbox.backend == "command":
        return CommandSandbox(sandbox.command, limits_of(sandbox), sandbox.python)
    raise ConfigError(
        f"the sandbox is {sandbox.backend or 'not set'}, but a program that keeps its state, such "
        "as the Python tool, needs one on this machine; set sluice.sandbox.backend=bubblewrap or "
        "command"
    )


def configured_sandbox(
    sandbox: SandboxConfig, fusion: SandboxFusionConfig = _NO_FUSION
) -> ProcessSandbox | SandboxFusionSandbox:
    """Return the configured sandbox.

    Raises:
        ConfigError: none is configured, or it lacks a setting.
        SandboxUnavailableError: it cannot work here.
    """
    backend = backend_of(sandbox, fusion)
    if backend is None:
        raise ConfigError(NO_SANDBOX)
    if backend != "sandbox_fusion":
        return process_sandbox(sandbox)
    if fusion.url is None:
        raise ConfigError(
            "sluice.sandbox.backend = sandbox_fusion needs a server; set reward.sandbox_fusion.url"
        )
    limits = replace(limits_of(sandbox), memory_bytes=fusion.memory_limit_mb * MIB)
    return SandboxFusionSandbox(fusion.url, limits)


def proven_sandbox(
    sandbox: SandboxConfig, fusion: SandboxFusionConfig = _NO_FUSION
) -> ProcessSandbox | SandboxFusionSandbox:
    """Return the configured sandbox, once it has run a program.

    Raises:
        ConfigError: none is configured.
        SandboxUnavailableError: it does not work here; the text ends with the remedy.
    """
    chosen = configured_sandbox(sandbox, fusion)
    limits = PROBE_LIMITS
    try:
        result = chosen.run([PYTHON, "probe.py"], {"probe.py": f"print('{_WORD}')"}, limits=limits)
    except SandboxUnavailableError as error:
        if isinstance(chosen, SandboxFusionSandbox):
            text = f"{error}; start the server, or correct reward.sandbox_fusion.url"
            raise SandboxUnavailableError(text) from error
        raise with_remedy(error) from error
    if result.stdout.strip() != _WORD.encode():
        stderr_text = result.stderr[-500:].decode(errors="replace").strip() or "nothing"
        raise SandboxUnavailableError(
            f"the sandbox ({backend_of(sandbox, fusion)}) did not run a Python program of one line "
            f"({result.end}, exit code {result.exit_code}; it said {stderr_text}); see "
            "sluice.sandbox.python"
        )
    return chosen


def as_variable(sandbox: SandboxConfig, fusion: SandboxFusionConfig) -> Mapping[str, str]:
    """Return the environment variable that hands the configuration to a worker."""
    sandbox = msgspec.structs.replace(sandbox, backend=backend_of(sandbox, fusion))
    return {VARIABLE: msgspec.json.encode(sandbox).decode()}


def inherited_config() -> SandboxConfig:
    """Return the configuration that this process was given; by default bubblewrap's."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return SandboxConfig(backend="bubblewrap")
    config = msgspec.json.decode(text, type=SandboxConfig)
    return config if config.backend else msgspec.structs.replace(config, backend="bubblewrap")
