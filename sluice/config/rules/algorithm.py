"""Rules on combinations of estimators, losses, critics, corrections and skipping."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET

from sluice.algorithm.registry import BATCH_ESTIMATORS, SILENT_AT_ZERO_ADVANTAGE
from sluice.algorithm.rollout_correction.settings import BYPASS_LOSS_MODE
from sluice.config import derived
from sluice.config.loading.loader import KeySettings
from sluice.config.problems import Problem
from sluice.config.run import RunConfig
from sluice.config.schema.algorithm import AlgorithmConfig
from sluice.config.verl_sizes import ACTOR, own_batch
from sluice.errors import ConfigError

SKIPPING_KEY = "sluice.trainer.skip_zero_advantage"
_ESTIMATOR = "algorithm.adv_estimator"
_CORRECTION = "algorithm.rollout_correction"
_LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
_WEIGHTS, _BEHAVIOR = f"{_CORRECTION}.rollout_is", f"{ACTOR}.use_rollout_log_probs"


def skipping_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield each setting that needs the samples that skipping leaves out."""
    if not config.sluice.trainer.skip_zero_advantage:
        return
    for setting, why, remedy in (*_gradient_conflicts(config), *_whole_pass_conflicts(config)):
        yield Problem(
            SKIPPING_KEY,
            True,
            f"with {setting}: {why}",
            f"set {SKIPPING_KEY}=false, or {remedy}",
        )


