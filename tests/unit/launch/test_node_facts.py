"""What a launcher learns of a node, and what of a specification is the node's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import dump_config
from sluice.config.run import RunConfig
from sluice.config.schema.service import EndpointConfig
from sluice.launch.cluster.nodes import (
    NodeStatus,
    ServicePlan,
    endpoint_on,
    missing_paths,
    paths_of,
    prepare_node,
    spec_on,
)
from sluice.launch.network_layout import Kind
from sluice.launch.plan import with_absolute_paths
from sluice.launch.service_spec import placed_replica, placed_trainer

ADDRESS = "10.0.0.7"
TOOL_FILES = ("function_tool_path", "tool_config_path")
FACTS = NodeStatus(ADDRESS, "/opt/venv/bin/python", {"HCCL_IF_IP": ADDRESS}, ())


class Node:
    """A run's folder, and a model, as one node has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        self.config = load_config(
            None,
            [
                f"actor_rollout_ref.model.path={self.model}",
                f"sluice.run_dir={folder / 'run'}",
                "sluice.rollout.device=cpu",
                "trainer.device=cpu",
            ],
        )
        self.file, self.mark = folder / "run" / "config.yaml", folder / "run" / "mark"

    def plan(self, kind: Kind, version: str | None = None) -> ServicePlan:
        given = (kind, str(self.file), dump_config(self.config), str(self.mark))
        return ServicePlan(*given) if version is None else ServicePlan(*given, version)

    def share(self) -> None:
        self.mark.parent.mkdir(exist_ok=True)
        self.mark.touch()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_node_that_shares_the_folder_is_ready_and_its_file_is_left_alone(node: Node) -> None:
    node.share()
    node.file.write_text(node.plan("trainer").config_text, encoding="utf-8")
    before = node.file.stat()
    facts = prepare_node(node.plan("trainer"), ADDRESS)
    assert facts.problems == ()
    assert (facts.address, facts.python) == (ADDRESS, sys.executable)
    assert (node.file.stat().st_ino, node.file.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )


def test_a_replicas_node_needs_no_shared_folder_and_gets_the_configuration_by_value(
    node: Node,
) -> None:
    assert prepare_node(node.plan("rollout"), ADDRESS).problems == ()
    assert load_config(node.file, ()) == node.config


def test_a_configuration_of_an_earlier_run_is_replaced(node: Node) -> None:
    node.file.parent.mkdir()
    node.file.write_text("trainer: {}\n", encoding="utf-8")
    prepare_node(node.plan("rollout"), ADDRESS)
    assert load_config(node.file, ()) == node.config


@pytest.mark.parametrize("kind", ["trainer", "reward"])
def test_services_that_keep_state_are_refused_where_the_folder_is_another_one(
    node: Node, kind: Kind
) -> None:
    (problem,) = prepare_node(node.plan(kind), ADDRESS).problems
    assert f"sluice.run_dir = {node.folder / 'run'}" in problem
    assert kind in problem


def test_a_path_that_is_missing_is_reported_with_its_key(node: Node) -> None:
    node.model.rmdir()
    (problem,) = prepare_node(node.plan("rollout"), ADDRESS).problems
    assert problem == f"actor_rollout_ref.model.path = {node.model} does not exist"


def test_a_folder_that_cannot_be_written_is_reported(node: Node) -> None:
    node.file.parent.write_text("a file\n", encoding="utf-8")
    (problem,) = prepare_node(node.plan("rollout"), ADDRESS).problems
    assert problem.startswith(f"{node.file} cannot be written (")


def test_another_version_of_the_package_is_reported(node: Node) -> None:
    (problem,) = prepare_node(node.plan("rollout", "0.0.1"), ADDRESS).problems
    assert "the run has 0.0.1" in problem


def run(*overrides: str) -> RunConfig:
    return load_config(None, overrides)


@pytest.mark.parametrize(
    ("endpoint", "host", "advertise"),
    [
        (EndpointConfig(), ADDRESS, None),
        (EndpointConfig(host="0.0.0.0"), "0.0.0.0", ADDRESS),
        (EndpointConfig(host="[::]"), "[::]", ADDRESS),
        (EndpointConfig(host="0.0.0.0", advertise="trainer"), "0.0.0.0", "trainer"),
        (EndpointConfig(advertise="gate:9"), ADDRESS, "gate:9"),
    ],
)
def test_a_service_listens_at_its_nodes_address_unless_it_was_to_listen_everywhere(
    endpoint: EndpointConfig, host: str, advertise: str | None
) -> None:
    placed = endpoint_on(endpoint, ADDRESS)
    assert (placed.host, placed.advertise) == (host, advertise)


@pytest.mark.parametrize(
    "given",
    [
        (),
        ("host=0.0.0.0", "advertise=all"),
        ("advertise=all",),
        ("host=127.0.0.9",),
        ("host='[::]'",),
    ],
)
def test_each_replica_is_reached_at_its_own_node_whatever_all_would_advertise(
    given: tuple[str, ...],
) -> None:
    config = run(*(f"sluice.rollout.endpoint.{one}" for one in given))
    spec = spec_on(placed_replica(config, Path("c.yaml"), 3), "rollout", config, FACTS)
    words = list(spec.command)
    own = load_config(None, words[words.index("rollout-3") + 1 :]).sluice.rollout.endpoint
    assert (own.advertise or own.host) == ADDRESS


