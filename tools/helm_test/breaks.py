"""Faults put into rendered objects: each rule has to see its own, or it proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

from tools.helm_test import (
    monitoring_rules,
    network_rules,
    object_rules,
    pod_rules,
    settings_rules,
)
from tools.helm_test.documents import END_OF_RUN, Document, Rendered

Rule = Callable[[Rendered], Iterator[str]]
RULES: tuple[Rule, ...] = (
    *pod_rules.POD_RULES,
    *object_rules.OBJECT_RULES,
    *network_rules.NETWORK_RULES,
    *settings_rules.SETTINGS_RULES,
    *monitoring_rules.MONITORING_RULES,
)


@dataclass(frozen=True, slots=True)
class Break:
    """A fault.

    Args:
        rule: which has to see it.
        change: puts it into the objects.
        value_set: whose objects.
    """

    rule: Rule
    change: Callable[[Rendered], object]
    value_set: str = "defaults"


def _container(rendered: Rendered, component: str = "trainer") -> Document:
    return rendered.pod(component).container


def _prepare(rendered: Rendered) -> list[str]:
    containers = rendered.pod("trainer").spec["initContainers"]
    arguments = next(c["args"] for c in containers if c["name"] == "prepare")
    assert isinstance(arguments, list)
    return arguments


def _policy(rendered: Rendered, component: str) -> Document:
    name = f"{rendered.values['fullnameOverride'] or rendered.release}-{component}"
    policy = rendered.named("NetworkPolicy", name)
    assert policy is not None
    spec = policy["spec"]
    assert isinstance(spec, dict)
    return spec


def _first(rendered: Rendered, kind: str) -> Document:
    return rendered.of_kind(kind)[0]


def _relabelings(rendered: Rendered) -> list[Document]:
    (endpoint,) = _first(rendered, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert isinstance(endpoint["relabelings"], list)
    return endpoint["relabelings"]


def _drop_relabeling(rendered: Rendered, number: int) -> None:
    _relabelings(rendered).pop(number)


BREAKS: tuple[Break, ...] = (
    Break(
        pod_rules.commands_are_the_specifications,
        lambda r: _container(r)["args"].__setitem__(2, "/runs/other/config.yaml"),
    ),
    Break(
        pod_rules.ports_and_probes_are_the_specifications,
        lambda r: _container(r, "reward")["readinessProbe"]["grpc"].update(port=7002),
    ),
    Break(
        pod_rules.ports_and_probes_are_the_specifications,
        lambda r: _container(r, "rollout")["startupProbe"].update(failureThreshold=3),
    ),
    Break(
        pod_rules.ports_and_probes_are_the_specifications,
        lambda r: _container(r, "rollout")["readinessProbe"]["grpc"].update(service=""),
    ),
    Break(
        pod_rules.images_are_those_of_the_values,
        lambda r: _container(r).update(image="sluice:2.0261122e+07"),
        "everything-on",
    ),
    Break(
        pod_rules.pods_outlive_their_drain,
        lambda r: r.pod("rollout").spec.update(terminationGracePeriodSeconds=15),
    ),
    Break(
        pod_rules.nothing_is_privileged,
        lambda r: _container(r)["securityContext"].update(privileged=True),
    ),
    Break(
        pod_rules.nothing_is_privileged,
        lambda r: r.pod(END_OF_RUN).spec["securityContext"].update(runAsUser=0),
    ),
    Break(
        pod_rules.only_the_end_of_the_run_has_a_token,
        lambda r: r.pod("rollout").spec.update(automountServiceAccountToken=True),
    ),
    Break(
        pod_rules.secrets_are_files,
        lambda r: _container(r)["env"].append(
            {"name": "T", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}
        ),
        "secure",
    ),
    Break(
        pod_rules.secrets_are_files,
        lambda r: r.pod("reward").spec["volumes"][-1]["secret"].update(defaultMode=0o444),
        "secure",
    ),
    Break(
        pod_rules.mounts_have_volumes,
        lambda r: _container(r)["volumeMounts"].append({"name": "none", "mountPath": "/none"}),
    ),
    Break(
        pod_rules.devices_are_those_of_the_values,
        lambda r: _container(r)["resources"]["limits"].update({"nvidia.com/gpu": 1}),
        "gpu",
    ),
    Break(
        object_rules.selectors_find_their_pods,
        lambda r: _first(r, "Service")["spec"]["selector"].popitem(),
    ),
    Break(
        object_rules.job_files_are_the_values,
        lambda r: _first(r, "ConfigMap")["data"].update({"my_reward.py": ""}),
        "existing-storage",
    ),
    Break(
        object_rules.names_are_unique_and_lead_somewhere,
        lambda r: _first(r, "PersistentVolumeClaim")["metadata"].update(name="other"),
    ),
    Break(
        object_rules.names_are_unique_and_lead_somewhere,
        lambda r: _first(r, "Service")["spec"].pop("clusterIP"),
    ),
    Break(
        object_rules.budgets_cover_what_the_values_say,
        lambda r: r.documents.remove(_first(r, "PodDisruptionBudget")),
    ),
    Break(
        object_rules.scaling_has_one_owner,
        lambda r: r.pod("rollout").owner["spec"].update(replicas=2),
        "autoscaling",
    ),
    Break(
        object_rules.scaling_has_one_owner,
        lambda r: _first(r, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"].update(
            name="sluice-reward"
        ),
        "autoscaling",
    ),
    Break(
        object_rules.the_trainers_job_ends_as_the_launcher_does,
        lambda r: r.pod("trainer").owner["spec"].update(backoffLimit=6),
    ),
    Break(
        object_rules.the_trainers_job_ends_as_the_launcher_does,
        lambda r: r.pod("trainer").owner["spec"]["podFailurePolicy"]["rules"].reverse(),
    ),
    Break(
        object_rules.the_run_begins_in_order,
        lambda r: r.pod("trainer").spec["initContainers"].pop(0),
    ),
    Break(
        object_rules.what_ends_the_run_may_do_just_that,
        lambda r: _first(r, "Role")["rules"][1].pop("resourceNames"),
    ),
    Break(
        network_rules.services_talk_to_each_other_and_to_nobody_else,
        lambda r: _policy(r, "reward")["ingress"][0]["ports"].append(
            {"protocol": "TCP", "port": 7102}
        ),
    ),
    Break(
        network_rules.services_talk_to_each_other_and_to_nobody_else,
        lambda r: _policy(r, "rollout")["egress"].pop(0),
    ),
    Break(
        network_rules.outsiders_are_those_of_the_values,
        lambda r: _policy(r, "trainer")["ingress"].append({"ports": [{"port": 7000}]}),
    ),
    Break(
        network_rules.every_pod_has_a_policy,
        lambda r: r.documents.remove(_first(r, "NetworkPolicy")),
    ),
    Break(
        settings_rules.the_command_is_one_that_sluice_has,
        lambda r: _prepare(r).insert(-2, "--no-such-option"),
    ),
    Break(
        settings_rules.the_configuration_is_taken_and_says_what_the_chart_says,
        lambda r: _prepare(r).insert(-2, "trainer.n_gpus_per_nod=2"),
    ),
    Break(
        settings_rules.the_configuration_is_taken_and_says_what_the_chart_says,
        lambda r: _prepare(r).insert(-2, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"),
        "job-of-another-cluster",
    ),
    Break(
        settings_rules.the_configuration_is_taken_and_says_what_the_chart_says,
        lambda r: _prepare(r).insert(-2, "sluice.security.ca_file=/elsewhere/ca.pem"),
        "secure",
    ),
    *(
        Break(
            monitoring_rules.series_carry_the_labels_that_alerts_go_by,
            partial(_drop_relabeling, number=number),
            "monitoring",
        )
        for number in range(3)
    ),
    Break(
        monitoring_rules.series_carry_the_labels_that_alerts_go_by,
        lambda r: _relabelings(r)[0].update(replacement="my-sluice"),
        "monitoring",
    ),
    Break(
        monitoring_rules.rules_and_alerts_are_the_profiles,
        lambda r: _first(r, "PrometheusRule")["spec"]["groups"][0]["rules"].pop(),
        "monitoring",
    ),
    Break(
        monitoring_rules.rules_and_alerts_are_the_profiles,
        lambda r: _first(r, "PrometheusRule")["metadata"]["labels"].pop("release"),
        "monitoring",
    ),
    Break(
        monitoring_rules.dashboards_are_the_profiles,
        lambda r: r.documents.remove(_first(r, "ConfigMap")),
        "monitoring",
    ),
    Break(
        monitoring_rules.dashboards_are_the_profiles,
        lambda r: _first(r, "ConfigMap")["metadata"]["labels"].pop("grafana_dashboard"),
        "monitoring",
    ),
)


def unseen_breaks(rendered: Mapping[str, Rendered]) -> Iterator[str]:
    """Faults that no rule saw, and rules that no fault was tried on."""
    for number, each in enumerate(BREAKS):
        intact = rendered[each.value_set]
        broken = replace(intact, documents=deepcopy(intact.documents))
        each.change(broken)
        if not list(each.rule(broken)):
            yield f"fault {number}: {each.rule.__name__} does not see it"
    tried = {each.rule for each in BREAKS}
    yield from (f"{rule.__name__}: no fault is tried" for rule in RULES if rule not in tried)
