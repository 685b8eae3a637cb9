"""Metric names that MLflow takes."""

from __future__ import annotations

import re

_REFUSED = re.compile(r"[^\w\-. /]", re.ASCII)
_LONGEST = 250


def mlflow_name(name: str) -> str:
    """`name` with ``@`` as ``_at_`` and every other refused character as ``_``.

    MLflow reads names as paths: empty, ``.`` and ``..`` parts go. At most 250 characters are kept.
    """
    mapped = _REFUSED.sub("_", name.replace("@", "_at_"))
    parts = [part for part in mapped.split("/") if part not in {"", ".", ".."}]
    return "/".join(parts)[:_LONGEST].rstrip("/") or "_"
