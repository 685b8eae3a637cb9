"""The run that a command is for, by its folder: what the SDK makes of it."""

from sluice.client.run_address import CONFIG_NAME, RunLocation, locate_run

__all__ = ["CONFIG_NAME", "RunLocation", "locate_run"]
