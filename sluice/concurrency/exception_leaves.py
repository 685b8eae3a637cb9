"""The errors inside exception groups, which task groups nest."""

from __future__ import annotations


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """All errors of a group and of the groups in it, in order."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
