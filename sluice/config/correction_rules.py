"""Whether the loss corrects for samples of an older policy, and what has no effect on it."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.config import derived
from sluice.config.run import RunConfig
from sluice.config.verl_run import ACTOR
from sluice.config.violation import Violation, violation

_CORRECTION = "algorithm.rollout_correction"
_WEIGHTS, _BEHAVIOUR = f"{_CORRECTION}.rollout_is", f"{ACTOR}.use_rollout_log_probs"


def correction_violations(config: RunConfig) -> Iterator[Violation]:
    """Staleness that nothing corrects for, and corrections that nothing reads."""
    yield from _staleness(config)
    yield from _without_effect(config)


def _staleness(config: RunConfig) -> Iterator[Violation]:
    staleness = config.sluice.asynchrony.max_staleness
    if not staleness or derived.is_corrected(config):
        return
    why, remedy = _missing(config)
    yield Violation(
        "correction",
        f"sluice.asynchrony.max_staleness = {staleness} with {why}: nothing corrects for samples "
        f"of an older policy; set {' '.join(remedy)}, or max_staleness=0",
        remedy,
    )


def _missing(config: RunConfig) -> tuple[str, tuple[str, ...]]:
    """What the loss lacks, and the overrides that give it."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    weights = (f"{_WEIGHTS}=token",)
    if derived.is_bypassed(config):
        return f"{_CORRECTION}.loss_type = reinforce, which has no ratio, and no weights", weights
    if actor.policy_loss.loss_mode == "adpo":
        unset = () if correction.rollout_is is None else (f"{_WEIGHTS}=null",)
        return (
            f"{ACTOR}.policy_loss.loss_mode = adpo, which reads no importance weights, and "
            f"{_BEHAVIOUR} = false",
            (f"{_BEHAVIOUR}=true", *unset),
        )
    if actor.policy_loss.loss_mode == "gpg":
        unset = (f"{_BEHAVIOUR}=false",) if actor.use_rollout_log_probs else ()
        return (
            f"{ACTOR}.policy_loss.loss_mode = gpg, which has no ratio, and no weights of recomputed"
            " logprobs",
            (*weights, *unset),
        )
    return f"{_BEHAVIOUR} = false and {_WEIGHTS} = null", weights


def _without_effect(config: RunConfig) -> Iterator[Violation]:
    """Outside bypass mode, corrections compare old and behaviour logprobs once a batch."""
    if not config.actor_rollout_ref.actor.use_rollout_log_probs or derived.is_bypassed(config):
        return
    correction = config.algorithm.rollout_correction
    off: dict[str, tuple[object, str]] = {
        "rollout_is": (correction.rollout_is, "null"),
        "rollout_is_batch_normalize": (correction.rollout_is_batch_normalize, "false"),
        "rollout_rs": (correction.rollout_rs, "null"),
    }
    for name, (value, without) in off.items():
        if not value:
            continue
        remedy = [f"{_CORRECTION}.{name}={without}"]
        if name == "rollout_rs" and correction.rollout_rs_threshold is not None:
            remedy.append(f"{_CORRECTION}.rollout_rs_threshold=null")
        yield violation(
            "correction",
            f"{_CORRECTION}.{name} = {str(value).lower()} with {_BEHAVIOUR} = true would have no "
            "effect, since old and behaviour logprobs are then the same; set one of the two",
            *remedy,
            here=True,
        )
