"""What was computed for conversations that may continue.

A sample that ends leaves a copy of its keys and values here, under the name of its conversation. A
later prompt of that name takes what it shares with one of them, so that a retry, a branch and each
of several agents find their part too. The copies lie beside the slots: what runs never waits for
them.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from services.rollout.engines.embedded.decoder import KnownPrefix, TokenRow

_MOST_MASKED = 1 << 27
"""Most places of the mask by which new tokens see the prompt; a whole prompt needs no mask."""


class KeptPrefixes:
    """Prefixes by the name of their conversation; the least recently used ones leave first.

    Args:
        max_tokens: of all prefixes together; 0: nothing is kept.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._names: OrderedDict[KnownPrefix, str] = OrderedDict()
        self._by_name: dict[str, list[KnownPrefix]] = {}

    def put(self, name: str, prefix: KnownPrefix) -> None:
        """Keep a prefix, unless it alone is beyond the bound."""
        if len(prefix.tokens) > self.max_tokens:
            return
        while self.num_tokens + len(prefix.tokens) > self.max_tokens:
            self._remove(next(iter(self._names)))
        self._names[prefix] = name
        self._by_name.setdefault(name, []).append(prefix)
        self.num_tokens += len(prefix.tokens)

    def take(self, name: str, tokens: TokenRow) -> KnownPrefix | None:
        """Return the longest kept beginning of `tokens`, which leaves at least one to compute;
        ``None``: there is none, or the rest is so long that the whole prompt is cheaper.

        A prefix that is used to its end leaves: the sample's own will take its place.
        """
        kept = self._by_name.get(name, ())
        shared, best = max(
            ((_num_shared(prefix.tokens, tokens[:-1]), prefix) for prefix in kept),
            key=lambda found: found[0],
            default=(0, None),
        )
        is_dear = (len(tokens) - shared) * len(tokens) > _MOST_MASKED
        if best is None or shared == 0 or is_dear:
            return None
        if shared == len(best.tokens):
            self._remove(best)
        else:
            self._names.move_to_end(best)
        return best.cut(shared)

    def clear(self) -> None:
        """Forget all: other weights computed them."""
        self._names.clear()
        self._by_name.clear()
        self.num_tokens = 0

    def _remove(self, prefix: KnownPrefix) -> None:
        name = self._names.pop(prefix)
        self._by_name[name].remove(prefix)
        if not self._by_name[name]:
            del self._by_name[name]
        self.num_tokens -= len(prefix.tokens)


def _num_shared(first: TokenRow, second: TokenRow) -> int:
    """Return how many tokens two rows begin with alike."""
    most = min(len(first), len(second))
    differs = np.flatnonzero(first[:most] != second[:most])
    return int(differs[0]) if differs.size else most
