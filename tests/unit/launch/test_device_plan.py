"""A launch finds its devices: divided, shared on one GPU, or an error with what would do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import as_file, files
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from sluice.cli.config import with_preflight
from sluice.cli.run.checked import check_run
from sluice.cli.run.quickstart import with_fitting_replicas
from sluice.config.check import check_report
from sluice.config.derived import replica_devices, world_size
from sluice.config.loading.loader import ReadRun, load_config, read_run
from sluice.config.loading.yaml_text import write_config
from sluice.config.memory.shape import published_model, published_shape
from sluice.config.memory.training import guessed_memory, training_layout
from sluice.config.run import RunConfig
from sluice.device.host import gpu_gib
from sluice.doctor.finding import doctor_context
from sluice.doctor.machine import check_gpus
from sluice.launch.cluster.placement import NodeCapacity, PlacementPlan, plans
from sluice.launch.cluster.ray_run import RayOptions, divide_devices
from sluice.launch.device_plan import DevicePlan, LaunchDevices, device_plan, local_devices
from sluice.launch.service_spec import local_services, with_ports
from tests.support.doctor_findings import run_of, severities
from tests.support.source_tree import ROOT

LAUNCHES = Path(__file__).resolve().parents[2] / "data" / "launches"
DEVICES = json.loads((LAUNCHES / "devices.json").read_text(encoding="utf-8"))
GPUS, NPUS = "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"
ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.name=vllm"
POOL = "trainer.n_gpus_per_node=8"
MODEL = "actor_rollout_ref.model.path=Qwen/{}"


@pytest.fixture(autouse=True)
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.device.host.is_cpu_torch", lambda: False)
    for name in (GPUS, NPUS):
        monkeypatch.setenv(name, "")


def numbers(count: int) -> str:
    return ",".join(map(str, range(count)))


def gpus(count: int) -> dict[str, str]:
    return {GPUS: numbers(count), NPUS: ""}


def planned(count: int, *overrides: str) -> DevicePlan:
    return planned_run(read_run(None, overrides), count)


def planned_run(run: ReadRun, count: int) -> DevicePlan:
    assert not run.problems
    return local_devices(run.config, run.keys, gpus(count))


def sizes(config: RunConfig) -> tuple[int, int]:
    return world_size(config), config.sluice.rollout.replicas


def test_a_run_on_cpus_stays_as_it_is() -> None:
    for overrides in ((), (POOL,), (POOL, 'sluice.placement="trainer:6,rollout:2"')):
        run = read_run(None, overrides)
        plan = planned_run(run, 0)
        assert plan.config is run.config
        assert (plan.line, plan.shortage, plan.remedy) == ("", "", ())


@pytest.mark.parametrize(
    ("visible", "is_cpu_torch", "overrides"),
    [
        ("-1", False, ()),
        ("-1,0", False, (POOL,)),
        ("0", False, ("trainer.device=cpu", "sluice.rollout.device=cpu")),
        ("0", False, ("trainer.device=cpu",)),
        ("0", True, ()),
        ("0,1", True, (POOL,)),
    ],
)
def test_no_key_changes_where_processes_compute_on_cpus(
    visible: str, is_cpu_torch: bool, overrides: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.device.host.is_cpu_torch", lambda: is_cpu_torch)
    run = read_run(None, overrides)
    plan = local_devices(run.config, run.keys, {GPUS: visible, NPUS: ""})
    assert plan.config is run.config
    assert (plan.line, plan.shortage) == ("", "")


@pytest.mark.parametrize("name", [name for name, row in DEVICES.items() if row["devices"] <= 16])
def test_a_published_launch_has_its_devices_on_one_machine(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, count = read_run(LAUNCHES / f"{name}.overrides", []), DEVICES[name]["devices"]
    variable = NPUS if run.config.trainer.device == "npu" else GPUS
    monkeypatch.setattr("sluice.device.host.has_torch_npu", lambda: variable == NPUS)
    monkeypatch.setenv(variable, numbers(count))
    plan = local_devices(run.config, run.keys, {variable: numbers(count)})
    ranks, replicas = sizes(plan.config)
    assert not plan.shortage
    assert plan.line.startswith(f"devices: {ranks} train")
    specs = local_services(with_ports(plan.config), Path("run.yaml"))
    seen = [spec.environment[variable].split(",") for spec in specs if variable in spec.environment]
    each = replica_devices(plan.config)
    assert [len(one) for one in seen] == [1] * ranks + [each] * replicas
    assert sorted(int(number) for one in seen for number in one) == list(range(count))


def capacities(nodes: list[dict[str, float]]) -> list[NodeCapacity]:
    return [NodeCapacity(f"10.0.0.{n}", dict(one), dict(one)) for n, one in enumerate(nodes)]


def bundles_on_nodes(groups: Sequence[PlacementPlan], free: list[dict[str, float]]) -> None:
    """Take each bundle from a node as Ray does; fail if none has the resources."""
    for group in groups:
        taken: set[int] = set()
        for bundle in group.bundles:
            fitting = [
                index
                for index, node in enumerate(free)
                if (group.strategy != "STRICT_SPREAD" or index not in taken)
                and all(node.get(name, 0.0) >= amount for name, amount in bundle.items())
            ]
            assert fitting, f"{group.name}: no node has {bundle} in {free}"
            taken.add(fitting[0])
            for name, amount in bundle.items():
                free[fitting[0]][name] -= amount


@pytest.mark.parametrize("name", DEVICES)
def test_a_published_launch_has_its_devices_on_a_cluster(name: str) -> None:
    run, count = read_run(LAUNCHES / f"{name}.overrides", []), DEVICES[name]["devices"]
    kind = "NPU" if run.config.trainer.device == "npu" else "GPU"
    nodes = run.config.trainer.nnodes
    total = {"CPU": 64.0 * nodes, kind: float(count)}
    free = [{"CPU": 64.0, kind: count / nodes} for _ in range(nodes)]
    plan, extra = divide_devices(run.config, RayOptions(keys=run.keys), total, capacities(free))
    config = plan.config
    assert not plan.shortage
    ranks, replicas = sizes(config)
    assert ranks + replicas * replica_devices(config) == count
    bundles_on_nodes(plans(config, total, extra), free)
    assert all(node[kind] == 0 for node in free)


def test_a_launch_that_names_its_replicas_is_not_divided() -> None:
    plan = planned(4, "trainer.n_gpus_per_node=2", "sluice.rollout.replicas=2")
    assert sizes(plan.config) == (2, 2)
    assert plan.line == "devices: 2 train, 2 generate in 2 replicas (as its keys name them)"


def test_the_defaults_are_a_rank_and_a_replica() -> None:
    plan = planned(8)
    assert plan.line == "devices: 1 trains, 1 generates in 1 replica (as its keys name them)"


def test_a_placement_is_obeyed_and_said() -> None:
    tp = f"{ROLLOUT}.tensor_model_parallel_size=2"
    plan = planned(8, POOL, VLLM, tp, 'sluice.placement="trainer:2,rollout:6"')
    assert sizes(plan.config) == (2, 3)
    assert plan.line == (
        "devices: 2 train, 6 generate in 3 replicas of 2 (sluice.placement=trainer:2,rollout:6)"
    )


def test_a_model_of_unknown_shape_gives_each_half() -> None:
    plan = planned(8, POOL)
    assert sizes(plan.config) == (4, 4)
    assert "sluice.placement=auto, half each: the model's shape is not known" in plan.line


def test_a_known_shape_gives_the_split_of_the_plan_command(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    content = json.dumps(published_model("Qwen3-8B"))
    (folder / "config.json").write_text(content, encoding="utf-8")
    found = [
        planned(8, POOL, VLLM, f"actor_rollout_ref.model.path={path}")
        for path in (folder, "Qwen/Qwen3-8B")
    ]
    assert sizes(found[0].config) == sizes(found[1].config) != (4, 4)
    assert "fastest by estimate for devices of 80 GiB assumed" in found[0].line


def test_a_cluster_of_one_gpu_that_may_grow_is_not_shared_by_default() -> None:
    run = read_run(None, [])
    total = {"CPU": 8.0, "GPU": 1.0}
    plan, extra = divide_devices(run.config, RayOptions(keys=run.keys), total, capacities([total]))
    assert plan.config is run.config
    assert extra == RayOptions().extra


def test_the_memory_of_a_cluster_s_devices_is_not_the_driver_host_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sluice.device.host.gpu_gib", lambda: 24.0)
    assert LaunchDevices("GPU", 8).gib == 24
    assert LaunchDevices("GPU", 8, are_elsewhere=True).gib is None


@pytest.mark.parametrize(
    ("count", "overrides"),
    [(8, (POOL, 'sluice.placement="trainer:6,rollout:2"')), (8, (POOL,)), (1, (VLLM,))],
)
def test_a_resumed_run_keeps_its_split(
    count: int, overrides: Sequence[str], tmp_path: Path
) -> None:
    plan = planned(count, *overrides)
    write_config(plan.config, tmp_path / "config.yaml")
    assert planned_run(read_run(tmp_path / "config.yaml", []), count).config == plan.config


def test_too_few_devices_are_an_error_with_what_would_do() -> None:
    tp = f"{ROLLOUT}.tensor_model_parallel_size=2"
    plan = planned(4, POOL, VLLM, tp)
    assert "takes 8 GPUs (4 train, 4 generate in 2 replicas of 2), 4 are there" in plan.shortage
    assert "; 4 would do with trainer.nnodes=1 trainer.n_gpus_per_node=2" in plan.shortage
    assert plan.shortage.endswith(f"or make more visible ({GPUS})")
    assert not planned(4, POOL, VLLM, tp, *plan.remedy).shortage


STAGED = "dapo-qwen3-235b-megatron"  # four tensor ranks in each of eight stages


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("dapo-qwen3-32b-fsdp2-npu", 2), ("dapo-qwen3-32b-fsdp2-npu", 3), (STAGED, 3)],
)
def test_a_cluster_that_is_too_small_is_named_a_split_that_fits_its_nodes(
    name: str, nodes: int
) -> None:
    file = LAUNCHES / f"{name}.overrides"
    run = read_run(file, [])
    kind = "NPU" if run.config.trainer.device == "npu" else "GPU"
    free = [{"CPU": 64.0, kind: 16.0} for _ in range(nodes)]
    total = {"CPU": 64.0 * nodes, kind: 16.0 * nodes}
    plan, _ = divide_devices(run.config, RayOptions(keys=run.keys), total, capacities(free))
    assert f"{16 * nodes} are there; {16 * nodes} would do with trainer.nnodes=" in plan.shortage
    again = read_run(file, plan.remedy)
    mended, extra = divide_devices(
        again.config, RayOptions(keys=again.keys), total, capacities(free)
    )
    assert not mended.shortage
    bundles_on_nodes(plans(mended.config, total, extra), free)
    assert all(node[kind] == 0 for node in free)


def test_a_cluster_that_is_smaller_than_one_model_is_named_its_ranks() -> None:
    run = read_run(LAUNCHES / f"{STAGED}.overrides", [])
    free = [{"CPU": 64.0, "GPU": 16.0} for _ in range(2)]
    total = {"CPU": 128.0, "GPU": 32.0}
    plan, _ = divide_devices(run.config, RayOptions(keys=run.keys), total, capacities(free))
    assert "; a trainer of 32 and a replica of 8 take at least 40" in plan.shortage


@pytest.mark.parametrize(("kind", "variable"), [("cuda", GPUS), ("npu", NPUS)])
def test_too_few_devices_of_this_machine_are_one_error(
    kind: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.device.host.has_torch_npu", lambda: variable == NPUS)
    device = (f"trainer.device={kind}", f"sluice.rollout.device={kind}")
    run = read_run(None, [POOL, *device])
    found = [*check_gpus(doctor_context(run, {GPUS: "", NPUS: "", variable: numbers(3)}))]
    (one,) = found
    assert one.what.startswith("the launch takes 8 ")
    assert one.remedy.startswith("3 would do with trainer.nnodes=1 trainer.n_gpus_per_node=")
    assert one.remedy.endswith(f"make more visible ({variable})")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((POOL,), "takes 8 GPUs (4 train, 4 generate in 4 replicas), 1 are there; set trainer"),
        (
            (VLLM, f"{ROLLOUT}.tensor_model_parallel_size=4"),
            "; a trainer and a replica of 4 take at least 5, or make",
        ),
        (("sluice.weights.backend=nccl",), "takes 2 GPUs (1 trains, 1 generates in 1 replica)"),
    ],
)
def test_one_gpu_that_cannot_be_shared_is_an_error(overrides: Sequence[str], said: str) -> None:
    plan = planned(1, *overrides)
    assert said in plan.shortage
    assert not plan.is_shared


def test_a_pool_that_cannot_be_divided_is_an_error_with_the_least_number() -> None:
    plan = planned(2, "trainer.n_gpus_per_node=2", VLLM, f"{ROLLOUT}.tensor_model_parallel_size=2")
    assert "2 device(s)" in plan.shortage
    assert "too few for a trainer and a replica of 2" in plan.shortage
    assert "give at least 3, or a smaller" in plan.shortage
    assert not plan.line


def test_a_pool_that_the_trainer_needs_whole_may_have_replicas_beside_it() -> None:
    pool = ("trainer.n_gpus_per_node=2", VLLM, f"{ROLLOUT}.tensor_model_parallel_size=2")
    plan = planned(8, *pool)
    assert "or set sluice.rollout.replicas=3" in plan.shortage
    assert plan.remedy == ("sluice.rollout.replicas=3",)
    beside = planned(8, *pool, *plan.remedy)
    assert not beside.shortage
    assert sizes(beside.config) == (2, 3)


def test_a_pool_on_several_hosts_is_to_be_divided_by_plan() -> None:
    run = read_run(None, [POOL, "trainer.nnodes=2"])
    plan = planned_run(run, 8)
    assert plan.config is run.config
    assert "divide it by sluice plan, and write its keys" in plan.line
    assert not planned(8, POOL, "trainer.nnodes=2", "sluice.rollout.replicas=2").line


@pytest.mark.parametrize("given", [0.3, 0.8])
def test_one_gpu_is_shared_with_a_share_of_its_memory_for_the_engine(given: float) -> None:
    plan = planned(
        1,
        VLLM,
        "sluice.rollout.replicas=3",
        "sluice.trainer.min_replicas=2",
        f"{ROLLOUT}.gpu_memory_utilization={given}",
    )
    assert plan.config.sluice.trainer.min_replicas == 1
    rollout = plan.config.actor_rollout_ref.rollout
    assert plan.is_shared
    assert sizes(plan.config) == (1, 1)
    assert plan.config.sluice.weights.backend == "gloo"
    assert rollout.gpu_memory_utilization == min(given, 0.5)
    share = f"{min(given, 0.5):.0%} of its memory for the engine"
    lowered = " instead of 80%" if given > 0.5 else ""
    lowered += " while the trainer does not train"
    assert plan.line == (
        "devices: the trainer and 1 replica share one GPU "
        f"(sluice.weights.backend=gloo, {share}{lowered}, replicas 3 -> 1)"
    )


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_engine_gets_what_the_trainer_of_a_known_model_leaves_while_it_is_awake(
    staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.device.host.gpu_gib", lambda: 80.0)
    asked = (
        VLLM,
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B",
        f"sluice.asynchrony.max_staleness={staleness}",
        "algorithm.rollout_correction.rollout_is=token",
        f"{ROLLOUT}.gpu_memory_utilization=0.9",
    )
    plan = planned(1, *asked)
    share = plan.config.actor_rollout_ref.rollout.gpu_memory_utilization
    shape = published_shape("Qwen2.5-1.5B")
    guess = guessed_memory(shape, training_layout(plan.config))
    held = guess.peak if staleness else guess.state
    assert share == pytest.approx((72 * 2**30 - held) / (80 * 2**30), abs=0.01)
    assert ("while the trainer does not train" in plan.line) == (staleness == 0)
    assert planned(1, *asked[:-1]).config.actor_rollout_ref.rollout.gpu_memory_utilization <= share


def test_a_gpu_that_is_shared_by_hand_stays_as_it_was_set() -> None:
    run = read_run(None, ["sluice.weights.backend=gloo", "sluice.rollout.replicas=2"])
    plan = planned_run(run, 1)
    assert plan.config is run.config
    assert "the trainer and 2 replicas share one GPU" in plan.line


def test_one_npu_is_not_shared() -> None:
    run = read_run(None, [])
    plan = device_plan(run.config, run.keys, LaunchDevices("NPU", 1))
    assert "takes 2 NPUs" in plan.shortage


def test_a_shared_gpu_of_a_cluster_is_taken_by_halves() -> None:
    run, total = read_run(None, ["sluice.weights.backend=gloo"]), {"CPU": 8.0, "GPU": 1.0}
    plan, extra = divide_devices(run.config, RayOptions(keys=run.keys), total, capacities([total]))
    assert plan.config.sluice.weights.backend == "gloo"
    bundles_on_nodes(plans(plan.config, total, extra), [{"CPU": 8.0, "GPU": 1.0}])


@pytest.mark.parametrize(("count", "replicas"), [(0, 2), (1, 1), (2, 1), (3, 2), (8, 2)])
def test_the_quickstart_fits_any_number_of_gpus(
    count: int, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPUS, numbers(count))
    with as_file(files("sluice.quickstart") / "quickstart.yaml") as base:
        settings = with_fitting_replicas(base, [])
        plan = planned_run(read_run(base, settings), count)
        asked = with_fitting_replicas(base, ["sluice.rollout.replicas=1"])
        assert sizes(load_config(base, asked))[1] == 1
    assert not plan.shortage
    assert sizes(plan.config) == (1, replicas)
    assert (settings == []) == (count != 2)


def test_a_start_says_the_split_and_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPUS, numbers(4))
    monkeypatch.setattr("sluice.cli.run.checked.preflight", lambda *_: [])
    text = StringIO()
    pool = ("trainer.n_gpus_per_node=4", 'sluice.placement="trainer:3,rollout:1"')
    config = check_run(None, [*pool], Console(file=text, width=200)).config
    assert sizes(config) == (3, 1)
    assert "devices: 3 train, 1 generates in 1 replica (sluice.placement=" in text.getvalue()


@pytest.mark.parametrize(("count", "severity"), [(4, "problem"), (8, "ok")])
def test_the_check_of_devices_says_what_the_start_does(count: int, severity: str) -> None:
    found = [*check_gpus(run_of(POOL, environment=gpus(count)))]
    assert set(severities(found)) == {severity}
    assert "4 train, 4 generate in 4 replicas" in found[0].what


def test_the_smallest_gpu_s_memory_is_the_driver_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    gpu_gib.cache_clear()
    assert gpu_gib() is None
    gpu_gib.cache_clear()
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 81920\necho 24576\n", encoding="ascii")
    driver.chmod(0o755)
    assert gpu_gib() == 24
    gpu_gib.cache_clear()
    driver.write_text("#!/bin/sh\necho no driver; exit 9\n", encoding="ascii")
    assert gpu_gib() is None
    gpu_gib.cache_clear()


def test_a_check_where_no_gpu_is_notes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPUS, "")
    run = read_run(None, ["trainer.device=cuda", "sluice.rollout.device=cuda"])
    report = with_preflight(check_report(run.config, run.settings), run, doctor_context(run))
    assert any("this host has no GPU" in note.text for note in report.notes)
    assert not any("no device of its own" in one.text for one in report.problems)


@pytest.mark.parametrize(
    ("by_node", "pool"),
    [((8, 1, 8), (2, 8)), ((8, 4, 4), (3, 4)), ((4, 4), (2, 4)), ((8, 2, 2), (1, 8)), ((), (1, 6))],
)
def test_a_pool_is_of_the_machines_that_have_the_most_devices_together(
    by_node: tuple[int, ...], pool: tuple[int, int]
) -> None:
    nodes, each, _ = LaunchDevices("GPU", 6, are_elsewhere=True, by_node=by_node).pool()
    assert (nodes, each) == (f"trainer.nnodes={pool[0]}", f"trainer.n_gpus_per_node={pool[1]}")


def test_the_page_about_ray_has_the_splits_that_launches_say() -> None:
    page = (ROOT / "docs" / "deployment" / "ray.md").read_text(encoding="utf-8")
    for name, row in DEVICES.items():
        run = read_run(LAUNCHES / f"{name}.overrides", [MODEL.format(row["model"])])
        kind = "NPU" if run.config.trainer.device == "npu" else "GPU"
        found = LaunchDevices(kind, row["devices"], are_elsewhere=True)
        plan = device_plan(run.config, run.keys, found).config
        ranks, replicas = sizes(plan)
        nodes = run.config.trainer.nnodes
        assert (
            f"| {name} | {nodes} × {row['devices'] // nodes} {kind} | {ranks} | "
            f"{replicas} × {replica_devices(plan)} |"
        ) in page
