"""What is looked up inside vLLM's workers, in stand-ins for both of its model runners."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from services.rollout.engines.vendor_engines.share_recorder import record_share
from services.rollout.engines.vendor_engines.worker_group import WorkerBegin, WorkerGroup
from services.rollout.engines.vllm.worker_extension import VllmWorker, WorkerFeatures, keep_buffers
from sluice.errors import ConfigError
from sluice.types import TensorSpec
from sluice.weight_share import WHOLE, Cut, WeightShare

_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_LOADER = "vllm.model_executor.model_loader.dummy_loader"
_RELOAD = "vllm.model_executor.model_loader.reload"
_BEGIN = WorkerBegin(
    device="cpu", backend="gloo", tensors=(), model_path="nowhere", trust_remote_code=False
)


class _Runner:
    """What both have."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential()
        self.loaded: list[str] = []

    def get_model(self) -> torch.nn.Module:
        return self.model

    def reload_weights(
        self,
        weights_iterator: Iterator[tuple[str, torch.Tensor]] | None = None,
        weights_path: str | None = None,
    ) -> None:
        self.loaded += [name for name, _ in weights_iterator or ()]


class _RunnerV1(_Runner):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, object] = {"a": 1, "b": 2}


class _RunnerV2(_Runner):
    def __init__(self) -> None:
        super().__init__()
        self.req_states = SimpleNamespace(req_id_to_index={"a": 0, "b": 5})


class _OlderRunnerV2(_RunnerV2):
    """Up to 0.31 it hands the arguments on to V1's method."""

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        _Runner.reload_weights(self, *args, **kwargs)


class _WithoutIterator(_RunnerV1):
    def reload_weights(self, weights_path: str) -> None:  # type: ignore[override]
        return


RUNNERS = (_RunnerV1, _RunnerV2, _OlderRunnerV2)


def _worker(runner: Any, **more: object) -> Any:
    worker: Any = VllmWorker()
    worker.model_runner, worker.device, worker.rank = runner, torch.device("cpu"), 0
    for name, value in more.items():
        setattr(worker, name, value)
    return worker


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts modules where vLLM's are."""

    def put(contents: Mapping[str, Mapping[str, object]]) -> None:
        for name in {name for path in contents for name in _parents(path)}:
            module = ModuleType(name)
            module.__path__ = []
            vars(module).update(contents.get(name, {}))
            monkeypatch.setitem(sys.modules, name, module)

    return put


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


class _Loader:
    def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
        return


@pytest.mark.parametrize("kind", RUNNERS)
def test_the_samples_of_both_model_runners_are_counted(kind: type[_Runner]) -> None:
    runner: Any = kind()
    features = WorkerFeatures(_worker(runner))
    assert features.num_samples() == 2
    held = runner.requests if kind is _RunnerV1 else runner.req_states.req_id_to_index
    del held["a"]
    assert features.num_samples() == 1


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_liveness_check_answers_with_both_model_runners(kind: type[_Runner]) -> None:
    worker = _worker(kind())
    worker.sluice_begin(msgspec.json.encode(_BEGIN))
    assert worker.sluice_check_alive() == 2


@pytest.mark.parametrize("kind", RUNNERS)
def test_both_model_runners_load_weights(kind: type[_Runner]) -> None:
    runner = kind()
    WorkerFeatures(_worker(runner)).load(iter([("a", torch.ones(1)), ("b", torch.ones(1))]))
    assert runner.loaded == ["a", "b"]


