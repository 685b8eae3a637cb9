"""Build the reward service from a run's configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from services.reward.episodes.drivers import EpisodeDrivers
from services.reward.episodes.leases import LeaseManager
from services.reward.episodes.loop import EpisodeGenerator
from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.replica_queue import ReplicaQueue
from services.reward.generation.request import (
    GenerationClient,
    SampleGenerator,
)
from services.reward.grading.grader import Grader, SampleScorer, ScoreRequests, overlong_shaping
from services.reward.grading.scorers.registry import RULES, Scorer, check_routes, scorer_for
from services.reward.group_table import GroupState, GroupTable
from services.reward.groups.batches import TrainBatches
from services.reward.groups.loop import GroupLoop
from services.reward.groups.run import GroupRun
from services.reward.groups.settings import (
    environment_names,
    episode_rules,
    group_settings,
    outcome_policy,
    plays_by_default,
    round_size,
    sampling_rules,
    straggler_rules,
)
from services.reward.groups.sources import TrainingSource, TrainingSources
from services.reward.groups.validation import Validator
from services.reward.ledger.ledger import PromptLedger
from services.reward.prompts.dataset import (
    PromptStream,
    training_files,
    training_stream,
    validation_files,
    validation_stream,
)
from services.reward.prompts.history import PromptMemoryStore
from services.reward.prompts.quarantine import Quarantine
from services.reward.prompts.source import PromptSource
from services.reward.prompts.submissions import Submissions
from services.reward.records.episode_counts import EpisodeStatistics
from services.reward.records.failures import FailureLog, YieldGuard
from services.reward.records.group_log import GroupLog, sample_dumps, waiting_bytes
from services.reward.records.statistics import GroupStatistics, prompts_lost
from services.reward.records.stored_prompts import PromptStore, open_store
from services.reward.records.traces import PromptTraces, trace_key
from sluice.algorithm.groups.staleness import GroupAges
from sluice.algorithm.sampling.admission import KNOWN_LENGTHS
from sluice.algorithm.sampling.rules import StrategyName
from sluice.algorithm.sampling.strategy import SamplingStrategy
from sluice.concurrency.waits import ChangeSignal
from sluice.config.derived import (
    may_grade_itself,
    prompt_images,
    reads_question,
    rows_per_batch,
)
from sluice.config.run import RunConfig
from sluice.config.sources import (
    SOURCES_KEY,
    TRAIN_KEY,
    follows_yield,
    source_configs,
    source_groups,
    source_shares,
)
from sluice.data.prompt_files import PromptFiles
from sluice.data.scoring import PROGRAM_TESTS
from sluice.errors import DataError, NotReadyError
from sluice.sandbox.choice import backend_of
from sluice.service_contract import LEDGER_NAME
from sluice.telemetry.samples import FOLDER_NAME, SampleArchive
from sluice.telemetry.tracing import TRACER
from sluice.types import DataProgress
from sluice.vision.image_limits import ImageLimits

logger = logging.getLogger(__name__)

MEMORY_FILE = Path("reward") / "prompt_memory.sqlite"
LOG_FILE = Path("groups.jsonl")
QUARANTINE_FILE = Path("reward") / "quarantine.jsonl"
_ENDLESS = 2**31
"""Passes over the rows of one of several sources."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The open files of the run's folder.

    Args:
        memory: what earlier attempts showed; ``None`` for strategies that do not use it.
        log: records groups that ended; ``None`` logs nothing.
        ledger: the prompts of the run; may be in memory.
        quarantine: the file that lists prompts in quarantine; ``None`` lists them nowhere.
    """

    memory: PromptMemoryStore | None = None
    log: GroupLog | None = None
    ledger: PromptLedger = field(default_factory=PromptLedger)
    quarantine: Path | None = None


@contextmanager
def open_run_files(config: RunConfig) -> Iterator[RunFiles]:
    """Open the files; continue those that exist.

    Raises:
        DataError: the ledger or the prompt memory is damaged, in use or written by another program.
    """
    folder, uses_memory = Path(config.sluice.run_dir), _uses_memory(config)
    store = PromptMemoryStore(folder / MEMORY_FILE) if uses_memory else nullcontext()
    is_durable = config.sluice.reward.ledger == "sqlite"
    with PromptLedger(folder / LEDGER_NAME if is_durable else None) as ledger, store as memory:
        log = _group_log(config, folder)
        with closing(log) if log else nullcontext():
            yield RunFiles(memory, log, ledger, folder / QUARANTINE_FILE)


def _group_log(config: RunConfig, folder: Path) -> GroupLog | None:
    path = folder / LOG_FILE if config.sluice.reward.group_log else None
    dashboard = config.sluice.dashboard
    archive = (
        SampleArchive(folder / FOLDER_NAME, dashboard.samples_mb << 20)
        if dashboard.samples_mb
        else None
    )
    if path is None and archive is None:
        return None
    num_samples, max_chars = config.actor_rollout_ref.rollout.n, dashboard.sample_chars
    return GroupLog(
        path,
        num_samples,
        samples=archive,
        max_chars=max_chars,
        max_bytes=waiting_bytes(rows_per_batch(config), max_chars),
        environments=environment_names(config),
        samples_of_source={
            name: source_config.actor_rollout_ref.rollout.n
            for name, source_config in source_configs(config).items()
        },
    )


def _uses_memory(config: RunConfig) -> bool:
    return StrategyName(config.sluice.sampling.strategy).uses_memory


@dataclass(frozen=True, slots=True)
class PromptSets:
    """Checked data sets.

    Args:
        training: by source name, empty in a run without `sluice.sources`; ``None``: no files.
        validation: ``None`` if there is no validation set.
        images: limits of images; ``None`` reads no images.
    """

    training: Mapping[str, PromptFiles | None] = field(default_factory=dict)
    validation: PromptFiles | None = None
    images: ImageLimits | None = None


class RewardApp:
    """All parts of the service except the servicer. Servicer, metrics and watchdog read them.

    Args:
        config: the run's configuration.
        sets: its data sets.
        scorers: the running pool.
        client: calls the replicas.
        files: what the service writes into the run's folder; ``None`` writes nothing.
        drivers: run the environments of episodes; ``None`` if a sample is one answer.

    Raises:
        ConfigError: settings contradict each other.
    """

    def __init__(
        self,
        config: RunConfig,
        sets: PromptSets,
        scorers: SampleScorer,
        client: GenerationClient,
        files: RunFiles | None = None,
        drivers: EpisodeDrivers | None = None,
    ) -> None:
        files = files or RunFiles()
        check_data_source = _data_source_check(config)
        self.ledger = files.ledger
        configs, num_groups = source_configs(config), source_groups(config)
        asynchrony = config.sluice.asynchrony
        ages = {
            name: GroupAges(number, asynchrony.max_staleness, asynchrony.on_stale)
            for name, number in num_groups.items()
        }
        self.groups = GroupTable(self.ledger, ages)
        self.sources = TrainingSources(
            [
                _training_source(name, config, configs[name], sets, self.groups, files.memory)
                for name in configs
            ]
        )
        rows = [source.settings.epoch_rows for source in self.sources.values()]
        self.dataset_rows = 0 if len(rows) > 1 else rows[0]  # several sources have no common epoch
        self._issue_pending()
        max_strikes = config.sluice.reward.outcomes.max_strikes
        self.quarantine = Quarantine(self.ledger, max_strikes, files.quarantine)
        shaping = overlong_shaping(config.reward, config.data.max_response_length)
        self.grader = Grader(scorers, shaping, outcome_policy(config))
        self.traces = _traces(config, self.ledger)
        self._build_generation(config, client, drivers)
        self.counters = GroupStatistics(
            self.dispatcher.num_received,
            round_size=round_size(sampling_rules(config)),
            scorers=scorers,
            episodes=self.episode_counts,
            sources=list(config.sluice.sources),
        )
        self.failures = FailureLog()
        self._build_loop(files.memory)
        self._build_clients(config, sets, scorers, check_data_source)
        self._observe(files.log)

    def _issue_pending(self) -> None:
        """Issue the pending prompts of an earlier service's ledger before any other."""
        for group in self.groups.in_order():
            if group.state is GroupState.WAITING:
                self.sources[group.prompt.source].prompts.put(group.prompt)
        if num_waiting := self.sources.num_waiting:
            logger.info("%d prompts of an earlier service wait again", num_waiting)

    def _build_generation(
        self,
        config: RunConfig,
        client: GenerationClient,
        drivers: EpisodeDrivers | None,
    ) -> None:
        self.queue = ReplicaQueue(config.sluice.reward.inflight_slack)
        self.dispatcher = GroupDispatcher(
            client,
            self.queue,
            max_attempts=config.sluice.reward.max_attempts,
            rules=straggler_rules(config),
        )
        self.generator: SampleGenerator = self.dispatcher
        self.leases = drivers if isinstance(drivers, LeaseManager) else None
        self.episode_counts: EpisodeStatistics | None = None
        if drivers is not None:
            episodes = EpisodeGenerator(
                self.dispatcher,
                drivers,
                episode_rules(config),
                by_default=plays_by_default(config),
                are_leased=self.leases is not None,
                seed=config.actor_rollout_ref.rollout.seed,
            )
            names = environment_names(config)
            self.episode_counts = EpisodeStatistics(episodes.notes.tool_names, names)
            self.generator = episodes

    def _build_loop(self, memory: PromptMemoryStore | None) -> None:
        batches = TrainBatches(
            groups=self.groups,
            sources=self.sources,
            statistics=self.counters,
            changes=ChangeSignal(following=self.queue.capacity),
        )
        runs = GroupRun(
            sources=self.sources,
            groups=self.groups,
            generator=self.generator,
            grader=self.grader,
            quarantine=self.quarantine,
            batches=batches,
        )
        self.loop = GroupLoop(
            groups=self.groups,
            sources=self.sources,
            batches=batches,
            memory=memory,
            quarantine=self.quarantine,
            dispatcher=self.dispatcher,
            runs=runs,
            traces=self.traces,
        )

    def _build_clients(
        self,
        config: RunConfig,
        sets: PromptSets,
        scorers: SampleScorer,
        check_data_source: partial[Scorer] | None,
    ) -> None:
        """Build the handlers of the clients' calls and of validation."""
        limits = config.sluice.limits
        self.submissions = Submissions(
            self.ledger,
            self.loop.submit,
            _refuse_clients if config.sluice.sources else check_data_source,
            config.sluice.reward.max_client_pending,
            limits,
        )
        self.score_requests = ScoreRequests(
            scorers, limits.max_client_score_items, reads_question=reads_question(config.reward)
        )
        self.dumps, validation = sample_dumps(config.trainer), sets.validation
        self.validation = Validator(
            None
            if validation is None
            else partial(
                validation_stream, validation, config.data, sets.images, check_data_source
            ),
            self.generator,
            self.grader,
            self.dumps,
            lambda: self.groups.policy_version,
            on_tokens=self.counters.note_validated,
            failures=self.failures,
            store=_prompt_store(config, validation),
        )

    def _observe(self, log: GroupLog | None) -> None:
        """Register the observers of group events, except those that would write nothing."""
        for source in self.sources.values():
            self.groups.observe(source.guard.observe)
        self.groups.observe(self.counters.observe)
        if self.episode_counts is not None:
            self.groups.observe(self.episode_counts.observe)
        self.groups.observe(self.failures.observe)
        if TRACER.is_on:
            self.groups.observe(self.traces.observe)
        if log is not None:
            self.groups.observe(log.observe)
        self.groups.observe(self.submissions.observe)

    def statistics(self) -> dict[str, float]:
        """Return the counters since the start, and ``reward/prompts_lost``: above 0 is a defect.

        ``reward/groups_acknowledged`` counts the groups that trainers have acknowledged since the
        ledger began; a trainer may compare the increase since its own start with its own count.
        ``reward/tokens/pending`` and the other uses add up to ``reward/tokens/received``. Tokens
        that an earlier service received are subtracted from ``reward/tokens/aborted``, where the
        trainer has put them.
        """
        pending = sum(group.progress.num_received for group in self.groups)
        num_lost = prompts_lost(self.ledger, self.groups, self.sources.num_waiting)
        totals = self.counters.totals()
        if self.leases is not None:
            totals["reward/tokens/aborted"] -= self.leases.num_recalled_tokens
        gauges = [source.statistics() for source in self.sources.values()]
        return {
            **totals,
            **{name: value for values in gauges for name, value in values.items()},
            "reward/tokens/pending": float(pending + self.validation.num_pending_tokens),
            "reward/samples_scored_again": float(self.grader.num_scored_again),
            "reward/quarantine": float(len(self.quarantine)),
            "reward/groups_acknowledged": float(self.ledger.num_acknowledged),
            "reward/validation_groups": float(self.validation.num_graded_groups),
            "reward/validation_prompts": float(self.validation.num_prompts),
            "reward/validation_prompts_done": float(self.validation.num_prompts_done),
            "reward/prompts_lost": float(num_lost),
            "reward/rollbacks": float(self.ledger.num_rollbacks),
            "reward/leases": float(self.leases.num_leased if self.leases else 0),
        }

    def end(self) -> None:
        """Stop admission, fail calls for batches and calls of programs, and end submissions."""
        if self.leases is not None:
            self.leases.close()
        self.loop.batches.close(NotReadyError("the reward service is shutting down"))
        self.submissions.end()


