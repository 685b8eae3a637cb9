"""Build the reward service from a run's configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.queue import ReplicaQueue
from services.reward.generation.request import GenerationClient, greedy_sampling, training_sampling
from services.reward.grading.grader import Grader, SampleScorer, ScoreRequests, overlong_shaping
from services.reward.grading.scorers.registry import check_routes, scorer_for
from services.reward.groups.batcher import Batcher, BatchRules
from services.reward.groups.evaluation import Evaluator
from services.reward.groups.filter import GroupNeeds
from services.reward.groups.leases import ChangeSignal
from services.reward.groups.loop import Pipeline, PipelineParts
from services.reward.groups.settings import (
    PipelineSettings,
    outcome_policy,
    round_size,
    sampling_rules,
    straggler_rules,
)
from services.reward.ledger.ledger import MemoryLedger, PromptLedger, PromptState
from services.reward.ledger.sqlite import SqliteLedger
from services.reward.prompts.dataset import (
    PromptStream,
    prompt_images,
    training_files,
    training_stream,
    validation_files,
    validation_stream,
)
from services.reward.prompts.history import PromptMemoryStore
from services.reward.prompts.quarantine import Quarantine
from services.reward.prompts.source import PromptSource
from services.reward.prompts.submissions import Submissions
from services.reward.records.group_log import EndedGroups, GroupLog, SampleDumps, sample_dumps
from services.reward.records.outcomes import OutcomeRecorder, OutcomeRecords, PromptOutcome
from services.reward.records.statistics import YieldGuard, prompts_lost
from services.reward.records.tokens import GenerationTrace, TokenAccounts, TokenCountingClient
from services.reward.records.traces import PromptTraces, trace_key
from sluice.algorithm.sampling.pacing import KNOWN_LENGTHS
from sluice.algorithm.sampling.rules import StrategyName
from sluice.algorithm.sampling.strategy import SamplingStrategy
from sluice.config.derived import needs_greedy_baseline, needs_whole_groups
from sluice.config.run import RunConfig
from sluice.data.prompt_files import PromptFiles
from sluice.errors import NotReadyError
from sluice.telemetry.samples import FOLDER_NAME, SampleArchive, mib
from sluice.telemetry.tracing import TRACER
from sluice.types import DataProgress, Prompt
from sluice.vision.image_limits import ImageLimits

MEMORY_FILE = Path("reward") / "prompt_memory.sqlite"
LOG_FILE = Path("groups.jsonl")
LEDGER_FILE = Path("reward") / "ledger.sqlite"
QUARANTINE_FILE = Path("reward") / "quarantine.jsonl"


@dataclass(frozen=True, slots=True)
class RunFiles:
    """`memory` is ``None`` for strategies without one; `log` may be one that writes nothing.

    `ledger` is ``None`` where the ledger is to be in memory; `quarantine` is where prompts in
    quarantine are listed, ``None``: nowhere.
    """

    memory: PromptMemoryStore | None
    log: GroupLog
    ledger: SqliteLedger | None = None
    quarantine: Path | None = None


def no_run_files() -> RunFiles:
    """For a loop that leaves no files."""
    return RunFiles(None, GroupLog(None))


@contextmanager
def open_run_files(config: RunConfig) -> Iterator[RunFiles]:
    """Open the files, which are appended to where they exist.

    Raises:
        DataError: ledger or memory of prompts are damaged, in use or of another program.
    """
    folder, uses_memory = Path(config.sluice.run_dir), _uses_memory(config)
    log_file = folder / LOG_FILE if config.sluice.reward.group_log else None
    log = GroupLog(log_file, samples=_ended_groups(config))
    store = PromptMemoryStore(folder / MEMORY_FILE) if uses_memory else nullcontext()
    is_durable = config.sluice.reward.ledger == "sqlite"
    durable_ledger = SqliteLedger(folder / LEDGER_FILE) if is_durable else nullcontext()
    with durable_ledger as ledger, store as memory:
        yield RunFiles(memory, log, ledger, folder / QUARANTINE_FILE)


def _ended_groups(config: RunConfig) -> EndedGroups | None:
    kept = config.sluice.dashboard
    if kept.samples_mb == 0:
        return None
    folder = Path(config.sluice.run_dir) / FOLDER_NAME
    return EndedGroups(SampleArchive(folder, mib(kept.samples_mb)), kept.sample_chars)


def _uses_memory(config: RunConfig) -> bool:
    return StrategyName(config.sluice.sampling.strategy).uses_memory


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptSets:
    """Checked data sets; ``None``: not configured. `images` are limits; ``None``: none are read."""

    training: PromptFiles | None
    validation: PromptFiles | None
    images: ImageLimits | None = None


@dataclass(frozen=True, slots=True)
class RewardLoop:
    """What the servicer calls."""

    pipeline: Pipeline
    evaluation: Evaluator
    submissions: Submissions
    score_requests: ScoreRequests
    ledger: PromptLedger
    batcher: Batcher
    queue: ReplicaQueue
    recorder: OutcomeRecorder
    strategy: SamplingStrategy
    dumps: SampleDumps
    dataset_rows: int
    grader: Grader
    quarantine: Quarantine
    traces: PromptTraces

    def statistics(self) -> dict[str, float]:
        """Counters since the start, and ``reward/prompts_lost``, which only a defect raises.

        ``reward/groups_acknowledged`` is what trainers have said they trained, since the ledger
        began; a trainer may compare what was added since its own start with its count.
        ``reward/tokens/pending`` and the uses beside it add up to ``reward/tokens/received``.
        """
        totals = self.recorder.totals()
        totals["reward/tokens/pending"] += self.evaluation.num_pending_tokens
        lost = prompts_lost(self.ledger.accounts(), self.pipeline.held)
        return {
            **totals,
            **self.strategy.statistics(),
            "reward/samples_scored_again": float(self.grader.num_scored_again),
            "reward/quarantine": float(len(self.quarantine)),
            "reward/groups_acknowledged": float(self.ledger.num_acknowledged),
            "reward/validation_groups": float(self.evaluation.num_graded_groups),
            "reward/prompts_lost": float(lost),
        }

    def end(self) -> None:
        """Stop admitting; whoever waits is told."""
        self.pipeline.batches.close(NotReadyError("the reward service is shutting down"))
        self.submissions.end()


def open_prompt_sets(config: RunConfig) -> PromptSets:
    """Check the data sets' columns; `DataError` names file, column and remedy."""
    images = prompt_images(config)
    return PromptSets(
        training_files(config.data, images), validation_files(config.data, images), images
    )


