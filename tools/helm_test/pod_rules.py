"""What holds of every pod: commands, ports, probes, patience, rights and secrets."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from sluice.config.loading.loader import load_config
from sluice.launch.network_layout import (
    CONFIG_NAME,
    RUNS_MOUNT,
    SERVICE_PORTS,
    USER_ID,
    container_layout,
    launcher_grace_s,
)
from tools.helm_test.documents import END_OF_RUN, Document, Pod, Rendered
from tools.helm_test.value_sets import CHART

_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_HOST = ("hostNetwork", "hostPID", "hostIPC")
_CHART = CHART / "Chart.yaml"
_KINDS = {str(kind): kind for kind in SERVICE_PORTS}
_DEVICES = {"gpu": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}


def commands_are_the_specifications(rendered: Rendered) -> Iterator[str]:
    """A container runs what network_layout says, with the run's configuration."""
    config_file = f"{RUNS_MOUNT}/{rendered.values['run']['name']}/{CONFIG_NAME}"
    for pod in rendered.services():
        layout = container_layout(_KINDS[pod.component])
        if pod.container["command"] != list(layout.entrypoint):
            yield f"{pod.component}: command {pod.container['command']}"
        if pod.container["args"] != [pod.component, "--config", config_file]:
            yield f"{pod.component}: arguments {pod.container['args']}"


def ports_and_probes_are_the_specifications(rendered: Rendered) -> Iterator[str]:
    """Ports are those of the layout, and every probe asks the one where only health answers.

    Whether a pod is ready is asked by the name that the layout has for that, life by none.
    """
    with_metrics = rendered.values["metrics"]["enabled"]
    for pod in rendered.services():
        place, readiness = SERVICE_PORTS[_KINDS[pod.component]], _readiness(pod)
        wanted = {"grpc": place.port, "health": place.health_port}
        if with_metrics:
            wanted["metrics"] = place.metrics_port
        given = {each["name"]: each["containerPort"] for each in pod.container["ports"]}
        if given != wanted:
            yield f"{pod.component}: ports {given}, not {wanted}"
        for name in _PROBES:
            probe = pod.container.get(name, {})
            asked = readiness if name == "readinessProbe" else {}
            if probe.get("grpc") != {"port": place.health_port, **asked}:
                yield f"{pod.component}: {name} asks {probe}"
        yield from _patience(rendered, pod)


def _readiness(pod: Pod) -> dict[str, str]:
    name = container_layout(_KINDS[pod.component]).readiness
    return {"service": name} if name else {}


def _patience(rendered: Rendered, pod: Pod) -> Iterator[str]:
    """The model may load, at first and after a restart within the container."""
    needed_s = rendered.values[pod.component]["startupSeconds"]
    for name in ("startupProbe", "livenessProbe"):
        probe = pod.container.get(name, {})
        patience_s = probe.get("periodSeconds", 0) * probe.get("failureThreshold", 0)
        if patience_s < needed_s:
            yield f"{pod.component}: {name} gives up after {patience_s} s, not {needed_s} s"


def images_are_those_of_the_values(rendered: Rendered) -> Iterator[str]:
    """Tags stand there letter by letter, numbers too; without torch where it is not needed."""
    images, chart = rendered.values["image"], yaml.safe_load(_CHART.read_text(encoding="utf-8"))
    for pod in rendered.pods():
        image = images["reward" if pod.component in ("reward", END_OF_RUN) else "compute"]
        tag = str(image["tag"]) or chart["appVersion"]
        for container in pod.containers:
            if container["image"] != f"{image['repository']}:{tag}":
                yield f"{pod.component}, {container['name']}: image {container['image']}"


def pods_outlive_their_drain(rendered: Rendered) -> Iterator[str]:
    """Kubernetes kills nothing that sluice still gives time."""
    values, defaults = rendered.values, load_config(None, []).sluice
    grace_s = values["shutdownGraceSeconds"] or defaults.shutdown_grace_s
    drain_s = values["rollout"]["drainSeconds"] or defaults.rollout.drain_timeout_s
    for pod in rendered.services():
        given_s = pod.spec["terminationGracePeriodSeconds"]
        layout = container_layout(_KINDS[pod.component], grace_s)
        if given_s != layout.stop_grace_s or given_s <= max(launcher_grace_s(grace_s), drain_s):
            yield f"{pod.component}: grace {given_s} s, not {layout.stop_grace_s} s"