def open_prompt_sets(config: RunConfig) -> PromptSets:
    """Check the data sets' columns; `DataError` names file, column and remedy."""
    images = prompt_images(config)
    training = {
        name: training_files(
            source_config.data, images, f"{SOURCES_KEY}.{name}.files" if name else TRAIN_KEY
        )
        for name, source_config in source_configs(config).items()
    }
    return PromptSets(training, validation_files(config.data, images), images)


def _training_source(
    name: str,
    run: RunConfig,
    config: RunConfig,
    sets: PromptSets,
    groups: GroupTable,
    memory: PromptMemoryStore | None,
) -> TrainingSource:
    """Build a source; `config` is the run's configuration with the source's own values."""
    of_source, source_config = groups.of_source[name], run.sluice.sources.get(name)
    files = sets.training.get(name)
    open_stream: Callable[[DataProgress], PromptStream] | None = None
    if files is not None:
        epochs = _ENDLESS if name else config.trainer.total_epochs
        open_stream = partial(
            training_stream,
            files,
            config.data,
            total_epochs=epochs,
            images=sets.images,
            check_data_source=_data_source_check(run),
        )
    num_rows = open_stream(DataProgress(0)).rows_per_epoch if open_stream else 0
    strategy = _strategy(config, of_source.ages.batch_size, memory)
    prompts = PromptSource(
        groups,
        open_stream,
        strategy.forecast,
        strategy.num_in_line,
        name,
        source_config.environment if source_config else None,
    )
    floor = run.algorithm.filter_groups
    return TrainingSource(
        name,
        share=source_shares(run)[name],
        follows_yield=name in follows_yield(run),
        settings=group_settings(config, num_rows),
        prompts=prompts,
        strategy=strategy,
        groups=of_source,
        guard=YieldGuard(floor.min_yield, floor.min_yield_groups, name),
    )