class _Lower(torch.nn.Module):
    """A layer of the lower half of a weight, whose parameter was packed away since it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(0), requires_grad=False)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor[2:])


def _reload_of(layer: torch.nn.Module, kept: torch.Tensor) -> dict[str, dict[str, object]]:
    """The part of vLLM's reload that keeps a layer's parameters as they were made."""
    info = SimpleNamespace(restore_metadata=({"weight": kept}, {}))

    def without_memory(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data.to("meta")

    return {
        f"{_RELOAD}.layerwise": {"get_layerwise_info": {layer: info}.__getitem__},
        f"{_RELOAD}.meta": {
            "to_meta_tensor": without_memory,
            "restore_layer_refs": lambda tensor, layer: tensor,
        },
    }


def test_a_loader_gets_the_parameters_as_they_were_before_vllm_processed_them(
    install: Any,
) -> None:
    runner, specs = _RunnerV1(), (TensorSpec("w", "float32", (4, 3)),)
    runner.model = _Lower()  # type: ignore[assignment]
    features = WorkerFeatures(_worker(runner))
    assert record_share(features.load_without_memory, specs, dict) == WHOLE, "no such vLLM"
    install(_reload_of(runner.model, torch.zeros(2, 3)))
    share = record_share(features.load_without_memory, specs, dict)
    assert share == WeightShare((("w", (Cut(0, ((2, 2),)),)),))
    assert runner.model.weight.shape == (0,)


def _without(runner: Any, name: str) -> Any:
    if name in vars(runner):
        delattr(runner, name)
    else:
        setattr(runner, name, None)
    return runner


@pytest.mark.parametrize(
    ("runner", "missing"),
    [
        (None, "model_runner"),
        (_without(_RunnerV1(), "requests"), r"model_runner\.requests"),
        (_without(_RunnerV1(), "get_model"), r"model_runner\.get_model"),
        (_without(_RunnerV1(), "reload_weights"), r"model_runner\.reload_weights"),
        (_WithoutIterator(), r"model_runner\.reload_weights\(weights_iterator\)"),
    ],
)
def test_a_worker_that_lacks_something_is_refused_by_its_name(runner: Any, missing: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"has no {missing}, which .* need; install vLLM 0\.32 .* 0\.23 to 0\.33",
    ) as refused:
        WorkerFeatures(_worker(runner))
    assert _VARIABLE not in str(refused.value), "V1 is what there is already"


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("req_id_to_index", r"model_runner\.req_states\.req_id_to_index"),
        ("get_model", r"model_runner\.get_model"),
        ("reload_weights", r"model_runner\.reload_weights"),
    ],
)
def test_where_model_runner_v2_lacks_something_v1_is_the_remedy(name: str, missing: str) -> None:
    runner = _RunnerV2()
    _without(runner.req_states if name == "req_id_to_index" else runner, name)
    with pytest.raises(
        ConfigError, match=rf"model runner V2\) has no {missing}, .*; set {_VARIABLE}=0, "
    ):
        WorkerFeatures(_worker(runner))


def test_a_model_runner_of_a_new_kind_is_refused_with_v1_as_the_remedy() -> None:
    runner = _without(_RunnerV1(), "requests")
    with pytest.raises(ConfigError, match=rf"no model_runner\.requests, .*set {_VARIABLE}=0"):
        WorkerFeatures(_worker(runner, use_v2_model_runner=True))


def test_all_that_is_missing_is_named_at_once() -> None:
    runner = _without(_without(_RunnerV1(), "requests"), "reload_weights")
    with pytest.raises(ConfigError, match=r"requests, model_runner\.reload_weights, which"):
        WorkerFeatures(_worker(runner))


async def test_what_a_worker_lacks_is_reported_when_it_begins() -> None:
    worker = _worker(_without(_RunnerV2(), "reload_weights"))

    class Calls:
        async def call_workers(self, method: str, *given: object, timeout_s: float) -> list[object]:
            return [{}, getattr(worker, method)(*given)]

    with pytest.raises(ConfigError, match=r"worker 1 of 2: .* has no model_runner\.reload_weights"):
        await WorkerGroup(Calls(), "vLLM").begin(_BEGIN)


def _changed(self: Any, model: object) -> None:
    return


@pytest.mark.parametrize(
    "contents",
    [
        {"vllm": {"__version__": "0.99"}},
        {_LOADER: {}, "vllm": {"__version__": "0.99"}},
        {
            _LOADER: {"DummyModelLoader": type("Loader", (), {"load_weights": _changed})},
            "vllm": {"__version__": "0.99"},
        },
    ],
)
def test_without_the_loader_of_dummy_weights_buffers_would_be_lost_which_is_refused(
    install: Any, contents: Any
) -> None:
    install(contents)
    keep_buffers()  # has nothing to do, and nothing to say where nobody listens
    with pytest.raises(ConfigError, match=r"vLLM 0\.99: .*DummyModelLoader\.load_weights\("):
        WorkerFeatures(_worker(_RunnerV1()))


def test_the_loader_is_known_again_once_it_keeps_buffers(install: Any) -> None:
    install({_LOADER: {"DummyModelLoader": type("Loader", (_Loader,), {})}})
    keep_buffers()
    assert WorkerFeatures(_worker(_RunnerV1())).num_samples() == 2


@pytest.mark.parametrize("kind", RUNNERS)
def test_layers_find_vllms_configuration_while_their_weights_are_processed(
    install: Any, kind: type[_Runner]
) -> None:
    seen: list[object] = []

    @contextmanager
    def set_current(config: object) -> Iterator[None]:
        seen.append(config)
        yield
        seen.append("over")

    install(
        {
            "vllm.config": {"set_current_vllm_config": set_current},
            _LOADER: {"DummyModelLoader": _Loader},
        }
    )
    runner = kind()
    WorkerFeatures(_worker(runner, vllm_config="a")).load(iter([("w", torch.ones(1))]))
    assert (seen, runner.loaded) == (["a", "over"], ["w"])


class _Packing:
    def __init__(self) -> None:
        self.packed: list[torch.nn.Module] = []

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.packed.append(layer)


def _layer(method: object, **more: object) -> torch.nn.Module:
    layer: Any = torch.nn.Identity()
    layer.quant_method = method
    for name, value in more.items():
        setattr(layer, name, value)
    return layer  # type: ignore[no-any-return]


def test_a_tied_output_layer_is_packed_again_and_one_that_the_reload_packed_is_not() -> None:
    runner, method = _RunnerV1(), _Packing()
    tied = _layer(method, cpu_linear=1, weight=torch.ones(2, 3))
    packed = _layer(method, cpu_linear=1, weight=torch.ones(0))
    runner.model = torch.nn.Sequential(tied, packed)
    WorkerFeatures(_worker(runner)).load(iter(()))
    assert method.packed == [tied]


def test_kernels_of_experts_on_the_cpu_are_built_again() -> None:
    runner = _RunnerV1()
    on_cpu, elsewhere = SimpleNamespace(moe_kernel=1), SimpleNamespace(moe_kernel=1)
    runner.model = torch.nn.Sequential(
        _layer(on_cpu, w13_weight=torch.ones(1)),
        _layer(elsewhere, w13_weight=torch.ones(1, device="meta")),
    )
    WorkerFeatures(_worker(runner)).load(iter(()))
    assert (on_cpu.moe_kernel, elsewhere.moe_kernel) == (None, 1)


@pytest.mark.parametrize(
    ("layer", "missing"),
    [
        (_layer(SimpleNamespace(), cpu_linear=1), "SimpleNamespace.process_weights_after_loading"),
        (_layer(SimpleNamespace(), w13_weight=torch.ones(1)), "SimpleNamespace.moe_kernel"),
    ],
)
def test_layers_whose_packed_weights_could_not_be_renewed_are_refused(
    layer: torch.nn.Module, missing: str
) -> None:
    runner = _RunnerV1()
    runner.model = torch.nn.Sequential(layer, layer)
    with pytest.raises(ConfigError, match=rf"has no {missing}, which"):
        WorkerFeatures(_worker(runner))
