"""How staged weights get into vLLM's model: where, and when their memory is used again."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
import torch

from services.rollout.engines.vllm.worker import WeightWorker
from services.rollout.engines.vllm.worker_features import WorkerFeatures

TENSORS = {"a": torch.ones(2)}


class FakeNpu:
    """``torch.device("npu")``, which torch does not know without its package."""

    type = "npu"

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def __enter__(self) -> None:
        self._seen.append("npu begins")

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._seen.append("npu ends")


class Recording:
    """Stands for vLLM's model runner and for the staging."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen
        self.requests: dict[str, object] = {}
        self.fails = False

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._seen.append(f"loads {[name for name, _ in weights_iterator]}")
        if self.fails:
            raise RuntimeError("half-way")

    def get_model(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def staged(self, version: int, digest: str) -> Any:
        return SimpleNamespace(tensors=TENSORS)

    def release(self, staged: Any) -> None:
        self._seen.append("releases")


def worker_on(device: Any, recording: Recording) -> WeightWorker:
    worker: Any = WeightWorker()
    worker.device, worker.model_runner, worker.sluice_staging = device, recording, recording
    worker.sluice_features = WorkerFeatures(worker)
    return worker  # type: ignore[no-any-return]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    module = SimpleNamespace(synchronize=lambda: events.append("waits"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return events


def test_an_npu_loads_on_itself_and_has_its_copy_before_staging_is_used_again(
    seen: list[str],
) -> None:
    answer = worker_on(FakeNpu(seen), Recording(seen)).sluice_apply(3, "d")
    assert set(answer) == {"seconds"}
    assert seen == ["npu begins", "loads ['a']", "npu ends", "waits", "releases"]


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_elsewhere_vllm_chooses_the_place_itself(
    device: torch.device | None, seen: list[str]
) -> None:
    worker_on(device, Recording(seen)).sluice_apply(3, "d")
    assert seen == ["loads ['a']", "releases"]


def test_what_an_npu_finds_wrong_only_later_still_breaks_the_engine(
    seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a kernel failed")

    module = SimpleNamespace(synchronize=fail)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    answer = worker_on(FakeNpu(seen), Recording(seen)).sluice_apply(3, "d")
    assert answer["broken"]
    assert "a kernel failed" in str(answer["error"])
    assert "releases" not in seen


def test_a_reload_that_fails_half_way_releases_nothing(seen: list[str]) -> None:
    recording = Recording(seen)
    recording.fails = True
    assert worker_on(FakeNpu(seen), recording).sluice_apply(3, "d")["broken"]
    assert seen == ["npu begins", "loads ['a']", "npu ends"]
