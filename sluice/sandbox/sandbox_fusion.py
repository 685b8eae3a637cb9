"""A server of SandboxFusion as the sandbox: one request a run."""

from __future__ import annotations

import base64
import shlex
import time
from collections.abc import Mapping, Sequence

import msgspec

from sluice.concurrency.bounded_http import HttpFault, endpoint, post_until
from sluice.errors import SandboxUnavailableError
from sluice.json_objects import DECODE_ERRORS
from sluice.sandbox.run_result import MIB, NO_FILES, PYTHON, Limits, Result, SandboxEnd

KEY = "reward.sandbox_fusion.url"
MAX_ATTEMPTS = 3
_SERVER_SHARE = 0.95  # of the time; the rest is for the way
_FIRST_PAUSE_S = 1.0
_ANSWER_SHARE = 8  # JSON escapes a byte in up to six characters


class _Phase(msgspec.Struct):
    """What became of compiling, or of running."""

    status: str = ""
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class _ServerResponse(msgspec.Struct):
    status: str
    message: str = ""
    compile_result: _Phase | None = None
    run_result: _Phase | None = None


class SandboxFusionSandbox:
    """Runs programs on a server, which enforces the limits of time and memory.

    A server that has not answered within a run's time has failed, not the program.

    Args:
        url: as verl has it, with the path; it usually ends in ``/run_code``.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(self, url: str, limits: Limits) -> None:
        self._endpoint, self._limits = endpoint(url, key=KEY), limits

    def run(
        self,
        argv: Sequence[str],
        files: Mapping[str, str] = NO_FILES,
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> Result:
        """Run a program; see `Sandbox.run`. Input and output are text."""
        limits = limits or self._limits
        answer = self._ask(_request(argv, files, stdin, limits), limits)
        if answer.status not in {"Success", "Failed"} or answer.run_result is None:
            failed = answer.compile_result
            message = answer.message or (failed.stderr if failed else "") or "no message"
            raise SandboxUnavailableError(f"{self._endpoint}: {answer.status}: {message[:500]}")
        return _result(answer.run_result, limits)

    def _ask(self, request: Mapping[str, object], limits: Limits) -> _ServerResponse:
        try:
            raw = post_until(
                time.monotonic() + limits.wall_s,
                self._endpoint,
                msgspec.json.encode(request),
                {"Content-Type": "application/json", "Accept": "application/json"},
                attempts=MAX_ATTEMPTS,
                first_pause_s=_FIRST_PAUSE_S,
                timeout_s=limits.wall_s,
                max_response_bytes=_ANSWER_SHARE * limits.output_bytes + MIB,
            )
            return msgspec.json.decode(raw, type=_ServerResponse)
        except DECODE_ERRORS as error:
            raise SandboxUnavailableError(
                f"{self._endpoint}: no answer of SandboxFusion: {error}"
            ) from error
        except HttpFault as fault:
            raise SandboxUnavailableError(str(fault)) from fault


def _request(
    argv: Sequence[str], files: Mapping[str, str], stdin: bytes, limits: Limits
) -> Mapping[str, object]:
    is_python = len(argv) == 2 and argv[0] == PYTHON and argv[1] in files
    seconds = _SERVER_SHARE * limits.wall_s
    return {
        "language": "python" if is_python else "bash",
        "code": files[argv[1]] if is_python else shlex.join(argv),
        "files": {
            name: base64.b64encode(text.encode(errors="replace")).decode()
            for name, text in files.items()
        },
        "fetch_files": [],
        "stdin": stdin.decode(errors="replace"),
        "compile_timeout": seconds,
        "run_timeout": seconds,
        "memory_limit_MB": limits.memory_bytes // MIB,
    }


def _result(run: _Phase, limits: Limits) -> Result:
    stdout, stderr = ((text or "").encode(errors="replace") for text in (run.stdout, run.stderr))
    if run.status == "TimeLimitExceeded":
        end = SandboxEnd.TIMED_OUT
    elif len(stdout) + len(stderr) > limits.output_bytes:
        end = SandboxEnd.OUTPUT_TOO_LARGE
    elif run.status == "Finished":
        end = SandboxEnd.FINISHED
    else:
        raise SandboxUnavailableError(f"SandboxFusion: the run ended as {run.status!r}")
    stdout = stdout[: limits.output_bytes]
    stderr = stderr[: limits.output_bytes - len(stdout)]
    return Result(end, run.return_code if end is SandboxEnd.FINISHED else None, stdout, stderr)
