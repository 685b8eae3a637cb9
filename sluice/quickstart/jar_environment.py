"""The environment of the task `jars`, as a user would write one: it imports nothing of sluice."""


class Jars:
    """Ten jars hold numbers that the prompt does not show."""

    def reset(self, extra_info: dict[str, dict[str, int]], **_row: object) -> None:
        """Fill the jars from the row."""
        self._jars = extra_info["jars"]

    def look(self, jar: str) -> str:
        """Look into a jar.

        Args:
            jar: its letter.
        """
        return str(self._jars[jar])


class BlindJars(Jars):
    """The same, but what the policy reads has nothing to do with the jars: a test of a policy."""

    def reset(self, extra_info: dict[str, dict[str, int]], **row: object) -> None:
        """Fill the jars with the numbers of their neighbours."""
        super().reset(extra_info, **row)
        letters = sorted(self._jars)
        self._jars = {one: self._jars[letters[k - 1]] for k, one in enumerate(letters)}
