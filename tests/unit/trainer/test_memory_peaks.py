"""Peaks of a device's memory by phase of a step, from a stand-in for a device that counts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.step_measures import MemoryPeaks
from services.trainer.loop.learner_thread import LearnerThread
from sluice.device.cpu import CpuDevice
from sluice.device.protocol import PeakMemory
from sluice.types import DataProgress
from tests.support.loop_world import World
from tests.support.metric_rows import without_row
from tests.support.tiny_policy import make_batch, make_config, save_model

GIB = 1 << 30


class CountingDevice(CpuDevice):
    """Its n-th span has a peak of n GiB; it takes note of each wait."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def synchronize(self) -> None:
        self.did.append("wait")

    def take_peak_memory(self) -> PeakMemory:  # type: ignore[override]
        self.did.append("take")
        number = self.did.count("take")
        return PeakMemory(number * GIB, (number + 1) * GIB)


def learner(folder: Path, device: CpuDevice, **actor: Any) -> Learner:
    return Learner(make_config(save_model(folder), **actor), ParallelContext(), 10, device)


def test_every_phase_of_an_update_has_its_peak_and_none_waits_for_the_device(
    tmp_path: Path,
) -> None:
    device = CountingDevice()
    one = learner(tmp_path, device, use_kl_loss=True)
    one.train_step(make_batch(), 1)
    taken = dict(one.peaks.take_metrics())
    whole = float(device.did.count("take"))
    assert taken.pop("perf/max_memory_allocated_gb") == whole
    assert taken.pop("perf/max_memory_reserved_gb") == whole + 1
    phases = [name.partition("/")[2] for name in sorted(taken, key=lambda name: taken[name])]
    assert phases == ["old_log_prob", "ref", "adv", "optimizer_step", "update_actor"]
    assert without_row(taken) == []
    # The seconds of a phase need a wait; peaks before and after an optimizer step need none.
    assert "take take" in " ".join(device.did)
    seconds = device.did.count("wait")
    one.train_step(make_batch(), 2)
    assert device.did.count("wait") == 2 * seconds


def test_peaks_of_phases_are_those_of_the_step_and_the_whole_is_since_the_start() -> None:
    device = CountingDevice()
    peaks = MemoryPeaks(device)
    assert peaks.take_metrics() == {}
    peaks.end_phase(None)  # loading
    peaks.end_phase("update_actor")
    peaks.end_phase("optimizer_step")
    peaks.end_phase("update_actor")
    assert peaks.take_metrics() == {
        "memory_gb/update_actor": 4.0,
        "memory_gb/optimizer_step": 3.0,
        "perf/max_memory_allocated_gb": 4.0,
        "perf/max_memory_reserved_gb": 5.0,
    }
    device.did.clear()
    peaks.end_phase("update_weights")
    assert peaks.take_metrics() == {
        "memory_gb/update_weights": 1.0,
        "perf/max_memory_allocated_gb": 4.0,
        "perf/max_memory_reserved_gb": 5.0,
    }


def test_a_device_whose_memory_torch_does_not_count_has_no_peaks(tmp_path: Path) -> None:
    one = learner(tmp_path, CpuDevice())
    one.train_step(make_batch(), 1)
    assert one.peaks.take_metrics() == {}


class Publishing:
    """Leader, snapshots and checkpoints of a rank that does nothing."""

    saves_in_background = False

    def freeze(self, version: int) -> None:
        """Nothing."""

    def begin_save(self, *_: object) -> None:
        """Nothing."""

    begin = finish = folder = begin_save

    def stop(self) -> None:
        """Nothing."""


async def test_publishing_and_saving_have_their_peaks() -> None:
    fake = cast("Any", Publishing())
    thread = LearnerThread(fake, fake, MemoryPeaks(CountingDevice()))
    await thread.freeze(1)
    await thread.save(1, DataProgress(0))
    taken = thread.take_memory_metrics()
    await thread.close()
    assert taken["memory_gb/update_weights"] == 1.0
    assert taken["memory_gb/save_checkpoint"] == 2.0


async def test_a_step_has_the_peaks_of_its_own_publication() -> None:
    world = World()
    world.register("a")
    await world.loop().run()
    for step in (1, 2, 3):
        assert world.recorded[f"step {step}"]["memory_gb/update_weights"] == step
        assert world.recorded[f"step {step}"]["perf/cpu_memory_used_gb"] > 0