def test_the_nodes_python_runs_the_services_own_command_with_its_variables() -> None:
    config = run("trainer.n_gpus_per_node=2", "sluice.trainer.torch_threads=5")
    _, second = placed_trainer(config, Path("c.yaml"), "none", ("10.0.0.1", 29500))
    spec = spec_on(second, "trainer", config, FACTS)
    assert spec.command == (FACTS.python, "-m", "services.trainer", "--config", "c.yaml")
    assert spec.environment["OMP_NUM_THREADS"] == "5"
    assert spec.environment["HCCL_IF_IP"] == ADDRESS
    assert (spec.name, spec.crew, spec.restarts) == (second.name, second.crew, second.restarts)


def test_ranks_of_several_nodes_meet_at_the_first_ones_and_are_numbered_on_each() -> None:
    config = run("trainer.nnodes=2", "trainer.n_gpus_per_node=2")
    ranks = placed_trainer(config, Path("c.yaml"), "none", ("10.0.0.1", 29500))
    places = [(r.environment["RANK"], r.environment["LOCAL_RANK"]) for r in ranks]
    assert places == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    assert {r.environment["WORLD_SIZE"] for r in ranks} == {"4"}
    assert {(r.environment["MASTER_ADDR"], r.environment["MASTER_PORT"]) for r in ranks} == {
        ("10.0.0.1", "29500")
    }


def test_only_files_that_a_service_opens_have_to_be_on_its_node() -> None:
    config = run(
        "actor_rollout_ref.model.path=/m",
        "data.train_files=[/a.parquet,/b.parquet]",
        "data.val_files=/v.parquet",
        "reward.custom_reward_function.path=/r.py",
        "trainer.resume_mode=resume_path",
        "trainer.resume_from_path=/ckpt/global_step_5",
        "sluice.security.token_file=/tokens",
    )
    token = {"sluice.security.token_file": "/tokens"}
    model = {"actor_rollout_ref.model.path": "/m"}
    assert paths_of("rollout", config) == model | token
    assert paths_of("trainer", config) == model | token | {
        "trainer.resume_from_path": "/ckpt/global_step_5"
    }
    assert paths_of("reward", config) == token | {
        "data.train_files[0]": "/a.parquet",
        "data.train_files[1]": "/b.parquet",
        "data.val_files[0]": "/v.parquet",
        "reward.custom_reward_function.path": "/r.py",
    }
    turns = "actor_rollout_ref.rollout.multi_turn"
    for key in ("sluice.environment.path", *(f"{turns}.{one}" for one in TOOL_FILES)):
        assert paths_of("reward", run(f"{key}=/e.py"))[key] == "/e.py"
    assert missing_paths({"here": os.curdir, "there": "/no/such/file"}) == ["there = /no/such/file"]


def test_every_relative_path_becomes_absolute_and_others_stay() -> None:
    config = run(
        "actor_rollout_ref.model.path=model",
        "data.train_files=[a.parquet,/b.parquet]",
        "reward.custom_reward_function.path=pkg://rewards.math",
        "sluice.environment.path=jars.py",
        *(f"actor_rollout_ref.rollout.multi_turn.{one}=tools" for one in TOOL_FILES),
        "trainer.default_local_dir=ckpt",
        "sluice.run_dir=runs/x",
        "sluice.security.token_file=tokens",
    )
    found, here = with_absolute_paths(config), Path.cwd()
    assert found.actor_rollout_ref.model.path == str(here / "model")
    assert found.data.train_files == [str(here / "a.parquet"), "/b.parquet"]
    assert found.data.val_files is None
    assert found.reward.custom_reward_function.path == "pkg://rewards.math"
    assert found.sluice.environment.path == str(here / "jars.py")
    turns = found.actor_rollout_ref.rollout.multi_turn
    assert {getattr(turns, one) for one in TOOL_FILES} == {str(here / "tools")}
    assert found.trainer.default_local_dir == str(here / "ckpt")
    assert found.sluice.run_dir == str(here / "runs/x")
    assert found.sluice.security.token_file == str(here / "tokens")
    assert found.sluice.security.ca_file is None
    assert with_absolute_paths(found) == found


def test_a_run_keeps_the_files_of_a_pattern_that_it_started_with(tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in ("a.parquet", "b.parquet"))
    second.touch()
    pattern = str(tmp_path / "*.parquet")
    config = run(f"data.train_files={pattern}", f"data.val_files=[{pattern}]")
    kept = with_absolute_paths(config)
    first.touch()
    assert kept.data.train_files == kept.data.val_files == [str(second)]
    assert with_absolute_paths(kept) == kept
    assert with_absolute_paths(config).data.train_files == [str(first), str(second)]
