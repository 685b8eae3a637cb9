"""Check the environment of episodes: load it as a worker would."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.concurrency.answers import answer_of
from sluice.doctor.finding import Examined, Finding, fine, of_text
from sluice.environment.source import EnvironmentSource
from sluice.errors import SluiceError

COMMAND = "sluice.environment.source"
DEADLINE_S = 65.0
_LOADING_S = 60.0
_REFUSED = "the run refuses to start"


def check_environment(examined: Examined) -> Iterator[Finding]:
    """Load the environment's file, or verl's tools, in a process of its own."""
    config = examined.config
    settings, turns = config.sluice.environment, config.actor_rollout_ref.rollout.multi_turn
    source = EnvironmentSource(
        settings.path, settings.name, turns.function_tool_path, turns.tool_config_path
    )
    if not source.is_given:
        return
    what = settings.path or turns.function_tool_path or turns.tool_config_path
    try:
        (name, *tools), _ = answer_of(
            COMMAND,
            source,
            list[str],
            what=f"loading {what}",
            timeout_s=_LOADING_S,
            remedy="look for a download or an endless loop",
        )
    except SluiceError as error:
        yield of_text(str(error), _REFUSED)
        return
    yield fine(f"{what}: {name}" + (f" with the tools {', '.join(tools)}" if tools else ""))
