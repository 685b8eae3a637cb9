"""The objects that a value set renders, and how to find one's way among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sluice.launch.network_layout import KINDS

Document = dict[str, Any]
COMPONENT = "app.kubernetes.io/component"
END_OF_RUN = "end-of-run"
_WORKLOADS = ("Job", "Deployment", "StatefulSet")


@dataclass(frozen=True, slots=True)
class Pod:
    """One workload's pod.

    Args:
        component: trainer, reward, rollout, or what ends the run.
        owner: the Job, Deployment or StatefulSet.
    """

    component: str
    owner: Document
    labels: Mapping[str, str]
    spec: Document

    @property
    def container(self) -> Document:
        """Its one container."""
        (found,) = self.spec["containers"]
        assert isinstance(found, dict)
        return found

    @property
    def containers(self) -> list[Document]:
        """All containers, those of the start first."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


@dataclass(frozen=True, slots=True)
class Rendered:
    """What one value set gives.

    Args:
        name: of the set.
        release: the release's name, which is also that of its objects' beginning.
        values: the chart's defaults with the set's values above them.
        documents: all objects.
    """

    name: str
    release: str
    values: Document
    documents: list[Document]

    def of_kind(self, kind: str) -> list[Document]:
        """All objects of a kind."""
        return [each for each in self.documents if each["kind"] == kind]

    def named(self, kind: str, name: str) -> Document | None:
        """The object of a kind with a name."""
        return next((e for e in self.of_kind(kind) if e["metadata"]["name"] == name), None)

    def pods(self) -> Iterator[Pod]:
        """The pods of all workloads."""
        for document in self.documents:
            if document["kind"] in _WORKLOADS:
                template = document["spec"]["template"]
                labels = template["metadata"]["labels"]
                yield Pod(labels[COMPONENT], document, labels, template["spec"])

    def pod(self, component: str) -> Pod:
        """The pod of one component."""
        (found,) = (pod for pod in self.pods() if pod.component == component)
        return found

    def services(self) -> list[Pod]:
        """The pods of the three services."""
        return [self.pod(kind) for kind in KINDS]

    def selected(self, labels: Mapping[str, str]) -> set[str]:
        """Components of the pods that a selector finds."""
        wanted = labels.items()
        return {pod.component for pod in self.pods() if wanted <= pod.labels.items()}
