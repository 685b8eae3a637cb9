"""What was computed for conversations that may continue.

A sample that ends leaves a copy of its keys and values here, under the name of its conversation. A
later prompt of the same name takes as much of it as its tokens agree with, so that a retry and a
branch find their part too. The copies lie beside the slots: what runs never waits for them.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from services.rollout.engines.embedded.decoder import KnownPrefix, TokenRow


class KeptPrefixes:
    """The last prefix of each conversation; the least recently used ones leave first.

    Args:
        max_tokens: of all prefixes together; 0: nothing is kept.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._by_name: OrderedDict[str, KnownPrefix] = OrderedDict()

    def put(self, name: str, prefix: KnownPrefix) -> None:
        """Keep a prefix in place of the conversation's earlier one."""
        self._remove(name)
        if len(prefix.tokens) > self.max_tokens:
            return
        while self.num_tokens + len(prefix.tokens) > self.max_tokens:
            self._remove(next(iter(self._by_name)))
        self._by_name[name] = prefix
        self.num_tokens += len(prefix.tokens)

    def find(self, name: str, tokens: TokenRow) -> KnownPrefix | None:
        """Return the kept beginning of `tokens`, which leaves at least one of them to compute."""
        kept = self._by_name.get(name)
        if kept is None:
            return None
        self._by_name.move_to_end(name)
        most = min(len(kept.tokens), len(tokens) - 1)
        differs = np.flatnonzero(kept.tokens[:most] != tokens[:most])
        shared = int(differs[0]) if differs.size else most
        return kept.cut(shared) if shared > 0 else None

    def clear(self) -> None:
        """Forget all: other weights computed them."""
        self._by_name.clear()
        self.num_tokens = 0

    def _remove(self, name: str) -> None:
        if (old := self._by_name.pop(name, None)) is not None:
            self.num_tokens -= len(old.tokens)
