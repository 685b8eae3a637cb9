"""Which ports the network policies let through, held against the protocol."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.launch.network_layout import KINDS, SERVICE_PORTS
from tools.helm_test.documents import END_OF_RUN, Document, Rendered

# (from, to, first port, last port)
Flow = tuple[str, str, int, int]
# docs/protocol.md, "Who calls whom".
_CALLS = (
    ("trainer", "reward"),
    ("trainer", "rollout"),
    ("rollout", "trainer"),
    ("reward", "rollout"),
)
# Members of a transfer group connect with each other; there is one trainer.
_TRANSFERS = (("trainer", "rollout"), ("rollout", "trainer"), ("rollout", "rollout"))
_PORTS = {str(kind): place.port for kind, place in SERVICE_PORTS.items()}


def services_talk_to_each_other_and_to_nobody_else(rendered: Rendered) -> Iterator[str]:
    """Exactly the flows that the protocol needs pass both sides' policies."""
    policies = rendered.of_kind("NetworkPolicy")
    if not rendered.values["networkPolicy"]["enabled"]:
        if policies:
            yield "network policies although they are off"
        return
    into, out = set[Flow](), set[Flow]()
    for policy in policies:
        (component,) = rendered.selected(policy["spec"]["podSelector"]["matchLabels"])
        if set(policy["spec"]["policyTypes"]) != {"Ingress", "Egress"}:
            yield f"{component}: a policy of one direction only"
        for rule in policy["spec"].get("ingress") or ():
            into |= {(o, component, *p) for o in _pods(rendered, rule, "from") for p in _tcp(rule)}
        for rule in policy["spec"].get("egress") or ():
            out |= {(component, o, *p) for o in _pods(rendered, rule, "to") for p in _tcp(rule)}
    wanted = _wanted(rendered)
    for title, found in (("ingress", into), ("egress", out)):
        yield from (f"{title}: {flow} is let through" for flow in sorted(found - wanted))
        yield from (f"{title}: {flow} is kept out" for flow in sorted(wanted - found))


def _wanted(rendered: Rendered) -> set[Flow]:
    ports = rendered.values["networkPolicy"]["transferPorts"]
    calls = {(caller, served, _PORTS[served], _PORTS[served]) for caller, served in _CALLS}
    return calls | {(one, other, ports["first"], ports["last"]) for one, other in _TRANSFERS}


def _pods(rendered: Rendered, rule: Document, side: str) -> Iterator[str]:
    """Components of this release that a rule's peers are; other namespaces' pods are no such."""
    for peer in rule.get(side, ()):
        if set(peer) == {"podSelector"}:
            yield from rendered.selected(peer["podSelector"]["matchLabels"])


def _tcp(rule: Document) -> Iterator[tuple[int, int]]:
    for port in rule["ports"]:
        yield port["port"], port.get("endPort", port["port"])


def outsiders_are_those_of_the_values(rendered: Rendered) -> Iterator[str]:
    """Beside the services only clients, Prometheus, names and the API server pass."""
    values = rendered.values["networkPolicy"]
    for policy in rendered.of_kind("NetworkPolicy"):
        (component,) = rendered.selected(policy["spec"]["podSelector"]["matchLabels"])
        into = [r for r in policy["spec"].get("ingress") or () if not _is_own(r, "from")]
        out = [r for r in policy["spec"].get("egress") or () if not _is_own(r, "to")]
        wanted_in = _wanted_ingress(rendered, component)
        if into != wanted_in:
            yield f"{component}: called by {into}, not {wanted_in}"
        names = [
            {"protocol": protocol, "port": port}
            for port in values["dnsPorts"]
            for protocol in ("UDP", "TCP")
        ]
        api = [{"protocol": "TCP", "port": port} for port in values["apiServerPorts"]]
        wanted_out = [{"ports": names}, *values["extraEgress"]]
        if component == END_OF_RUN:
            wanted_out = [{"ports": api}, {"ports": names}]
        if out != wanted_out:
            yield f"{component}: calls {out}, not {wanted_out}"


def _is_own(rule: Document, side: str) -> bool:
    return any(set(peer) == {"podSelector"} for peer in rule.get(side, ()))


def _wanted_ingress(rendered: Rendered, component: str) -> list[Document]:
    values, wanted = rendered.values, []
    kind = next((kind for kind in KINDS if kind == component), None)
    if kind is None:
        return []
    if clients := values["networkPolicy"]["clients"]:
        port = {"protocol": "TCP", "port": SERVICE_PORTS[kind].port}
        wanted.append({"from": clients, "ports": [port]})
    if values["metrics"]["enabled"]:
        space = {"kubernetes.io/metadata.name": values["networkPolicy"]["monitoringNamespace"]}
        port = {"protocol": "TCP", "port": SERVICE_PORTS[kind].metrics_port}
        peer = {"namespaceSelector": {"matchLabels": space}}
        wanted.append({"from": [peer], "ports": [port]})
    return wanted


def every_pod_has_a_policy(rendered: Rendered) -> Iterator[str]:
    """A pod that no policy selects would be open to all."""
    if not rendered.values["networkPolicy"]["enabled"]:
        return
    covered = set[str]()
    for policy in rendered.of_kind("NetworkPolicy"):
        covered |= rendered.selected(policy["spec"]["podSelector"]["matchLabels"])
    yield from (f"{p.component}: no policy" for p in rendered.pods() if p.component not in covered)


NETWORK_RULES = (
    services_talk_to_each_other_and_to_nobody_else,
    outsiders_are_those_of_the_values,
    every_pod_has_a_policy,
)