def assemble(
    config: RunConfig,
    sets: PromptSets,
    scorers: SampleScorer,
    client: GenerationClient,
    files: RunFiles | None = None,
) -> RewardLoop:
    """Connect everything.

    Args:
        config: the run's configuration.
        sets: its data sets.
        scorers: the running pool.
        client: how replicas are called.
        files: what it writes into the run's folder; ``None``: nothing.

    Raises:
        ConfigError: settings that cannot work together.
    """
    open_stream = _training_opener(config, sets.training, sets.images)
    check_data_source = _data_source_check(config)
    endings, rules, run_files = _Endings(), _batch_rules(config), files or no_run_files()
    ledger = run_files.ledger or MemoryLedger()
    traces = _traces(config, ledger)
    strategy = SamplingStrategy(sampling_rules(config))
    for key, mean_tokens in run_files.memory.lengths(KNOWN_LENGTHS) if run_files.memory else ():
        strategy.forecast.remember(key, mean_tokens)
    source = _source(ledger, open_stream, check_data_source, strategy)
    parts = _stages(config, ledger, source, strategy, scorers, client, endings, run_files)
    rows = open_stream(DataProgress(0)).rows_per_epoch if open_stream else 0
    pipeline = Pipeline(_settings(config, rules, rows), parts, traces)
    submissions = _submissions(config, ledger, pipeline.submit, check_data_source)
    endings.listener = submissions.ended
    dumps = sample_dumps(config.trainer)
    evaluation = Evaluator(
        _validation_opener(config, sets.validation, sets.images),
        parts.dispatcher,
        parts.grader,
        parts.trace,
        dumps,
        lambda: pipeline.policy_version,
        on_tokens=parts.recorder.evaluated,
    )
    return RewardLoop(
        pipeline,
        evaluation,
        submissions,
        ScoreRequests(scorers, config.sluice.limits.max_client_score_items),
        ledger,
        parts.batcher,
        parts.queue,
        parts.recorder,
        parts.strategy,
        dumps,
        rows,
        parts.grader,
        parts.quarantine,
        traces,
    )


def _traces(config: RunConfig, ledger: MemoryLedger) -> PromptTraces:
    """Follow the ledger's prompts, if this process is traced."""
    if not TRACER.is_on:
        return PromptTraces()
    is_first = ledger.accounts().num_submitted == 0
    traces = PromptTraces(trace_key(Path(config.sluice.run_dir), is_first=is_first))
    ledger.observe(traces)
    return traces


def _submissions(
    config: RunConfig,
    ledger: PromptLedger,
    accept: Callable[[Prompt], None],
    check_data_source: Callable[[str], None],
) -> Submissions:
    return Submissions(
        ledger,
        accept,
        check_data_source,
        config.sluice.reward.max_client_pending,
        config.sluice.limits.max_client_images_mb << 20,
    )