def _gradient_conflicts(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield settings, reasons and remedies for terms with a gradient at samples without an
    advantage."""
    actor = config.actor_rollout_ref.actor
    has_gradient = "it has a gradient where the advantage is 0 too"
    if actor.entropy_coeff != 0.0:
        yield f"{ACTOR}.entropy_coeff = {actor.entropy_coeff}", has_gradient, "entropy_coeff=0"
    if actor.calculate_entropy:
        yield (
            f"{ACTOR}.calculate_entropy = true",
            "actor/entropy_loss would lack the skipped samples",
            "calculate_entropy=false; actor/entropy is still reported",
        )
    if actor.use_kl_loss:
        yield f"{ACTOR}.use_kl_loss = true", has_gradient, "use_kl_loss=false"
    loss = actor.policy_loss.loss_mode
    if loss not in SILENT_AT_ZERO_ADVANTAGE:
        yield (
            f"{_LOSS_MODE} = {loss}",
            "that loss reads samples whose advantage is 0 too",
            f"one of {', '.join(sorted(SILENT_AT_ZERO_ADVANTAGE))}",
        )


def _whole_pass_conflicts(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield settings whose advantages are only known after passes over all samples."""
    algorithm, estimator = config.algorithm, derived.advantage_estimator(config)
    name = f"algorithm.adv_estimator = {algorithm.adv_estimator}"
    passes = "advantages or weights need passes over all samples"
    if derived.uses_critic(config):
        yield "a critic", passes, "critic.enable=false"
    if algorithm.use_kl_in_reward:
        yield "algorithm.use_kl_in_reward = true", passes, "use_kl_in_reward=false"
    if "old_logprobs" in estimator.needs:
        yield name, passes, "another estimator, such as grpo"
    if estimator.whitens and "values" not in estimator.needs:  # a critic is named above
        yield (
            name,
            "it whitens advantages over the batch, so that hardly any is 0",
            "another estimator, such as grpo",
        )
    correction = algorithm.rollout_correction
    rejects = correction.rollout_rs is not None and not derived.is_bypassed(config)
    if rejects and estimator.reads_mask:
        yield (
            f"{_CORRECTION}.rollout_rs = {correction.rollout_rs} and {name}",
            passes,
            "another estimator, such as grpo",
        )
    if correction.rollout_is_batch_normalize:
        key = f"{_CORRECTION}.rollout_is_batch_normalize"
        yield f"{key} = true", passes, "rollout_is_batch_normalize=false"


def algorithm_problems(config: RunConfig) -> list[Problem]:
    """Return every pair of settings that contradict each other."""
    checks = (
        _adpo_problems,
        _bypass_problems,
        _routing_problems,
        _critic_problems,
        _gdpo_problems,
        _dro_problems,
        _thresholds_problems,
        _turns_problems,
    )
    return [problem for check in (*checks, skipping_problems) for problem in check(config)]


def _adpo_problems(config: RunConfig) -> Iterator[Problem]:
    # The loss takes the estimator's advantages as the logits of its target (ADPO, eq. 6).
    estimator = config.algorithm.adv_estimator
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if (estimator == "adpo") != (loss == "adpo"):
        yield Problem(
            "algorithm.adv_estimator",
            estimator,
            f"with {_LOSS_MODE} = {loss}: adpo's estimator and its loss belong together",
            "set both to adpo or neither",
        )
    rejects = config.algorithm.rollout_correction.rollout_rs
    if loss == "adpo" and rejects is not None:
        yield Problem(
            f"{_CORRECTION}.rollout_rs",
            rejects,
            f"with {_LOSS_MODE} = adpo: it compares whole responses of complete groups. A rejected "
            "last token would take a response's reward away, and a rejected response would stay in "
            "its group with a ratio of 1",
            "leave rollout_rs out, or use another loss and estimator",
        )


def _bypass_problems(config: RunConfig) -> Iterator[Problem]:
    # Bypass mode has its own loss: a clipped ratio to the engine's policy, or REINFORCE.
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if config.algorithm.rollout_correction.bypass_mode and loss not in (
        "vanilla",
        BYPASS_LOSS_MODE,
    ):
        yield Problem(
            f"{_CORRECTION}.bypass_mode",
            True,
            f"replaces {_LOSS_MODE} = {loss} by its own loss",
            f"set bypass_mode=false (and {_BEHAVIOR}=true to compare with the engine's policy all "
            "the same), or loss_mode=vanilla",
        )


def _routing_problems(config: RunConfig) -> Iterator[Problem]:
    # As _validate_router_replay_config of verl/utils/config.py.
    actor, key = config.actor_rollout_ref.actor, f"{ACTOR}.router_replay.mode"
    if config.algorithm.rollout_correction.bypass_mode:
        setting = f"{_CORRECTION}.bypass_mode = true"
    elif derived.is_bypassed(config):
        setting = f"{_LOSS_MODE} = {BYPASS_LOSS_MODE}"
    else:
        setting = f"{_BEHAVIOR} = true" if actor.use_rollout_log_probs else ""
    if setting and actor.router_replay.mode == "R2":
        no_pass = f"with {setting}: no pass computes old logprobs, and R2 repeats the experts of it"
        yield Problem(key, "R2", no_pass, overrides=(f"{key}=disabled",))


def _critic_problems(config: RunConfig) -> Iterator[Problem]:
    critic, actor = config.critic, config.actor_rollout_ref.actor
    if "values" in derived.advantage_estimator(config).needs and critic.enable is False:
        yield Problem(
            "critic.enable",
            False,
            f"with algorithm.adv_estimator = {config.algorithm.adv_estimator}: its advantages are "
            "differences of the critic's values",
            "set critic.enable=null, or another estimator",
        )
    if not derived.uses_critic(config):
        return
    by_tokens = actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    rows = critic.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
    if not by_tokens and rows is None:
        key = "critic.ppo_micro_batch_size_per_gpu"
        override = f"{key}={own_batch(config).fitting_micro}"
        yield Problem(
            key,
            None,
            "while critic.use_dynamic_bsz is false",
            f"set {override}, or critic.use_dynamic_bsz=true",
            (override,),
        )
    prompts, mini = config.data.train_batch_size, critic.ppo_mini_batch_size
    if mini is not None and prompts % mini:
        yield Problem(
            "critic.ppo_mini_batch_size",
            mini,
            f"does not divide data.train_batch_size = {prompts} (both count prompts)",
            "set it to null to follow the actor",
        )


def idle_critic_problems(config: RunConfig, settings: KeySettings) -> Iterator[Problem]:
    """Yield keys of a critic that no estimator uses, if the user named no estimator."""
    critic_keys, sources = settings.set_below("critic"), config.sluice.sources or {}
    if derived.uses_critic(config) or settings.is_set(_ESTIMATOR) or "critic.enable" in critic_keys:
        return
    if sources and all(source.adv_estimator for source in sources.values()):
        return
    if critic_keys and config.algorithm.adv_estimator == AlgorithmConfig().adv_estimator:
        yield Problem(
            *next(iter(critic_keys.items())),
            f"without {_ESTIMATOR}: no critic is trained, since sluice's default is grpo, where "
            "verl's is gae",
            f"set {_ESTIMATOR}=gae to train as verl does, or {_ESTIMATOR}=grpo without a critic",
        )


def _gdpo_problems(config: RunConfig) -> Iterator[Problem]:
    keys, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if config.algorithm.adv_estimator == "gdpo" and not keys:
        yield Problem(
            "algorithm.gdpo_reward_keys",
            keys,
            "with algorithm.adv_estimator = gdpo",
            "name the values of the scorer that are rewards",
        )
    if keys and weights is not None and len(weights) != len(keys):
        yield Problem(
            "algorithm.gdpo_reward_weights",
            weights,
            f"has {len(weights)} entries for {len(keys)} algorithm.gdpo_reward_keys",
            "give one weight for each, or null",
        )


def _turns_problems(config: RunConfig) -> Iterator[Problem]:
    if not config.sluice.trainer.turn_rewards:
        return
    algorithm, estimator = config.algorithm, config.algorithm.adv_estimator
    divides = estimator in ("grpo", "grpo_vectorized") and algorithm.norm_adv_by_std_in_grpo
    crediting = sorted(name for name, one in BATCH_ESTIMATORS.items() if one.credits_turns)
    if estimator not in crediting:
        yield Problem(
            "sluice.trainer.turn_rewards",
            True,
            f"with algorithm.adv_estimator = {estimator}: it gives a whole episode one "
            "number, or each position a baseline",
            f"set turn_rewards=false, or adv_estimator to one of {', '.join(crediting)}",
        )
    elif divides and algorithm.use_kl_in_reward:
        yield Problem(
            "algorithm.use_kl_in_reward",
            True,
            f"with sluice.trainer.turn_rewards = true and adv_estimator = {estimator}: where the "
            "rewards of a group are equal, its std is that of small penalties, and dividing the "
            "rewards of turns by it gives huge advantages",
            f"set use_kl_in_reward=false and {ACTOR}.use_kl_loss=true, or "
            "norm_adv_by_std_in_grpo=false",
        )


def _dro_problems(config: RunConfig) -> Iterator[Problem]:
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        yield Problem(
            f"{ACTOR}.policy_loss.dro_beta",
            None,
            "with loss_mode = dro",
            "set the weight of its quadratic term",
        )


def _thresholds_problems(config: RunConfig) -> Iterator[Problem]:
    correction = config.algorithm.rollout_correction
    try:
        derived.rollout_correction(config)
    except ConfigError as error:
        yield Problem("", UNSET, str(error))  # it names the key, the value and the remedy
    if correction.rollout_rs is None and correction.rollout_rs_threshold is not None:
        yield Problem(
            f"{_CORRECTION}.rollout_rs_threshold",
            correction.rollout_rs_threshold,
            "has no effect while rollout_rs is null",
            "name the rejections in rollout_rs, or leave it out",
        )


def correction_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield uncorrected staleness, and corrections without effect."""
    yield from _staleness_problems(config)
    yield from _idle_correction_problems(config)


def _staleness_problems(config: RunConfig) -> Iterator[Problem]:
    staleness = config.sluice.asynchrony.max_staleness
    if not staleness or derived.is_corrected(config):
        return
    why, overrides = _missing_correction(config)
    yield Problem(
        "sluice.asynchrony.max_staleness",
        staleness,
        f"with {why}: nothing corrects for samples of an older policy",
        f"set {' '.join(overrides)}, or max_staleness=0",
        overrides,
    )


def _missing_correction(config: RunConfig) -> tuple[str, tuple[str, ...]]:
    """Return what the loss lacks, and the overrides that give it."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    weights = (f"{_WEIGHTS}=token",)
    if derived.is_bypassed(config):
        return f"{_CORRECTION}.loss_type = reinforce, which has no ratio, and no weights", weights
    if actor.policy_loss.loss_mode == "adpo":
        unset = () if correction.rollout_is is None else (f"{_WEIGHTS}=null",)
        return (
            f"{_LOSS_MODE} = adpo, which reads no importance weights, and {_BEHAVIOR} = false",
            (f"{_BEHAVIOR}=true", *unset),
        )
    if actor.policy_loss.loss_mode == "gpg":
        unset = (f"{_BEHAVIOR}=false",) if actor.use_rollout_log_probs else ()
        return (
            f"{_LOSS_MODE} = gpg, which has no ratio, and no weights of recomputed logprobs",
            (*weights, *unset),
        )
    return f"{_BEHAVIOR} = false and {_WEIGHTS} = null", weights


def _idle_correction_problems(config: RunConfig) -> Iterator[Problem]:
    # Outside bypass mode, corrections compare old and behavior logprobs once a batch.
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
        overrides = [f"{_CORRECTION}.{name}={without}"]
        if name == "rollout_rs" and correction.rollout_rs_threshold is not None:
            overrides.append(f"{_CORRECTION}.rollout_rs_threshold=null")
        yield Problem(
            f"{_CORRECTION}.{name}",
            value,
            f"with {_BEHAVIOR} = true would have no effect, since old and behavior logprobs are "
            "then the same",
            f"set one of the two: {' '.join(overrides)}",
            tuple(overrides),
        )
