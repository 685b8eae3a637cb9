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
