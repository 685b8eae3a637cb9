"""What holds between the objects: selectors, names, budgets, scaling, the trainer's Job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from sluice.launch.network_layout import KINDS, RUNS_MOUNT, container_layout
from sluice.launch.processes.supervisor import EXIT_FAILED
from sluice.launch.service_spec import RESTARTS_AFTER_SIGNALS
from tools.helm_test.documents import COMPONENT, END_OF_RUN, Document, Rendered


def selectors_find_their_pods(rendered: Rendered) -> Iterator[str]:
    """Every selector finds the pods of one component, the one that its object is of."""
    for document in rendered.documents:
        labels = _selector(document)
        if labels is None:
            continue
        found = rendered.selected(labels)
        wanted = document["metadata"]["labels"][COMPONENT]
        if found != {wanted}:
            name = f"{document['kind']} {document['metadata']['name']}"
            yield f"{name}: selects {sorted(found)}, not {wanted}"


def _selector(document: Document) -> Mapping[str, str] | None:
    spec = document.get("spec", {})
    found = spec.get("podSelector") or spec.get("selector")
    if document["kind"] == "PodMonitor" or not isinstance(found, dict):
        return None
    labels = found.get("matchLabels", found)
    assert isinstance(labels, dict)
    return labels


def names_are_unique_and_lead_somewhere(rendered: Rendered) -> Iterator[str]:
    """No two objects share a name, and claims, maps and services that pods name are there."""
    names = Counter((each["kind"], each["metadata"]["name"]) for each in rendered.documents)
    yield from (f"{name} is there {count} times" for name, count in names.items() if count > 1)
    storage = rendered.values["storage"]
    given = {storage["runs"]["existingClaim"], storage["jobs"]["existingClaim"]}
    for pod in rendered.services():
        for volume in pod.spec["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            made = rendered.named("PersistentVolumeClaim", claim) if claim else None
            if claim and claim not in given and made is None:
                yield f"{pod.component}: no claim {claim}"
            config_map = volume.get("configMap", {}).get("name")
            if config_map and rendered.named("ConfigMap", config_map) is None:
                yield f"{pod.component}: no ConfigMap {config_map}"
        name = f"{_prefix(rendered)}-{pod.component}"
        service = rendered.named("Service", name)
        if service is None or service["spec"].get("clusterIP") != "None":
            yield f"{name}: no headless service, so ports that a pod draws are not reached"
        elif service["spec"].get("publishNotReadyAddresses") is not True:
            yield f"{name}: not found before it is ready, and it gets ready by being found"


def _prefix(rendered: Rendered) -> str:
    return str(rendered.values["fullnameOverride"] or rendered.release)


def budgets_cover_what_the_values_say(rendered: Rendered) -> Iterator[str]:
    """Each budget that is on is there for its pods, and no other is."""
    budgets = {
        each["metadata"]["labels"][COMPONENT]: each["spec"]
        for each in rendered.of_kind("PodDisruptionBudget")
    }
    for kind in KINDS:
        given = rendered.values[kind]["podDisruptionBudget"]
        if given["enabled"] != (kind in budgets):
            yield f"{kind}: budget enabled: {given['enabled']}, there: {kind in budgets}"
        spec = budgets.get(kind, {})
        if spec and spec.get("maxUnavailable") != given.get("maxUnavailable"):
            yield f"{kind}: budget {spec}"
        if spec and ("maxUnavailable" in spec) == ("minAvailable" in spec):
            yield f"{kind}: a budget has one of maxUnavailable and minAvailable"


def scaling_has_one_owner(rendered: Rendered) -> Iterator[str]:
    """Either the metric or the values say how many replicas there are; one keeps each ledger."""
    values = rendered.values["rollout"]
    owner = rendered.pod("rollout").owner
    scalers = rendered.of_kind("HorizontalPodAutoscaler")
    is_on = values["autoscaling"]["enabled"]
    if is_on != bool(scalers) or is_on == ("replicas" in owner["spec"]):
        yield f"rollout: autoscaling {is_on}, with replicas {owner['spec'].get('replicas')}"
    for scaler in scalers:
        target, metric = scaler["spec"]["scaleTargetRef"], scaler["spec"]["metrics"][0]["external"]
        wanted = {key: owner[key] for key in ("apiVersion", "kind")}
        if target != {**wanted, "name": owner["metadata"]["name"]}:
            yield f"rollout: scales {target}"
        if metric["metric"]["name"] != values["autoscaling"]["metric"]["name"]:
            yield f"rollout: scaled by {metric}"
    for kind in KINDS:
        spec = rendered.pod(kind).owner["spec"]
        count = spec.get("parallelism", spec.get("replicas", 1))
        if container_layout(kind).keeps_state and count != 1:
            yield f"{kind}: {count} at a time, which all write the same files"


def the_trainers_job_ends_as_the_launcher_does(rendered: Rendered) -> Iterator[str]:
    """Its pods are replaced as a process would be, and not once the launcher has given up."""
    spec = rendered.pod("trainer").owner["spec"]
    if spec["template"]["spec"]["restartPolicy"] != "Never":
        yield "trainer: a pod failure policy wants restartPolicy Never"
    given = rendered.values["trainer"]["backoffLimit"]
    if spec["backoffLimit"] != (RESTARTS_AFTER_SIGNALS.max_restarts if given is None else given):
        yield f"trainer: backoffLimit {spec['backoffLimit']}"
    rules = {rule["action"]: rule for rule in spec["podFailurePolicy"]["rules"]}
    codes = rules.get("FailJob", {}).get("onExitCodes", {})
    if codes != {"containerName": "trainer", "operator": "In", "values": [EXIT_FAILED]}:
        yield f"trainer: fails for good with {codes}"
    conditions = rules.get("Ignore", {}).get("onPodConditions", [])
    if conditions != [{"type": "DisruptionTarget", "status": "True"}]:
        yield f"trainer: passes over {conditions}"
    if spec["podFailurePolicy"]["rules"][0]["action"] != "Ignore":
        yield "trainer: a drained node would count as a failure"


def the_run_begins_in_order(rendered: Rendered) -> Iterator[str]:
    """The trainer's pod begins the run alone; the others wait for it."""
    prefix, run = _prefix(rendered), f"{RUNS_MOUNT}/{rendered.values['run']['name']}"
    seconds = str(rendered.values["initWaitSeconds"])
    reward = f"{prefix}-reward:{container_layout('reward').place.port}"
    wanted = {
        "trainer": [["alone", f"{prefix}-trainer", seconds], ["port", reward, seconds]],
        "reward": [["run", run, seconds]],
        "rollout": [["run", run, seconds]],
    }
    for pod in rendered.services():
        waits = [c["args"][1:] for c in pod.spec["initContainers"] if c["command"][0] == "python"]
        if waits != wanted[pod.component]:
            yield f"{pod.component}: waits for {waits}"
    names = [each["name"] for each in rendered.pod("trainer").spec["initContainers"]]
    if names != ["wait-until-alone", "prepare", "wait-for-reward"]:
        yield f"trainer: starts with {names}"