def _refuse_clients(_data_source: str) -> None:
    raise DataError(
        "this run takes prompts only from sluice.sources, and a client's prompt belongs to none "
        "of them; submit prompts to a run without sluice.sources"
    )


def _prompt_store(config: RunConfig, validation: PromptFiles | None) -> PromptStore | None:
    names = config.sluice.evaluation.benchmarks
    if not names or validation is None:
        return None
    return open_store(Path(config.sluice.run_dir), names, validation)


def _strategy(
    config: RunConfig, num_groups: int, memory: PromptMemoryStore | None
) -> SamplingStrategy:
    strategy = SamplingStrategy(replace(sampling_rules(config), train_batch_size=num_groups))
    for key, mean_tokens in memory.lengths(KNOWN_LENGTHS) if memory else ():
        strategy.forecast.remember(key, mean_tokens)
    return strategy


def _traces(config: RunConfig, ledger: PromptLedger) -> PromptTraces:
    if not TRACER.is_on:
        return PromptTraces()
    is_first = ledger.num_submitted == 0
    return PromptTraces(trace_key(Path(config.sluice.run_dir), is_first=is_first))


def _data_source_check(config: RunConfig) -> partial[Scorer] | None:
    """Return the check that refuses data sources without a scorer; ``None`` refuses none."""
    reward = config.reward
    check_routes(reward.scorer_routes)
    if may_grade_itself(config):  # a sample without a grade counts as failed
        return None
    if reward.custom_reward_function.path is not None or reward.reward_model.enable:
        return None
    has_sandbox = backend_of(config.sluice.sandbox, reward.sandbox_fusion) is not None
    programs = RULES[PROGRAM_TESTS] if has_sandbox else None  # scorer processes have the sandbox
    return partial(scorer_for, routes=reward.scorer_routes, programs=programs)
