"""Objects against Kubernetes' own schemas, strictly: no unknown field, no wrong type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import kubernetes_validate

from tools.helm_test.documents import Document

OLDEST = "1.27"
# Schemas of extensions are not in the package.
_EXTENSIONS = ("monitoring.coreos.com/",)


def versions() -> tuple[str, str]:
    """The oldest Kubernetes that the chart is for, and the newest with a schema here."""
    return OLDEST, str(kubernetes_validate.latest_version())


def schema_problems(documents: Iterable[Document], version: str) -> Iterator[str]:
    """What a version of Kubernetes would refuse."""
    for document in documents:
        name = f"{document['kind']} {document['metadata']['name']}"
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(str(part) for part in error.path)
            yield f"{name}, Kubernetes {version}: {path}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError as error:
            if not str(document["apiVersion"]).startswith(_EXTENSIONS):
                yield f"{name}, Kubernetes {version}: {error}"
