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

        A block that raises has no trace. A trace that cannot be written is a warning.

        Yields:
            what then gets ``timing_s/start_profile`` and ``timing_s/stop_profile``, seconds.
        """
        times: dict[str, float] = {}
        if step not in self._steps:
            yield times
            return
        began_s = time.perf_counter()
        profiler = profile(activities=self._activities)
        profiler.start()
        times["timing_s/start_profile"] = time.perf_counter() - began_s
        try:
            yield times
        except BaseException:
            profiler.stop()
            raise
        ended_s = time.perf_counter()
        profiler.stop()
        path = self._folder / f"step-{step}-rank-{self._rank}.json.gz"
        try:
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            logger.warning("the trace of step %d cannot be written to %s: %s", step, path, error)
        else:
            logger.info("trace of step %d: %s", step, path)
        times["timing_s/stop_profile"] = time.perf_counter() - ended_s

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"global_profiler.save_path = {self._folder}: the folder for traces cannot be made "
                f"({error}); name one that the trainer may write to, or set "
                "actor_rollout_ref.actor.profiler.enable=false"
            ) from error
