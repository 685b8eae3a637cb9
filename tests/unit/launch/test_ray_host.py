"""Calls to one actor: which of Ray's exceptions mean what, with a stand-in for Ray."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from sluice.errors import PeerDefectError, PeerError
from sluice.launch.cluster.placement import HostLostError
from sluice.launch.cluster.ray_cluster import RayHost

# The tree of ray.exceptions, as far as it matters.
RayError = type("RayError", (Exception,), {})
RayTaskError = type("RayTaskError", (RayError,), {})
RayActorError = type("RayActorError", (RayError,), {})
ActorUnavailableError = type("ActorUnavailableError", (RayActorError,), {})
RuntimeEnvSetupError = type("RuntimeEnvSetupError", (RayError,), {})


@pytest.fixture(autouse=True)
def _ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = ModuleType("ray")
    classes = (RayError, RayTaskError, RayActorError, ActorUnavailableError)
    ray.exceptions = SimpleNamespace(**{each.__name__: each for each in classes})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)


async def raised_after(error: Exception, monkeypatch: pytest.MonkeyPatch, *, dead: bool) -> object:
    async def remote(*_: object) -> None:
        raise error

    monkeypatch.setattr(RayHost, "_is_dead", lambda _: dead)
    host = RayHost("rollout-0", SimpleNamespace(look=SimpleNamespace(remote=remote)))
    with pytest.raises(
        PeerError, match="host of rollout-0: failed while in its call look"
    ) as reported:
        await host.call("look", "plan")
    return type(reported.value)


@pytest.mark.parametrize(
    ("error", "dead", "meant"),
    [
        (ActorUnavailableError("no route"), False, PeerError),
        (RayActorError("restarting"), False, PeerError),
        (RayActorError("dead"), True, HostLostError),
        (RuntimeEnvSetupError("pip failed"), False, HostLostError),
        (RayTaskError("ray::look()\nOSError: disk"), False, PeerDefectError),
    ],
)
async def test_only_a_host_that_cannot_come_back_is_gone(
    error: Exception, dead: bool, meant: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await raised_after(error, monkeypatch, dead=dead) is meant
