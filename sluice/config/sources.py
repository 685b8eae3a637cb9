"""The configuration of each source of a run: the run's, with what `sluice.sources` changes.

Whatever reads a configuration thus serves a source as it serves a run: samplers, rules, the
trainer's settings. A run without `sluice.sources` has one source without a name, and its
configuration is the run's.
"""

from __future__ import annotations

from typing import TypeVar

from msgspec import structs

from sluice.algorithm.sources import groups_by_share
from sluice.config.run import RunConfig
from sluice.config.schema.data import file_list
from sluice.config.schema.section import Section
from sluice.config.schema.service import SourceConfig

NodeT = TypeVar("NodeT", bound=Section)

SOURCES_KEY, TRAIN_KEY, VAL_KEY = "sluice.sources", "data.train_files", "data.val_files"

ONLY_SOURCE = ""
"""The name of the source of a run without `sluice.sources`."""


def source_configs(config: RunConfig) -> dict[str, RunConfig]:
    """Return the configuration of each source, by name, in the order of `sluice.sources`.

    `data.train_batch_size` stays the run's.
    """
    sources = config.sluice.sources
    if not sources:
        return {ONLY_SOURCE: config}
    return {name: _source_config(config, source) for name, source in sources.items()}


def prompt_files(config: RunConfig) -> dict[str, list[str]]:
    """Return the files of prompts by the key that names them: of training, then of validation."""
    data, sources = config.data, config.sluice.sources
    files_by_key: dict[str, str | list[str] | None]
    files_by_key = {f"{SOURCES_KEY}.{name}.files": source.files for name, source in sources.items()}
    files_by_key = files_by_key or {TRAIN_KEY: data.train_files}
    return {
        key: file_list(files) for key, files in {**files_by_key, VAL_KEY: data.val_files}.items()
    }


def source_shares(config: RunConfig) -> dict[str, float]:
    """Return the share of each source in a train batch."""
    sources = config.sluice.sources
    return {name: source.share for name, source in sources.items()} or {ONLY_SOURCE: 1.0}


def source_groups(config: RunConfig) -> dict[str, int]:
    """Return the groups of each source in a train batch, as configured.

    Raises:
        ValueError: there are more sources than groups.
    """
    return groups_by_share(source_shares(config), config.data.train_batch_size)


def largest_n(config: RunConfig) -> int:
    """Return the most responses to a prompt of any source."""
    return max(
        source_config.actor_rollout_ref.rollout.n
        for source_config in source_configs(config).values()
    )


def responses_per_step(config: RunConfig) -> int:
    """Return the responses in a train batch with the shares as configured.

    With more sources than groups, which the rules refuse, all have the largest group size.
    """
    if len(config.sluice.sources) > config.data.train_batch_size:
        return config.data.train_batch_size * largest_n(config)
    groups = source_groups(config)
    return sum(
        groups[name] * source_config.actor_rollout_ref.rollout.n
        for name, source_config in source_configs(config).items()
    )


def follows_yield(config: RunConfig) -> tuple[str, ...]:
    """Return the sources whose shares follow their yields."""
    sources = config.sluice.sources
    return tuple(name for name, source in sources.items() if source.curriculum == "yield")


def _source_config(config: RunConfig, source: SourceConfig) -> RunConfig:
    replace = structs.replace
    run = config.actor_rollout_ref
    loss = _with_set_values(run.actor.policy_loss, loss_mode=source.loss_mode)
    actor = _with_set_values(
        replace(run.actor, policy_loss=loss),
        loss_agg_mode=source.loss_agg_mode,
        clip_ratio_low=source.clip_ratio_low,
        clip_ratio_high=source.clip_ratio_high,
        clip_ratio_c=source.clip_ratio_c,
        use_kl_loss=source.use_kl_loss,
        kl_loss_coef=source.kl_loss_coef,
    )
    rollout = _with_set_values(run.rollout, n=source.n)
    return replace(
        config,
        data=replace(config.data, train_files=source.files),
        actor_rollout_ref=replace(run, actor=actor, rollout=rollout),
        algorithm=_with_set_values(config.algorithm, adv_estimator=source.adv_estimator),
        sluice=replace(config.sluice, sources={}),
    )


def _with_set_values(section: NodeT, **values: object) -> NodeT:
    """Return the section with those values that are not null."""
    set_values = {name: value for name, value in values.items() if value is not None}
    return structs.replace(section, **set_values)
