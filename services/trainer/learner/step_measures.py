"""Measure a training step: seconds and memory by phase, operations, and traces on request."""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Generator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from sluice.algorithm.episodes import follows_prompt, path_length, training_paths
from sluice.config.memory.shape import ModelShape, causal_pairs
from sluice.config.run import RunConfig
from sluice.device.protocol import Device
from sluice.errors import ConfigError
from sluice.types import TrainBatch

logger = logging.getLogger(__name__)

_GIB = float(1 << 30)


class MemoryPeaks:
    """Memory peaks of a rank's device; empty on devices without counters (the CPU).

    The owner's thread ends phases, without waiting for the device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._allocated = self._reserved = 0
        self._phases: dict[str, int] = {}

    def end_phase(self, name: str | None) -> None:
        """Count the peak since the last call for phase `name`; ``None`` counts it for no phase."""
        peak = self._device.take_peak_memory()
        if peak is None:
            return
        self._allocated = max(self._allocated, peak.allocated_bytes)
        self._reserved = max(self._reserved, peak.reserved_bytes)
        if name is not None:
            self._phases[name] = max(self._phases.get(name, 0), peak.allocated_bytes)

    def empty_cache(self) -> None:
        """Return memory that torch caches to the device's driver."""
        self._device.empty_cache()

    def take_metrics(self) -> Mapping[str, float]:
        """Return ``perf/max_memory_*_gb`` since the start and ``memory_gb/<phase>`` since the last
        call, in GiB; empty before a phase has ended.
        """
        if not self._allocated:
            return {}
        phases, self._phases = self._phases, {}
        return {
            **{f"memory_gb/{name}": size / _GIB for name, size in phases.items()},
            "perf/max_memory_allocated_gb": self._allocated / _GIB,
            "perf/max_memory_reserved_gb": self._reserved / _GIB,
        }


class PhaseTimer:
    """Measures the seconds of an update's phases, by name, and memory peaks.

    Args:
        device: synchronized at the end of each phase.
        peaks: notified of the same phases.
    """

    def __init__(self, device: Device, peaks: MemoryPeaks) -> None:
        self._device, self._peaks = device, peaks
        self._last_s = self._now_s()
        self.seconds: dict[str, float] = {}
        peaks.end_phase(None)

    def end_phase(self, name: str, *, shown: bool = True) -> None:
        """Add the seconds since the last call to phase `name`; drop them if not shown."""
        now_s = self._now_s()
        if shown:
            self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._last_s
        self._peaks.end_phase(name if shown else None)
        self._last_s = now_s

    def _now_s(self) -> float:
        # Kernels run asynchronously: without this, a phase's time would go to a later phase.
        self._device.synchronize()
        return time.perf_counter()


def update_flops(shape: ModelShape, batch: TrainBatch, skipped: Container[int]) -> float:
    """Return the operations of a forward and backward pass over a batch's rows.

    With packing, a prompt counts once per group, and tokens that an episode reads count in each of
    its paths. Images do not count.

    Args:
        skipped: numbers of rows that are left out.
    """
    numbers = count()
    total = 0.0
    for group in batch.groups:
        rollouts = [rollout for rollout in group.rollouts if next(numbers) not in skipped]
        labels = sum(rollout.num_tokens for rollout in rollouts)
        paths = [(r.turns, path) for r in rollouts for path in training_paths(r.turns)]
        continuing = [path_length(*path) for path in paths if follows_prompt(*path)]
        alone = [path_length(*path) for path in paths if not follows_prompt(*path)]
        prompt = int(group.prompt_token_ids.size) if continuing else 0
        if labels:
            pairs = causal_pairs(prompt) + sum(n * prompt for n in continuing)
            pairs += sum(causal_pairs(n) for n in (*continuing, *alone))
            total += shape.training_flops(prompt + sum(continuing) + sum(alone), labels, pairs)
    return total


class StepProfiler:
    """The profiler of one rank: it writes a trace for each configured step.

    Args:
        kind: torch's name of the device type; a GPU's kernels are traced too.

    Raises:
        ConfigError: the folder for the traces cannot be made.
    """

    def __init__(self, config: RunConfig, rank: int, kind: str) -> None:
        profiler, actor_profiler = config.global_profiler, config.actor_rollout_ref.actor.profiler
        is_on = actor_profiler.enable and (actor_profiler.tool or profiler.tool) == "torch"
        is_traced = is_on and (actor_profiler.all_ranks or rank in actor_profiler.ranks)
        self._rank = rank
        self._steps = frozenset(profiler.steps or ()) if is_traced else frozenset[int]()
        self._folder = Path(actor_profiler.save_path or profiler.save_path)
        self._activities = [ProfilerActivity.CPU]
        if kind == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        if self._steps:
            self._make_folder()

    @contextmanager
    def tracing(self, step: int) -> Generator[dict[str, float]]:
        """Trace the block if `step` is to be traced, and write ``step-S-rank-R.json.gz``.

        A block that raises has no trace. A failure of the profiler is only a warning.

        Yields:
            a dictionary that later gets ``timing_s/start_profile`` and ``timing_s/stop_profile``,
            seconds.
        """
        times: dict[str, float] = {}
        began_s = time.perf_counter()
        profiler = self._start_profiler(step) if step in self._steps else None
        if profiler is None:
            yield times
            return
        times["timing_s/start_profile"] = time.perf_counter() - began_s
        try:
            yield times
        except BaseException:
            self._stop_profiler(profiler, step, is_kept=False)
            raise
        ended_s = time.perf_counter()
        self._stop_profiler(profiler, step, is_kept=True)
        times["timing_s/stop_profile"] = time.perf_counter() - ended_s

    def _start_profiler(self, step: int) -> profile | None:
        """Return a running profiler; ``None`` if it cannot start."""
        try:
            profiler = profile(activities=self._activities)
            profiler.start()
        except Exception as error:  # noqa: BLE001 - a vendor's tracer; a lost trace ends no run
            self._warn(step, error)
            return None
        return profiler

    def _stop_profiler(self, profiler: profile, step: int, *, is_kept: bool) -> None:
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
