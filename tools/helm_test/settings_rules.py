"""The command that begins the run: sluice's own loader and checks take what the chart passes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path

from sluice.config.loading.loader import load_config
from sluice.config.rules.checks import check_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.launch.network_layout import PREPARE, RUNS_MOUNT, SERVICE_PORTS, network_settings
from tools.helm_test.documents import Rendered

# Options of `sluice prepare`, which a test of the command compares: the command itself needs
# packages that the chart does not.
PREPARE_OPTIONS = {"--quickstart", "--run-dir"}
_DEVICES = {"cpu": "cpu", "gpu": "cuda", "npu": "npu"}
# What `sluice prepare` adds where it makes the quickstart's model and data.
_QUICKSTART = (
    "actor_rollout_ref.model.path=/runs/run/assets/model",
    "data.train_files=/runs/run/assets/train.parquet",
    "data.val_files=/runs/run/assets/test.parquet",
    "data.max_prompt_length=64",
    "data.max_response_length=256",
    "reward.reward_kwargs.overlong_buffer_cfg.len=64",
)


def prepare_words(rendered: Rendered) -> list[str]:
    """The words behind `sluice prepare`."""
    containers = rendered.pod("trainer").spec["initContainers"]
    arguments = next(c["args"] for c in containers if c["name"] == "prepare")
    start = arguments.index(PREPARE[0])
    assert arguments[start : start + 2] == list(PREPARE)
    return [str(word) for word in arguments[start + 2 :]]


def loaded(rendered: Rendered) -> RunConfig:
    """The configuration that the services would read.

    Raises:
        ConfigError: the chart passes something that sluice refuses.
    """
    words = prepare_words(rendered)
    overrides = [word for word in words if "=" in word]
    run = rendered.values["run"]
    if run["quickstart"]:
        with as_file(files("sluice.quickstart") / "quickstart.yaml") as job:
            return _checked(job, [*_QUICKSTART, *network_settings(), *overrides])
    with tempfile.TemporaryDirectory() as scratch:
        job = Path(scratch) / "run.yaml"
        job.write_text(run["config"], encoding="utf-8")
        return _checked(job, [*network_settings(), *overrides])


def _checked(job: Path, overrides: list[str]) -> RunConfig:
    config = load_config(job, overrides)
    check_config(config, files=False)
    return config


def the_command_is_one_that_sluice_has(rendered: Rendered) -> Iterator[str]:
    """`sluice prepare` takes the words, and writes where the services read."""
    words = prepare_words(rendered)
    unknown = [each for each in words if each.startswith("--") and each not in PREPARE_OPTIONS]
    if unknown:
        yield f"sluice prepare has no {unknown}"
    names = [each for each in words[:-2] if "=" not in each and not each.startswith("--")]
    run = rendered.values["run"]
    wanted = 1 if run["config"] or run["configFile"] else 0
    if len(names) != wanted or (names and words[0] != names[0]):
        yield f"sluice prepare takes one configuration, first of all: {names}"
    folder = f"{RUNS_MOUNT}/{rendered.values['run']['name']}"
    if words[-2:] != ["--run-dir", folder]:
        yield f"begins the run in {words[-2:]}, not in {folder}"


def the_configuration_is_taken_and_says_what_the_chart_says(rendered: Rendered) -> Iterator[str]:
    """Services are found by their names, at the ports of the layout, on the values' devices."""
    try:
        config = loaded(rendered)
    except ConfigError as error:
        yield str(error)
        return
    values, service = rendered.values, config.sluice
    prefix = values["fullnameOverride"] or rendered.release
    for kind, place in SERVICE_PORTS.items():
        endpoint = getattr(service, kind).endpoint
        found = (endpoint.advertise, endpoint.port, endpoint.health_port)
        if found != (f"{prefix}-{kind}", place.port, place.health_port):
            yield f"{kind}: found at {found}"
    device = _DEVICES[values["devices"]["kind"]]
    ranks = values["trainer"]["ranks"]
    expected = {
        "trainer.device": (config.trainer.device, device),
        "sluice.rollout.device": (service.rollout.device, device),
        "trainer.n_gpus_per_node": (config.trainer.n_gpus_per_node, ranks),
        "trainer.nnodes": (config.trainer.nnodes, 1),
        "sluice.rollout.replicas": (service.rollout.replicas, 0),
        "actor_rollout_ref.rollout.tensor_model_parallel_size": (
            config.actor_rollout_ref.rollout.tensor_model_parallel_size,
            values["rollout"]["devicesPerReplica"],
        ),
        "sluice.trainer.replica_wait_timeout_s": (
            service.trainer.replica_wait_timeout_s,
            values["trainer"]["replicaWaitSeconds"],
        ),
    }
    for key, (found_value, wanted) in expected.items():
        if found_value != wanted:
            yield f"{key} = {found_value}, not {wanted}"
    yield from _security(rendered, config)
    yield from _metrics(rendered, config)


def _security(rendered: Rendered, config: RunConfig) -> Iterator[str]:
    security, values = config.sluice.security, rendered.values["security"]
    if not values["enabled"]:
        if security.tls != "off" or security.token_file:
            yield f"sluice.security = {security} although it is off"
        return
    mounts = rendered.pod("trainer").container["volumeMounts"]
    folder = next(mount["mountPath"] for mount in mounts if mount["name"] == "secrets")
    names = values["files"]
    found = (security.ca_file, security.cert_file, security.key_file, security.token_file)
    keys = ("ca", "certificate", "key", "tokens")
    if found != tuple(f"{folder}/{names[key]}" for key in keys):
        yield f"sluice.security names {found}, and {folder} is mounted"
    if (security.tls, security.server_name) != ("mtls", values["serverName"]):
        yield f"sluice.security.tls = {security.tls} for {security.server_name}"


def _metrics(rendered: Rendered, config: RunConfig) -> Iterator[str]:
    is_on = rendered.values["metrics"]["enabled"]
    for kind, place in SERVICE_PORTS.items():
        found = getattr(getattr(config.sluice, kind).endpoint, "metrics_port", None)
        if found != (place.metrics_port if is_on else None):
            yield f"{kind}: scraped at {found}"


SETTINGS_RULES = (
    the_command_is_one_that_sluice_has,
    the_configuration_is_taken_and_says_what_the_chart_says,
)