def nothing_is_privileged(rendered: Rendered) -> Iterator[str]:
    """Every pod keeps to the restricted standard, but for what values mount from the host."""
    for pod in rendered.pods():
        security = pod.spec.get("securityContext", {})
        if security.get("runAsUser") != USER_ID or security.get("runAsNonRoot") is not True:
            yield f"{pod.component}: runs as {security.get('runAsUser')}"
        if security.get("fsGroup") != USER_ID:
            yield f"{pod.component}: volumes are not its group's"
        if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.component}: no seccomp profile"
        yield from (f"{pod.component}: {name}" for name in _HOST if pod.spec.get(name))
        for container in pod.containers:
            yield from _container_rights(rendered, pod, container)


def _container_rights(rendered: Rendered, pod: Pod, container: Document) -> Iterator[str]:
    security = dict(container.get("securityContext", {}))
    values = rendered.values.get(pod.component, {})
    wanted = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": values.get("readOnlyRootFilesystem", True),
        "capabilities": {"drop": ["ALL"]},
    }
    if security != wanted:
        yield f"{pod.component}, {container['name']}: {security}"


def only_the_end_of_the_run_has_a_token(rendered: Rendered) -> Iterator[str]:
    """No service gets the API's token; who ends the run has a Role of three lines."""
    for account in rendered.of_kind("ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            yield f"{account['metadata']['name']}: mounts its token everywhere"
    for pod in rendered.pods():
        mounts = pod.spec.get("automountServiceAccountToken")
        if mounts is not (pod.component == END_OF_RUN):
            yield f"{pod.component}: token mounted: {mounts}"
        if rendered.named("ServiceAccount", pod.spec["serviceAccountName"]) is None:
            yield f"{pod.component}: no account {pod.spec['serviceAccountName']}"


def secrets_are_files(rendered: Rendered) -> Iterator[str]:
    """Keys and tokens are mounted for the pod's group alone, and are in no variable."""
    security = rendered.values["security"]
    for pod in rendered.pods():
        for container in pod.containers:
            if "envFrom" in container or "secretKeyRef" in str(container.get("env")):
                yield f"{pod.component}, {container['name']}: a secret in a variable"
    for pod in rendered.services():
        mounted = [v["secret"] for v in pod.spec["volumes"] if "secret" in v]
        wanted = [{"secretName": security["secretName"], "defaultMode": 0o440}]
        if mounted != (wanted if security["enabled"] else []):
            yield f"{pod.component}: secrets {mounted}"
        for container in pod.containers if security["enabled"] else ():
            mounts = [m for m in container["volumeMounts"] if m["name"] == "secrets"]
            if [mount.get("readOnly") for mount in mounts] != [True]:
                yield f"{pod.component}, {container['name']}: secrets are not there read-only"


def mounts_have_volumes(rendered: Rendered) -> Iterator[str]:
    """Whatever is mounted exists, and what libraries write to can be written."""
    for pod in rendered.pods():
        templates = pod.owner["spec"].get("volumeClaimTemplates", [])
        there = {each["name"] for each in pod.spec.get("volumes", [])}
        there |= {each["metadata"]["name"] for each in templates}
        for container in pod.containers:
            mounts = container.get("volumeMounts", [])
            missing = {each["name"] for each in mounts} - there
            if missing:
                yield f"{pod.component}, {container['name']}: no volume {sorted(missing)}"
            paths = [each["mountPath"] for each in mounts]
            if len(paths) != len(set(paths)):
                yield f"{pod.component}, {container['name']}: a path is mounted twice"
            needed = {"/tmp", RUNS_MOUNT}  # noqa: S108 in the container
            if pod.component != END_OF_RUN and not needed <= set(paths):
                yield f"{pod.component}, {container['name']}: mounts only {paths}"


def devices_are_those_of_the_values(rendered: Rendered) -> Iterator[str]:
    """Trainer and replicas ask for as many devices as the run's configuration takes."""
    values = rendered.values
    resource = values["devices"]["resource"] or _DEVICES.get(values["devices"]["kind"])
    counts = {
        "trainer": values["trainer"]["ranks"],
        "rollout": values["rollout"]["devicesPerReplica"],
    }
    for pod in rendered.services():
        limits = pod.container["resources"].get("limits", {})
        found = {key: value for key, value in limits.items() if "/" in key}
        count = counts.get(pod.component)
        wanted = {resource: count} if resource and count else {}
        if found != wanted:
            yield f"{pod.component}: devices {found}, not {wanted}"
        asked = [c["name"] for c in pod.spec["initContainers"] if "/" in str(c["resources"])]
        if asked:
            yield f"{pod.component}: {asked} ask for devices"


POD_RULES = (
    commands_are_the_specifications,
    ports_and_probes_are_the_specifications,
    images_are_those_of_the_values,
    pods_outlive_their_drain,
    nothing_is_privileged,
    only_the_end_of_the_run_has_a_token,
    secrets_are_files,
    mounts_have_volumes,
    devices_are_those_of_the_values,
)
