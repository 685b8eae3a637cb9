"""Which methods a caller may use: everybody, clients of a run, or its services alone."""

from __future__ import annotations

from sluice.security.tokens import Role

_HEALTH_PREFIX = "/grpc.health.v1.Health/"
HEALTH_CHECK = f"{_HEALTH_PREFIX}Check"

# Sampling, submitting, scoring and looking. Not what steers the run, hands out its batches or
# replaces its weights.
CLIENT_METHODS = frozenset(
    {
        "/sluice.api.rollout.v1.RolloutService/Generate",
        "/sluice.api.rollout.v1.RolloutService/GetStatus",
        "/sluice.api.reward.v1.RewardService/SubmitPrompts",
        "/sluice.api.reward.v1.RewardService/Score",
        "/sluice.api.reward.v1.RewardService/GetStatus",
        "/sluice.api.trainer.v1.TrainerService/GetStatus",
        "/sluice.api.trainer.v1.TrainerService/WatchSteps",
    }
)
_REFLECTION_PREFIX = "/grpc.reflection."


def is_open(method: str) -> bool:
    """Whether a method (``/package.Service/Method``) needs no token."""
    return method == HEALTH_CHECK


def is_allowed(role: Role, method: str) -> bool:
    """Whether a caller of that role may use the method."""
    if role is Role.SERVICE:
        return True
    return method in CLIENT_METHODS or method.startswith((_REFLECTION_PREFIX, _HEALTH_PREFIX))
