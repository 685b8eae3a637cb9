"""Which devices vLLM's processes see: vLLM always computes on the first ones of those. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.errors import ConfigError

__all__ = ["visible_environment"]


def visible_environment(
    name: str | None, variable: str | None, count: int, given: Mapping[str, str]
) -> dict[str, str]:
    """What makes the first device that vLLM's processes see the one that was asked for.

    Args:
        name: ``sluice.rollout.device``; without an index nothing has to be set.
        variable: by which devices of that kind are handed out.
        count: devices that the engine takes, neighbours from the named one on.
        given: the environment, which may hand out fewer than the machine has.

    Raises:
        ConfigError: `given` hands out too few.
    """
    index = (name or "").partition(":")[2]
    if variable is None or not index:
        return {}
    first = int(index)
    visible = given.get(variable)
    if visible is None:
        return {variable: ",".join(str(first + place) for place in range(count))}
    devices = [one.strip() for one in visible.split(",") if one.strip()]
    taken = devices[first : first + count]
    if len(taken) < count:
        raise ConfigError(
            f"sluice.rollout.device={name}: the engine takes {count} device(s) from number {first} "
            f"on, but {variable}={visible} hands out {len(devices)}; correct the index, "
            "actor_rollout_ref.rollout.tensor_model_parallel_size or that variable"
        )
    return {variable: ",".join(taken)}
