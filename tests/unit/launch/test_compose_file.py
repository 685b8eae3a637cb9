"""compose.yaml and its overlays: what both versions of Compose take, and what the launchers say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.config.loading.loader import load_config
from sluice.device.ascend_environment import AUTOLOAD_VARIABLE
from sluice.launch.network_layout import (
    COMPUTE_IMAGE,
    CONFIG_FILE,
    DASHBOARD_PORT,
    DASHBOARD_VARIABLE,
    DEVICE_VARIABLE,
    HEALTH_PROBE,
    JOBS_MOUNT,
    KINDS,
    LAUNCHER,
    PREPARE,
    PREPARED_FOLDER,
    REWARD_IMAGE,
    RUNS_MOUNT,
    SERVICE_PORTS,
    USER_ID,
    engine_grace_s,
    launcher_grace_s,
)
from sluice.launch.service_spec import RESTARTS_AFTER_ERRORS_TOO, RESTARTS_AFTER_SIGNALS
from sluice.service_contract import CONFIG_NAME
from tests.support.source_tree import ROOT, name_of
from tests.unit.cli.test_prepare_command import model_and_data

FILES = sorted(ROOT.glob("compose*.yaml"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
# Tried with docker-compose 1.29.2 and the schema of Compose v2.
TARGETS = ("reward", "compute", "cuda", "ascend")
TOP_KEYS = {"services", "volumes", "networks"}
SERVICE_KEYS = {
    "build", "cap_drop", "command", "depends_on", "deploy", "devices", "entrypoint", "environment",
    "group_add", "healthcheck", "image", "init", "networks", "ports", "restart", "scale",
    "security_opt", "shm_size", "stop_grace_period", "ulimits", "volumes",
}  # fmt: skip
INNER_KEYS = {
    "build": {"context", "target", "args"},
    "healthcheck": {"test", "interval", "timeout", "retries", "start_period"},
    "deploy": {"resources"},
}
TOOLS = {"prometheus", "grafana", "collector", "jaeger"}
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}
VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::-([^}]*))?\}")


def read(file: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def services(file: Path = ROOT / "compose.yaml") -> dict[str, dict[str, Any]]:
    found = read(file)["services"]
    assert isinstance(found, dict)
    return found


def filled_in(text: str) -> str:
    return VARIABLE.sub(lambda found: found[2] or "", text)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_only_keys_that_both_versions_of_compose_take_are_used(file: Path) -> None:
    assert {key for key in read(file) if not key.startswith("x-")} <= TOP_KEYS
    for name, service in services(file).items():
        assert set(service) <= SERVICE_KEYS, name
        for key, known in INNER_KEYS.items():
            assert set(service.get(key, {})) <= known, f"{name}: {key}"
        for each in service.get("depends_on", {}).values():
            assert set(each) == {"condition"}
            assert each["condition"] in CONDITIONS


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_in_a_file_keeps_a_service_from_being_scaled(file: Path) -> None:
    rollout = services(file).get("rollout", {})
    assert not {"container_name", "hostname", "ports"} & set(rollout)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_an_overlay_changes_services_that_are_there_or_adds_tools_beside_them(file: Path) -> None:
    added = set(services(file)) - set(services())
    assert added == (TOOLS if file.name == "compose.observability.yaml" else set())


def test_every_service_runs_its_launcher_with_the_one_configuration() -> None:
    assert set(services()) == {"prepare", *KINDS}
    assert find_spec("sluice.launch.container") is not None
    assert DOCKERFILE.count(f"ENTRYPOINT {json.dumps(LAUNCHER)}") == len(TARGETS)
    for kind in KINDS:
        built = REWARD_IMAGE if kind == "reward" else COMPUTE_IMAGE
        assert services()[kind]["command"] == [kind, "--config", CONFIG_FILE]
        assert f":-{built}}}:" in services()[kind]["image"]


@pytest.mark.parametrize("overlay", ["compose.yaml", "compose.secure.yaml"])
def test_the_configuration_is_written_where_services_read_it_by_a_command_that_exists(
    overlay: str,
) -> None:
    command = filled_in(services()["prepare"]["command"]).split()
    program, name, *first = services(ROOT / overlay)["prepare"]["entrypoint"]
    words = [*first, *command]
    assert tuple(words[-2:]) == PREPARED_FOLDER
    assert PREPARED_FOLDER[1] == str(Path(CONFIG_FILE).parent)
    assert (program, name) == PREPARE
    application = get_command(commands)
    context = application.make_context("sluice", [], resilient_parsing=True)
    context.resilient_parsing = False
    application.commands["prepare"].make_parser(context).parse_args(words)  # type: ignore[attr-defined]
    load_config(None, [word for word in words if "=" in word])


def test_all_services_see_the_runs_folder_and_the_jobs() -> None:
    mounts = {name: service["volumes"] for name, service in services().items()}
    assert all(each == mounts["prepare"] for each in mounts.values())
    assert f"run:{RUNS_MOUNT}" in mounts["trainer"]
    seen = {mount.split(":")[-2] if mount.endswith(":ro") else mount for mount in mounts["trainer"]}
    assert seen == {f"run:{RUNS_MOUNT}", JOBS_MOUNT}
    assert set(read(ROOT / "compose.yaml")["volumes"]) == {"run"}


def test_health_is_asked_of_the_service_that_the_container_runs() -> None:
    for kind in KINDS:
        test = services()[kind]["healthcheck"]["test"]
        assert test == ["CMD", *HEALTH_PROBE, kind]


def test_ports_stand_in_the_layout_alone_but_where_they_are_published() -> None:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    ports = {port for place in SERVICE_PORTS.values() for port in (place.port, place.health_port)}
    assert len(ports) == 2 * len(KINDS)
    assert not [port for port in ports if str(port) in text]
    for kind, service in services(ROOT / "compose.host.yaml").items():
        assert service["ports"][0].endswith(f":{SERVICE_PORTS[kind].port}")  # type: ignore[index]
        assert service["ports"][0].startswith("127.0.0.1:")


def test_the_overlay_of_the_live_page_publishes_on_loopback_where_it_is_served() -> None:
    (published,) = services(ROOT / "compose.dashboard.yaml")["trainer"]["ports"]
    assert filled_in(published) == f"127.0.0.1:{DASHBOARD_PORT}:{DASHBOARD_PORT}"


@pytest.mark.usefixtures("tried_scorers")
def test_the_overlay_of_the_live_page_has_it_served_with_tokens_and_refuses_it_without(
    tmp_path: Path,
) -> None:
    environment = services(ROOT / "compose.dashboard.yaml")["prepare"]["environment"]
    words = services(ROOT / "compose.secure.yaml")["prepare"]["entrypoint"][1:]
    assert list(environment) == [DASHBOARD_VARIABLE]
    arguments = ["--run-dir", str(tmp_path / "run"), *model_and_data(tmp_path / "job")]
    refused = CliRunner().invoke(commands, ["prepare", *arguments], env=environment)
    assert refused.exit_code != 0
    assert "sluice.security.token_file" in str(refused.exception)
    assert not (tmp_path / "run" / CONFIG_NAME).exists()
    taken = CliRunner().invoke(commands, [*words, *arguments], env=environment)
    assert taken.exit_code == 0, taken.output
    config = load_config(tmp_path / "run" / CONFIG_NAME, []).sluice
    assert (config.dashboard.host, config.dashboard.port) == ("0.0.0.0", DASHBOARD_PORT)
    assert config.security.token_file is not None


def test_a_container_is_started_again_as_often_as_a_process() -> None:
    most = RESTARTS_AFTER_SIGNALS.max_restarts
    assert most == RESTARTS_AFTER_ERRORS_TOO.max_restarts
    assert {services()[kind]["restart"] for kind in KINDS} == {f"on-failure:{most}"}
    assert "restart" not in services()["prepare"]


def test_a_container_is_given_longer_to_stop_than_its_launcher_takes() -> None:
    service = load_config(None, []).sluice
    longest_s = launcher_grace_s(service.shutdown_grace_s)
    assert service.rollout.drain_timeout_s < longest_s
    for kind in KINDS:
        grace_s = engine_grace_s(service.shutdown_grace_s)
        assert filled_in(services()[kind]["stop_grace_period"]) == f"{grace_s}s"
        assert grace_s > longest_s
        assert services()[kind]["init"] is True


@pytest.mark.parametrize(("overlay", "device"), [("gpu", "cuda"), ("npu", "npu")])
@pytest.mark.usefixtures("tried_scorers")
def test_an_overlay_with_devices_has_the_run_compute_on_them_and_never_on_the_cpu(
    tmp_path: Path, overlay: str, device: str
) -> None:
    environment = services(ROOT / f"compose.{overlay}.yaml")["prepare"]["environment"]
    assert environment[DEVICE_VARIABLE] == device
    arguments = ["--run-dir", str(tmp_path / "run"), *model_and_data(tmp_path / "job")]
    taken = CliRunner().invoke(commands, ["prepare", *arguments], env=environment)
    assert taken.exit_code == 0, taken.output
    config = load_config(tmp_path / "run" / CONFIG_NAME, [])
    assert (config.trainer.device, config.sluice.rollout.device) == (device, device)


@pytest.mark.parametrize("overlay", ["gpu", "npu"])
def test_a_variant_takes_no_image_that_was_built_for_another_one(overlay: str) -> None:
    def image(name: str, file: Path) -> str:
        return filled_in(services(file)[name]["image"])

    computing = {name for name, each in services().items() if "sluice-reward" not in each["image"]}
    file = ROOT / f"compose.{overlay}.yaml"
    assert set(services(file)) == computing == {"prepare", "trainer", "rollout"}
    assert {image(name, file) for name in computing} == {f"{COMPUTE_IMAGE}:{overlay}"}
    assert {image(name, ROOT / "compose.yaml") for name in computing} == {f"{COMPUTE_IMAGE}:local"}


def test_no_process_of_the_npu_variant_has_torch_load_torch_npu_automatically() -> None:
    found = services(ROOT / "compose.npu.yaml").values()
    assert {each["environment"][AUTOLOAD_VARIABLE] for each in found} == {"0"}


def test_images_run_as_nobody_in_particular_and_own_the_runs_folder() -> None:
    for target in TARGETS:
        stage = DOCKERFILE.split(f" AS {target}\n")[1].split("\nFROM ")[0]
        assert "\nUSER sluice\n" in stage
        assert f"--uid {USER_ID} " in stage
        assert f"chown sluice:sluice {RUNS_MOUNT}" in stage
        assert stage.index("USER") > stage.index("pip install")
    assert "RUN --mount" not in DOCKERFILE.replace("No RUN --mount", "")
    assert not DOCKERFILE.startswith("# syntax")


def test_a_changed_source_file_renews_no_layer_of_packages() -> None:
    packages = DOCKERFILE.split(" AS wheel\n")[0]
    copied = [line for line in packages.splitlines() if line.startswith("COPY ")]
    assert len(copied) == 4
    assert not [line for line in copied if re.search(r"\b(sluice|services|\.) ", line)]


def wanted(tmp_path: Path, *arguments: str) -> tuple[list[str], str]:
    script = ROOT / "deploy" / "docker" / "image_requirements.py"
    command = [sys.executable, str(script), arguments[0], str(tmp_path), *arguments[1:]]
    subprocess.run(command, cwd=ROOT, check=True)
    lines = (tmp_path / "requirements.txt").read_text(encoding="utf-8").splitlines()
    names = [re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() for line in lines]
    return names, (tmp_path / "constraints.txt").read_text(encoding="utf-8")


def test_the_reward_image_has_no_torch_and_the_other_one_has(tmp_path: Path) -> None:
    heavy = {"torch", "transformers", "safetensors", "tokenizers"}
    assert not heavy & set(wanted(tmp_path / "reward", "")[0])
    names, pins = wanted(tmp_path / "compute", "train")
    assert heavy <= set(names)
    assert {"tensorboard", "cryptography", "grpcio", "setuptools"} <= set(names)
    assert "\ntorch==" in pins


def test_what_a_vendors_image_brings_is_neither_asked_for_nor_pinned(tmp_path: Path) -> None:
    names, pins = wanted(tmp_path, "train", "torch,NumPy")
    assert "torch" not in names
    assert "numpy" not in names
    assert "\ntorch==" not in pins
    assert "\ntransformers==" in pins


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_image_for_cuda_has_an_engine_with_the_packages_that_it_was_resolved_with(
    engine: str, tmp_path: Path
) -> None:
    file = f"constraints-{engine}-cuda.txt"
    assert f"!{file}" in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    names, pins = wanted(tmp_path, f"{engine},train", "", file)
    assert {engine, "torch", "transformers", "tensorboard"} <= set(names)
    assert f"\n{engine}==" in pins
    assert "wheelhouse" not in DOCKERFILE.split(" AS cuda\n")[1]


def test_the_image_for_npus_keeps_the_torch_of_its_base(tmp_path: Path) -> None:
    without = re.search(r"/wanted/ascend (\S+)", DOCKERFILE)
    assert without is not None
    names, _ = wanted(tmp_path, "train", without[1])
    assert not {"torch", "transformers", "torch-npu", "vllm"} & set(names)
    stage = DOCKERFILE.split(" AS ascend\n")[1]
    assert "--system-site-packages" in stage
    assert "-c constraints" not in stage


def test_compose_builds_with_the_defaults_of_the_dockerfile() -> None:
    found = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    arguments = found["x-compute"]["build"]["args"]
    own = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
    default = {
        name: re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", arguments[name] or "") for name in arguments
    }
    common = own.keys() & default.keys()
    assert {"EXTRAS", "REWARD_EXTRAS", "BASE_IMAGE"} <= common
    assert {name: default[name] or '""' for name in common} == {name: own[name] for name in common}
