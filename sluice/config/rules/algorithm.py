"""Which estimators, losses, critics, corrections and skipping go together."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.algorithm.registry import SILENT_AT_ZERO_ADVANTAGE
from sluice.algorithm.rollout_correction.plan import BYPASS_LOSS_MODE, RolloutCorrectionSettings
from sluice.config import derived
from sluice.config.derived import MASK_ESTIMATORS, OLD_LOGPROB_ESTIMATORS
from sluice.config.problems import Violation, violation
from sluice.config.run import RunConfig
from sluice.config.verl_run import ACTOR
from sluice.errors import ConfigError

SKIPPING_KEY = "sluice.trainer.skip_zero_advantage"

_WHITENING = frozenset({"gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Estimators that shift advantages over the batch: where rewards are equal they are not 0."""


def skipping_problems(config: RunConfig) -> Iterator[str]:
    """A sentence with the remedy for each setting by which a skipped sample would be missed."""
    if not config.sluice.trainer.skip_zero_advantage:
        return
    for setting, why, remedy in (*_gradients(config), *_passes(config)):
        yield f"{SKIPPING_KEY} = true with {setting}: {why}; set {SKIPPING_KEY}=false, or {remedy}"


def _gradients(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Settings, reasons and remedies where a sample without an advantage has a gradient."""
    actor = config.actor_rollout_ref.actor
    has_gradient = "it has a gradient where the advantage is 0 too"
    if actor.entropy_coeff != 0.0:
        yield f"{ACTOR}.entropy_coeff = {actor.entropy_coeff}", has_gradient, "entropy_coeff=0"
    if actor.calculate_entropy:
        yield (
            f"{ACTOR}.calculate_entropy = true",
            "actor/entropy_loss would lack the skipped samples",
            "calculate_entropy=false; actor/entropy is reported all the same",
        )
    if actor.use_kl_loss:
        yield f"{ACTOR}.use_kl_loss = true", has_gradient, "use_kl_loss=false"
    loss = actor.policy_loss.loss_mode
    if loss not in SILENT_AT_ZERO_ADVANTAGE:
        yield (
            f"{ACTOR}.policy_loss.loss_mode = {loss}",
            "that loss reads samples whose advantage is 0 too",
            f"one of {', '.join(sorted(SILENT_AT_ZERO_ADVANTAGE))}",
        )


def _passes(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Settings by which advantages are only known after passes over all samples."""
    algorithm = config.algorithm
    passes = "advantages or weights come of passes over all samples"
    if derived.uses_critic(config):
        yield "a critic", passes, "critic.enable=false"
    if algorithm.use_kl_in_reward:
        yield "algorithm.use_kl_in_reward = true", passes, "use_kl_in_reward=false"
    if algorithm.adv_estimator in OLD_LOGPROB_ESTIMATORS:
        estimator = algorithm.adv_estimator
        yield f"algorithm.adv_estimator = {estimator}", passes, "another estimator, such as grpo"
    if algorithm.adv_estimator in _WHITENING:
        yield (
            f"algorithm.adv_estimator = {algorithm.adv_estimator}",
            "it whitens advantages over the batch, so that hardly any is 0",
            "another estimator, such as grpo",
        )
    correction = algorithm.rollout_correction
    rejects = correction.rollout_rs is not None and not derived.is_bypassed(config)
    if rejects and algorithm.adv_estimator in MASK_ESTIMATORS:
        yield (
            f"algorithm.rollout_correction.rollout_rs = {correction.rollout_rs} and "
            f"algorithm.adv_estimator = {algorithm.adv_estimator}",
            passes,
            "another estimator, such as grpo",
        )
    if correction.rollout_is_batch_normalize:
        key = "algorithm.rollout_correction.rollout_is_batch_normalize"
        yield f"{key} = true", passes, "rollout_is_batch_normalize=false"


_CORRECTION = "algorithm.rollout_correction"


def algorithm_problems(config: RunConfig) -> list[str]:
    """A sentence with the remedy for every pair of settings that cannot work together."""
    checks = (_adpo, _bypass, _critic, _gdpo, _dro, _thresholds, skipping_problems)
    return [text for check in checks for text in check(config)]


def _adpo(config: RunConfig) -> Iterator[str]:
    """The loss takes the estimator's advantages for the logits of its target (ADPO, eq. 6)."""
    estimator = config.algorithm.adv_estimator
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if (estimator == "adpo") != (loss == "adpo"):
        yield (
            f"algorithm.adv_estimator = {estimator} with {ACTOR}.policy_loss.loss_mode = {loss}: "
            "adpo's estimator and its loss belong together; set both to adpo or neither"
        )


def _bypass(config: RunConfig) -> Iterator[str]:
    """Bypass mode has a loss of its own, a clipped ratio to the engine's policy or REINFORCE."""
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    replaces = config.algorithm.rollout_correction.bypass_mode
    if replaces and loss not in ("vanilla", BYPASS_LOSS_MODE):
        yield (
            f"{_CORRECTION}.bypass_mode = true puts a loss of its own in the place of "
            f"{ACTOR}.policy_loss.loss_mode = {loss}; set bypass_mode=false (and {ACTOR}."
            "use_rollout_log_probs=true to compare with the engine's policy all the same), or "
            "loss_mode=vanilla"
        )


def _critic(config: RunConfig) -> Iterator[str]:
    critic, actor = config.critic, config.actor_rollout_ref.actor
    if config.algorithm.adv_estimator == "gae" and critic.enable is False:
        yield (
            "algorithm.adv_estimator = gae with critic.enable = false: its advantages are "
            "differences of the critic's values; set critic.enable=null, or another estimator"
        )
    if not derived.uses_critic(config):
        return
    by_tokens = actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    rows = critic.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
    if not by_tokens and rows is None:
        yield (
            "critic.ppo_micro_batch_size_per_gpu = null while critic.use_dynamic_bsz is false: "
            "set it to the rows of a micro-batch, or critic.use_dynamic_bsz=true"
        )
    prompts, mini = config.data.train_batch_size, critic.ppo_mini_batch_size
    if mini is not None and prompts % mini:
        yield (
            f"data.train_batch_size = {prompts} is no multiple of critic.ppo_mini_batch_size = "
            f"{mini} (both count prompts); set it to null to follow the actor"
        )


def _gdpo(config: RunConfig) -> Iterator[str]:
    keys, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if config.algorithm.adv_estimator == "gdpo" and not keys:
        yield (
            "algorithm.gdpo_reward_keys = null with algorithm.adv_estimator = gdpo: name the "
            "values of the scorer that are rewards"
        )
    if keys and weights is not None and len(weights) != len(keys):
        yield (
            f"algorithm.gdpo_reward_weights has {len(weights)} entries for {len(keys)} "
            "algorithm.gdpo_reward_keys; give one weight for each, or null"
        )


def _dro(config: RunConfig) -> Iterator[str]:
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        yield (
            f"{ACTOR}.policy_loss.dro_beta = null with loss_mode = dro: set the weight of its "
            "quadratic term"
        )


def _thresholds(config: RunConfig) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    try:
        RolloutCorrectionSettings(
            rollout_is=correction.rollout_is,
            rollout_is_threshold=correction.rollout_is_threshold,
            rollout_rs=correction.rollout_rs,
            rollout_rs_threshold=correction.rollout_rs_threshold,
        )
    except ConfigError as error:
        yield str(error)
    if correction.rollout_rs is None and correction.rollout_rs_threshold is not None:
        yield (
            f"{_CORRECTION}.rollout_rs_threshold = {correction.rollout_rs_threshold} has no effect "
            "while rollout_rs is null; name the rejections in rollout_rs, or leave it out"
        )


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
