"""Several sources in one run: how many groups of each are in a batch.

Every batch has the groups of every source that its share gives. A source is admitted and aged by
these alone, as a run with batches of that size: kept groups of a fast source never take the slots
of a slow one, and a batch waits for the source that lacks groups. So the shares are exact whatever
the sources' speed.
"""

from __future__ import annotations

from collections.abc import Mapping

MIN_YIELD = 0.02
"""Yields below this count as this much: a source that yields nothing now may do so later."""


def source_metric(source: str, name: str) -> str:
    """Return the name of a metric of one source; of a run without several it is `name`.

    A source is one of `sluice.sources`; a row's data source is another thing.
    """
    return f"sources/{source}/{name}" if source else name


def groups_by_share(shares: Mapping[str, float], batch_size: int) -> dict[str, int]:
    """Return the groups of each source in a batch, at least 1 each, by largest remainders.

    Args:
        shares: of the batch by source, each above 0; only their ratios matter.
        batch_size: B, groups in a train batch; at least as many as sources.
    """
    total = sum(shares.values())
    exact = {name: share / total * batch_size for name, share in shares.items()}
    groups = {name: max(1, int(exact_number)) for name, exact_number in exact.items()}
    while (num_missing := batch_size - sum(groups.values())) != 0:
        # Ties go to the source that comes first.
        step = 1 if num_missing > 0 else -1
        movable = [name for name in groups if step > 0 or groups[name] > 1]
        name = max(movable, key=lambda source: step * (exact[source] - groups[source]))
        groups[name] += step
    return groups


def shares_by_yield(shares: Mapping[str, float], yields: Mapping[str, float]) -> dict[str, float]:
    """Return the shares once some sources divide theirs by what their groups teach.

    The sources of `yields` divide the sum of their shares in proportion to share times yield; the
    others keep theirs. A source whose groups are all right or all wrong thus makes way for those
    that are mixed.

    Args:
        shares: as configured, by source.
        yields: share of groups that the filter keeps, in (0, 1], of the sources that take part.
    """
    weights = {
        name: shares[name] * max(MIN_YIELD, kept_share) for name, kept_share in yields.items()
    }
    together, divided = sum(shares[name] for name in weights), sum(weights.values())
    return {
        name: weights[name] / divided * together if name in weights else share
        for name, share in shares.items()
    }