def _source(
    ledger: PromptLedger,
    open_stream: Callable[[DataProgress], PromptStream] | None,
    check_data_source: Callable[[str], None],
    strategy: SamplingStrategy,
) -> PromptSource:
    """Issues what the ledger of an earlier service holds, in its order, before anything else."""
    source = PromptSource(
        ledger, open_stream, check_data_source, strategy.forecast, strategy.num_in_line
    )
    for prompt in ledger.pending():
        if ledger.state(prompt.prompt_id) is PromptState.WAITING:
            source.put(prompt)
    if source.num_waiting:
        logger.info("%d prompts of an earlier service wait again", source.num_waiting)
    return source


def _stages(
    config: RunConfig,
    ledger: PromptLedger,
    source: PromptSource,
    strategy: SamplingStrategy,
    scorers: SampleScorer,
    client: GenerationClient,
    endings: _Endings,
    files: RunFiles,
) -> PipelineParts:
    capacity = ChangeSignal()
    changes = ChangeSignal(then=capacity)
    batcher = Batcher(_batch_rules(config))
    queue = ReplicaQueue(config.sluice.reward.inflight_slack, capacity.notify)
    received = TokenCountingClient(client)
    trace = GenerationTrace(received)
    dispatcher = GroupDispatcher(
        trace,
        queue,
        max_attempts=config.sluice.reward.max_attempts,
        leave_out_overlong=config.data.filter_overlong_prompts,
        rules=straggler_rules(config),
    )
    guard = YieldGuard(
        config.algorithm.filter_groups.min_yield, config.algorithm.filter_groups.min_yield_groups
    )
    recorder = OutcomeRecorder(
        OutcomeRecords(ledger, batcher, guard, trace, received, TokenAccounts(), files.log),
        round_size=round_size(strategy.rules),
        scorer_seconds=lambda: scorers.busy_seconds,
        on_end=endings.ended,
        further_gauges=partial(_batch_gauges, strategy),
    )
    grader = Grader(
        scorers,
        overlong_shaping(config.reward, config.data.max_response_length),
        outcome_policy(config),
    )
    return PipelineParts(
        ledger,
        source,
        queue,
        dispatcher,
        trace,
        grader,
        batcher,
        guard,
        strategy,
        recorder,
        files.log,
        files.memory,
        changes,
        capacity,
        Quarantine(ledger, config.sluice.reward.outcomes.max_strikes, files.quarantine),
    )


def _batch_gauges(strategy: SamplingStrategy) -> dict[str, float]:
    """The strategy's gauges for a batch's row; in synchronous mode those that repeat with the run.

    The measured yield weighs groups in the order they ended, which is a matter of timing; where
    batches on policy are filled exactly, nothing is decided by it.
    """
    gauges, rules = strategy.statistics(), strategy.rules
    if rules.max_staleness == 0 and not rules.preempts:
        gauges.pop("sampling/yield")
    return gauges


class _Endings:
    """Passes outcomes on; breaks the circle between those who end prompts and who submits them."""

    def __init__(self) -> None:
        self.listener: Callable[[PromptOutcome], None] | None = None

    def ended(self, outcome: PromptOutcome) -> None:
        if self.listener is not None:
            self.listener(outcome)


def _batch_rules(config: RunConfig) -> BatchRules:
    asynchrony = config.sluice.asynchrony
    return BatchRules(config.data.train_batch_size, asynchrony.max_staleness, asynchrony.on_stale)


def _settings(config: RunConfig, rules: BatchRules, epoch_rows: int) -> PipelineSettings:
    rollout, group_filter = config.actor_rollout_ref.rollout, config.algorithm.filter_groups
    sampling, choice = (
        training_sampling(rollout, config.data.max_response_length),
        sampling_rules(config),
    )
    return PipelineSettings(
        rules,
        rollout.n,
        sampling,
        group_filter.metric if group_filter.enable else None,
        greedy=greedy_sampling(sampling) if needs_greedy_baseline(config) else None,
        needs=GroupNeeds(
            needs_whole_groups(config),
            config.sluice.reward.outcomes.min_share,
            outcome_policy(config),
        ),
        probe_samples=choice.probe_samples if choice.strategy.uses_probes else None,
        epoch_rows=epoch_rows,
    )


def _training_opener(
    config: RunConfig, files: PromptFiles | None, images: ImageLimits | None
) -> Callable[[DataProgress], PromptStream] | None:
    if files is None:
        return None
    total_epochs = config.trainer.total_epochs

    def open_stream(progress: DataProgress) -> PromptStream:
        return training_stream(
            files, config.data, total_epochs=total_epochs, progress=progress, images=images
        )

    return open_stream


def _validation_opener(
    config: RunConfig, files: PromptFiles | None, images: ImageLimits | None
) -> Callable[[], PromptStream] | None:
    return None if files is None else partial(validation_stream, files, config.data, images=images)


def _data_source_check(config: RunConfig) -> Callable[[str], None]:
    reward = config.reward
    check_routes(reward.scorer_routes)

    def check(data_source: str) -> None:
        if reward.custom_reward_function.path is None and not reward.reward_model.enable:
            scorer_for(data_source, reward.scorer_routes)

    return check
