"""The jars of the quickstart with other numbers: a test of a policy that was trained to look."""

from __future__ import annotations

from sluice.quickstart.jar_environment import Jars


class BlindJars(Jars):
    """What the policy reads has nothing to do with the jars."""

    def reset(self, extra_info: dict[str, dict[str, int]], **row: object) -> None:
        """Fill the jars with the numbers of their neighbours."""
        super().reset(extra_info, **row)
        letters = sorted(self._jars)
        self._jars = {one: self._jars[letters[k - 1]] for k, one in enumerate(letters)}
