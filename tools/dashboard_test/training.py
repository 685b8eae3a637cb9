"""Processes of the project that the browser looks at: a quickstart that trains, and its page."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Self

from tools.commands import started
from tools.phases import PhaseError, until

HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title=1</script>"
HOSTILE_LINE = "a hostile line <script>document.title=1</script> \\u{1b}[31m"
ENVIRONMENT = "a world of the test"
HOSTILE_PROMPT = "A prompt that is followed by a hostile response"
_END_WITHIN_S = 90.0
_NO_TOKENS = "token_file: null"


class Training:
    """A quickstart in a process of its own, whose trainer serves the page; a context manager.

    Args:
        python: of an environment with the project.
        run_dir: where the run goes.
        log: gets the output.
        steps: of training.
    """

    def __init__(self, python: str, run_dir: Path, log: Path, steps: int) -> None:
        self.run_dir, self.report = run_dir, run_dir.absolute() / "report.html"
        self._python, self._log, self._steps = python, log, steps
        self._url_file = run_dir / "dashboard.url"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        settings = (
            f"trainer.total_training_steps={self._steps}",
            "trainer.test_freq=4",
            # The quickstart's own rate ends with hardly a mixed group left after 60 steps.
            "actor_rollout_ref.actor.optim.lr=4e-4",
            "sluice.dashboard.port=0",
        )
        quickstart = self._started("quickstart", "--run-dir", str(self.run_dir), *settings)
        self._process = self._stack.enter_context(quickstart)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def url(self, timeout_s: float) -> str:
        """Return the address of the page. Raises PhaseError."""

        def is_written() -> bool:
            if (code := self._process.poll()) is not None:
                raise PhaseError(f"the run ended with exit code {code}; see {self._log}")
            return self._url_file.is_file() and self._url_file.read_text().endswith("\n")

        until("the page's address", is_written, timeout_s=timeout_s)
        return self._url_file.read_text(encoding="utf-8").strip()

    def add_hostile_group(self) -> None:
        """Add a group as the reward service writes it, whose responses hold markup; one is an
        episode."""
        response = {"text": HOSTILE, "tokens": 9, "finish": "stop", "score": -1.0, "reward": -1.0}
        turn = {"text": HOSTILE, "tokens": 9, "read": HOSTILE, "seconds": {"environment": 0.25}}
        group = {
            "prompt_id": "hostile",
            "end": "filtered_all_wrong",
            "version": 0,
            "ended_at": 1.0,
            "prompt": HOSTILE_PROMPT,
            "environment": ENVIRONMENT,
            "responses": [response, {**response, "turns": [turn], "episode_end": "done"}],
        }
        file = self.run_dir / "samples" / "99999998.jsonl"
        file.write_text(json.dumps(group) + "\n", encoding="utf-8")

    def add_hostile_log_line(self) -> None:
        """Add a line to a service's log that holds markup and a control character."""
        with (self.run_dir / "logs" / "reward.log").open("a", encoding="utf-8") as log:
            log.write(HOSTILE_LINE.replace("\\u{1b}", "\x1b") + "\n")

    def wait(self, timeout_s: float) -> None:
        """Wait for the run's end. Raises PhaseError if it fails or lasts longer."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise PhaseError(f"the run did not end within {timeout_s:g} s") from error
        if code != 0:
            raise PhaseError(f"the run ended with exit code {code}; see {self._log}")

    @contextmanager
    def page_with_token(self, token: str, timeout_s: float) -> Iterator[str]:
        """Run `sluice dashboard` within the block, the run beside itself; yield its address.

        Args:
            token: one that the page requires from here on.
            timeout_s: seconds to wait for the address.
        """
        secret = self.run_dir / "page.token"
        secret.touch(mode=0o600)
        secret.write_text(f"{token}\n", encoding="utf-8")
        file = self.run_dir / "config.yaml"
        text = file.read_text(encoding="utf-8")
        if text.count(_NO_TOKENS) != 1:
            raise PhaseError(f"{file} does not hold {_NO_TOKENS!r} exactly once")
        named = f"token_file: {json.dumps(str(secret.absolute()))}"
        file.write_text(text.replace(_NO_TOKENS, named), encoding="utf-8")
        with self._started(
            "dashboard", str(self.run_dir), "--compare", str(self.run_dir)
        ) as process:
            until("sluice dashboard", self._url_file.is_file, timeout_s=timeout_s)
            yield self._url_file.read_text(encoding="utf-8").strip()
        if process.returncode != 0:
            raise PhaseError(f"sluice dashboard ended with exit code {process.returncode}")

    def _started(self, *arguments: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
        command = (self._python, "-m", "sluice.cli.main", *arguments)
        quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return started(command, self._log, quiet, ends_within_s=_END_WITHIN_S)
