"""Traces of training steps by torch's profiler (`global_profiler.*`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from sluice.config.run import RunConfig
from sluice.errors import ConfigError

logger = logging.getLogger(__name__)


class StepProfiler:
    """The profiler of one rank: it writes a trace for each configured step.

    Args:
        rank: of the trainer.
        kind: of the rank's device, as torch names it; a GPU's kernels are traced too.

    Raises:
        ConfigError: the folder for the traces cannot be made.
    """

    def __init__(self, config: RunConfig, rank: int, kind: str) -> None:
        everywhere, own = config.global_profiler, config.actor_rollout_ref.actor.profiler
        is_on = own.enable and (own.tool or everywhere.tool) == "torch"
        is_traced = is_on and (own.all_ranks or rank in own.ranks)
        self._rank = rank
        self._steps = frozenset(everywhere.steps or ()) if is_traced else frozenset[int]()
        self._folder = Path(own.save_path or everywhere.save_path)
        self._activities = [ProfilerActivity.CPU]
        if kind == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        if self._steps:
            self._make_folder()

    @contextmanager
    def tracing(self, step: int) -> Generator[dict[str, float]]:
        """Trace the block if `step` is to be traced, and write ``step-S-rank-R.json.gz``.

        A block that raises has no trace. A profiler that fails is a warning: the block's work is
        done all the same.

        Yields:
            what then gets ``timing_s/start_profile`` and ``timing_s/stop_profile``, seconds.
        """
        times: dict[str, float] = {}
        began_s = time.perf_counter()
        profiler = self._started(step) if step in self._steps else None
        if profiler is None:
            yield times
            return
        times["timing_s/start_profile"] = time.perf_counter() - began_s
        try:
            yield times
        except BaseException:
            self._stop(profiler, step, is_kept=False)
            raise
        ended_s = time.perf_counter()
        self._stop(profiler, step, is_kept=True)
        times["timing_s/stop_profile"] = time.perf_counter() - ended_s

    def _started(self, step: int) -> profile | None:
        """Return a running profiler; ``None``: it cannot start."""
        try:
            profiler = profile(activities=self._activities)
            profiler.start()
        except Exception as error:  # noqa: BLE001 - a vendor's tracer; a lost trace ends no run
            self._warn(step, error)
            return None
        return profiler

    def _stop(self, profiler: profile, step: int, *, is_kept: bool) -> None:
        path = self._folder / f"step-{step}-rank-{self._rank}.json.gz"
        try:
            profiler.stop()
            if is_kept:
                profiler.export_chrome_trace(str(path))
                logger.info("trace of step %d: %s", step, path)
        except Exception as error:  # noqa: BLE001 - as above
            self._warn(step, error)

    def _warn(self, step: int, error: Exception) -> None:
        text = "no trace of step %d in %s: the profiler failed: %s"
        logger.warning(text, step, self._folder, error)

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"global_profiler.save_path = {self._folder}: the folder for traces cannot be made "
                f"({error}); name one that the trainer may write to, or set "
                "actor_rollout_ref.actor.profiler.enable=false"
            ) from error
