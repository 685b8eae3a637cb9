"""One digest for the names, dtypes and shapes of a model's weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from sluice.types import TensorSpec

_DIGEST_BYTES = 16


def layout_digest(tensors: Iterable[TensorSpec]) -> str:
    """Hex digest that two processes share exactly if their weights fit each other.

    The order counts, since it is the order on the wire.
    """
    layout = [[spec.name, spec.dtype, list(spec.shape)] for spec in tensors]
    return hashlib.blake2b(json.dumps(layout).encode(), digest_size=_DIGEST_BYTES).hexdigest()
