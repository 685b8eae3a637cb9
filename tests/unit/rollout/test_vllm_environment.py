"""What vLLM's processes find in their environment."""

from __future__ import annotations

import pytest

from services.rollout.engines.vllm.client import engine_environment
from services.rollout.engines.vllm.settings import visible_environment
from sluice.errors import ConfigError

_CUDA, _START = "CUDA_VISIBLE_DEVICES", "VLLM_WORKER_MULTIPROC_METHOD"


def _environment(given: dict[str, str], *, on_cpu: bool = False) -> dict[str, str]:
    return engine_environment(given, on_cpu=on_cpu, threads=2, batch_invariant=False)


def test_what_is_set_already_stays() -> None:
    on_cpu = _environment({"OMP_NUM_THREADS": "5"}, on_cpu=True)
    assert on_cpu["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "OMP_NUM_THREADS" not in on_cpu
    assert _environment({}, on_cpu=True)["OMP_NUM_THREADS"] == "2"


def test_on_a_device_processes_are_started_anew_and_forked_ones_refused() -> None:
    assert _environment({})[_START] == "spawn"
    assert _START not in _environment({_START: "spawn"})
    with pytest.raises(ConfigError, match=f"{_START}=fork: .* set it to spawn, or unset it"):
        _environment({_START: "fork"})


def test_on_the_cpu_vllm_sees_to_that_itself() -> None:
    assert _START not in _environment({_START: "fork"}, on_cpu=True)


@pytest.mark.parametrize(
    ("name", "count", "visible", "expected"),
    [
        ("cuda:2", 1, None, "2"),
        ("cuda:2", 2, None, "2,3"),
        ("cuda:1", 2, "4,5,7", "5,7"),
        ("cuda:0", 1, "GPU-aa,GPU-bb", "GPU-aa"),
    ],
)
def test_the_named_device_is_the_first_that_vllm_sees(
    name: str, count: int, visible: str | None, expected: str
) -> None:
    given = {} if visible is None else {_CUDA: visible}
    assert visible_environment(name, _CUDA, count, given) == {_CUDA: expected}


@pytest.mark.parametrize("name", [None, "auto", "cuda", "cpu"])
def test_without_an_index_nothing_is_hidden(name: str | None) -> None:
    assert visible_environment(name, _CUDA, 2, {_CUDA: "3,4"}) == {}


def test_too_few_devices_are_refused_with_the_keys_to_change() -> None:
    with pytest.raises(
        ConfigError,
        match=r"device=cuda:1: the engine takes 2 .*CUDA_VISIBLE_DEVICES=0,1 hands out 2; correct",
    ):
        visible_environment("cuda:1", _CUDA, 2, {_CUDA: "0,1"})
