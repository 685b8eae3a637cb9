"""Containers of a machine that see the same devices divide them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.errors import ConfigError
from sluice.launch import container
from sluice.launch.container import SHARED_DEVICES_VARIABLE, services_of
from sluice.launch.network_layout import Kind, network_settings
from sluice.launch.service_spec import ServiceSpec
from sluice.launch.shared_run import SharedRun
from sluice.service_contract import CONFIG_NAME

GPUS, NPUS = "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"
TWO_EACH = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
)


class Machine:
    """A run's folder on it, and one launcher in each container."""

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        self.config = load_config(
            None, [*network_settings(), f"sluice.run_dir={folder}", *overrides]
        )
        self.file = folder / CONFIG_NAME
        write_config(self.config, self.file)
        self._folder = folder
        SharedRun(folder).begin(folder / "checkpoints")
        self.runs: list[SharedRun] = []

    def end(self) -> None:
        """End all containers."""
        while self.runs:
            self.runs.pop().release()

    def start(self, kind: Kind) -> tuple[ServiceSpec, ...]:
        self.runs.append(SharedRun(self._folder))
        return services_of(kind, self.config, self.file, self.runs[-1])


@pytest.fixture(autouse=True)
def containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "own_address", lambda *_: "10.0.0.9")
    monkeypatch.setattr("sluice.device.host.is_cpu_torch", lambda: False)
    monkeypatch.setenv(NPUS, "")
    monkeypatch.setenv(SHARED_DEVICES_VARIABLE, "all")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def make(*overrides: str) -> Machine:
        made.append(Machine(tmp_path, overrides))
        return made[-1]

    yield make
    for each in made:
        each.end()


def on(kind: str, ranks: int, *overrides: str) -> list[str]:
    device = (f"trainer.device={kind}", f"sluice.rollout.device={kind}")
    return [*device, f"trainer.n_gpus_per_node={ranks}", *overrides]


@pytest.mark.parametrize(("kind", "variable"), [("cuda", GPUS), ("npu", NPUS)])
def test_ranks_take_the_first_devices_and_each_replica_claims_the_next(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch, kind: str, variable: str
) -> None:
    monkeypatch.setattr("sluice.device.host.has_torch_npu", lambda: variable == NPUS)
    monkeypatch.setenv(variable, "0,1,2,3,4,5,6")
    run = machine(*on(kind, 2, *TWO_EACH))
    seen = [spec.environment[variable] for spec in run.start("trainer")]
    seen += [run.start("rollout")[0].environment[variable] for _ in range(2)]
    assert seen == ["0", "1", "2,3", "4,5"]
    with pytest.raises(
        ConfigError, match=r"have place for 2 replica\(s\) of 2, which have claimed"
    ):
        run.start("rollout")


def test_the_devices_of_a_container_that_ended_are_those_of_the_next(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPUS, "0,1,2")
    run = machine(*on("cuda", 1))
    first, second = (run.start("rollout")[0].environment[GPUS] for _ in range(2))
    assert (first, second) == ("1", "2")
    run.runs.pop(0).release()  # its process ends
    assert run.start("rollout")[0].environment[GPUS] == "1"


def test_a_run_divides_the_devices_that_it_is_given(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(GPUS, raising=False)
    monkeypatch.setenv(SHARED_DEVICES_VARIABLE, "4,6")
    run = machine(*on("cuda", 1))
    assert run.start("trainer")[0].environment[GPUS] == "4"
    assert run.start("rollout")[0].environment[GPUS] == "6"


def test_too_few_devices_end_the_trainer_with_those_that_would_do(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPUS, "0,1,2,3")
    run = machine(*on("cuda", 4))
    with pytest.raises(ConfigError, match=r"takes 5 GPUs .*; 4 would do with trainer\.nnodes=1"):
        run.start("trainer")
    with pytest.raises(ConfigError, match=r"have place for 0 replica\(s\) of 1; give .* more"):
        run.start("rollout")


def test_a_gpu_that_is_shared_by_hand_is_seen_by_all(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPUS, "0")
    run = machine(*on("cuda", 1, "sluice.weights.backend=gloo"))
    specs = [*run.start("trainer"), *run.start("rollout")]
    assert {spec.environment.get(GPUS, "0") for spec in specs} == {"0"}
    with pytest.raises(
        ConfigError, match=r"have place for 1 replica\(s\) of 1, which have claimed"
    ):
        run.start("rollout")


def test_a_gpu_that_is_shared_by_hand_is_the_one_that_the_run_is_given(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(GPUS, raising=False)
    monkeypatch.setenv(SHARED_DEVICES_VARIABLE, "3")
    run = machine(*on("cuda", 1, "sluice.weights.backend=gloo"))
    specs = [*run.start("trainer"), *run.start("rollout")]
    assert [spec.environment[GPUS] for spec in specs] == ["3", "3"]


def test_a_number_of_replicas_does_not_keep_containers_from_dividing_devices(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPUS, "0,1")
    run = machine(*on("cuda", 1, "sluice.rollout.replicas=2"))
    specs = [run.start(kind)[0] for kind in ("trainer", "rollout")]
    assert [spec.environment[GPUS] for spec in specs] == ["0", "1"]


def test_a_container_with_devices_of_its_own_claims_none(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARED_DEVICES_VARIABLE)
    monkeypatch.setenv(GPUS, "0")
    run = machine(*on("cuda", 1))
    specs = [run.start(kind)[0] for kind in ("trainer", "rollout")]
    assert [spec.environment.get(GPUS, "0") for spec in specs] == ["0", "0"]