def what_ends_the_run_may_do_just_that(rendered: Rendered) -> Iterator[str]:
    """It asks for the trainer's Job and scales the other two, and has no other right."""
    if not rendered.values["endOfRun"]["scaleDown"]:
        if rendered.of_kind("Role"):
            yield "a Role that nobody needs"
        return
    trainer = rendered.pod("trainer").owner["metadata"]["name"]
    rollout, reward = (rendered.pod(k).owner["metadata"]["name"] for k in ("rollout", "reward"))
    arguments = rendered.pod(END_OF_RUN).container["args"][2:]
    if arguments != [trainer, f"deployments/{rollout}", f"statefulsets/{reward}"]:
        yield f"end of run: watches and scales {arguments}"
    (role,) = rendered.of_kind("Role")
    wanted = [
        (["batch"], ["jobs"], [trainer], ["get"]),
        (["apps"], ["deployments/scale"], [rollout], ["patch"]),
        (["apps"], ["statefulsets/scale"], [reward], ["patch"]),
    ]
    keys = ("apiGroups", "resources", "resourceNames", "verbs")
    found = [tuple(rule.get(key) for key in keys) for rule in role["rules"]]
    if found != wanted:
        yield f"end of run: rights {found}"
    (binding,) = rendered.of_kind("RoleBinding")
    account = rendered.pod(END_OF_RUN).spec["serviceAccountName"]
    if [each["name"] for each in binding["subjects"]] != [account]:
        yield f"end of run: rights for {binding['subjects']}"


def job_files_are_the_values(rendered: Rendered) -> Iterator[str]:
    """Configuration and files of the job reach the pods letter by letter."""
    run = rendered.values["run"]
    wanted = {**({"run.yaml": run["config"]} if run["config"] else {}), **run["files"]}
    job = rendered.named("ConfigMap", f"{_prefix(rendered)}-job")
    found = job["data"] if job else {}
    if found != wanted:
        yield f"job: {found}, not {wanted}"


OBJECT_RULES = (
    job_files_are_the_values,
    selectors_find_their_pods,
    names_are_unique_and_lead_somewhere,
    budgets_cover_what_the_values_say,
    scaling_has_one_owner,
    the_trainers_job_ends_as_the_launcher_does,
    the_run_begins_in_order,
    what_ends_the_run_may_do_just_that,
)
