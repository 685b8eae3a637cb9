"""`sluice.*`: what verl has no key for: services, sampling, weights, live page, traces."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from sluice.config.schema.limits import LimitsConfig
from sluice.config.schema.section import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
    Share,
)
from sluice.config.schema.security import SecurityConfig

MOST_MESSAGE_MB = 2047  # a protobuf ends below 2 GiB
Port = Annotated[int, Meta(ge=0, le=65535)]


class DashboardConfig(Section, frozen=True):
    """The live page beside the trainer, and the samples that it shows."""

    port: Port | None = None
    """Port of the live page, which a process beside trainer rank 0 serves; 0: the system chooses,
    see dashboard.url in the run's folder; none: not served.
    """

    host: str = "127.0.0.1"
    """Interface of the live page; others than loopback need a token_file."""

    samples_mb: NonNegativeInt = 256
    """Size of the folder samples of the run, MiB; it holds ended groups with all their responses,
    and the oldest are deleted; 0: none are written.
    """

    sample_chars: PositiveInt = 16384
    """Characters of a prompt or response that are kept there; a longer one keeps its beginning and
    its end.
    """


class TracesConfig(Section, frozen=True):
    """Spans from prompt to gradient. Off unless they go somewhere."""

    endpoint: str | None = None
    """Collector that takes spans by OTLP over gRPC, as http://host:port or https://host:port; none:
    spans are sent nowhere, whatever OTEL_EXPORTER_OTLP_ENDPOINT is.
    """

    file: str | None = None
    """File that spans are appended to, as lines of OTLP in JSON; a relative one is in the run's
    folder; none: spans are written nowhere.
    """

    sample_ratio: Share = 0.1
    """Share of the prompts whose traces are recorded. Steps are always recorded."""

    file_mb: PositiveInt = 1024
    """Size in MiB at which nothing more is appended to the file; the log reports it once; a file
    that is moved away starts again.
    """

    follow_callers: bool = False
    """Clients that send a trace decide whether it is recorded, whatever sample_ratio is; false: the
    same share of their traces is recorded, chosen by the trace's id.
    """


class TelemetryConfig(Section, frozen=True):
    """Traces."""

    traces: TracesConfig = TracesConfig()


class AsynchronyConfig(Section, frozen=True):
    """How far generation may run ahead of training."""

    max_staleness: NonNegativeInt = 0
    """Versions the oldest token of a trained sample may lag behind; 0: synchronous, on-policy."""

    ahead_share: PositiveShare = 1.0
    """Share of max_staleness batches that may be generated ahead of the policy that trains them; it
    bounds the mean age, as max_staleness bounds that of the oldest sample. It has no effect where
    max_staleness is 0.
    """

    on_stale: Literal["wait", "drop"] = "wait"
    """wait: a batch waits for groups that would grow stale; drop: they are dropped and counted."""

    pace: bool = True
    """Start prompts that are expected to take long early in a version's time, by their earlier
    lengths, so that fewer batches wait; false: in the order of issue.
    """


StrategyKey = Literal["rounds", "stream", "staged", "memory", "staged_memory"]
"""The names of `sluice.algorithm.sampling.rules.StrategyName`."""


class SamplingConfig(Section, frozen=True):
    """Over-generation."""

    strategy: StrategyKey = "stream"
    """rounds: verl's waves of prompts, surplus thrown away; stream: continuous refill, surplus
    carried over; staged: a few samples of a group decide about the rest; memory: earlier attempts
    of a prompt decide whether it starts; staged_memory: both.
    """

    probe_samples: PositiveInt = 4
    """staged: samples of a group that are generated first; below rollout.n."""

    exploration: PositiveShare = 0.1
    """Least probability with which a prompt or group that is not worth its tokens is generated all
    the same.
    """

    coverage_guard: bool = True
    """staged, memory: keep the share of hard prompts among trained groups what it is without them.
    """

    on_policy_fill: Literal["exact", "expected"] | None = None
    """Where max_staleness is 0, except for rounds: expected: as many groups run as are expected to
    fill a batch; when it is full, the next policy samples the others again; exact: never a group
    that might be one too many, so that a run can repeat; none: exact with an engine whose samples
    repeat (sluice.rollout.batch_invariant), else expected.
    """


class EndpointConfig(Section, frozen=True):
    """Where a service listens and is found."""

    host: str = "127.0.0.1"
    """Interface to listen on."""

    port: Port = 0
    """Port to listen on; 0: chosen by the launcher."""

    advertise: str | None = None
    """host or host:port that peers use; none, or without a port: those above."""

    health_port: Port = 0
    """Unencrypted port where health answers and nothing else, for probes without credentials; 0:
    health answers on the service's port alone.
    """

    metrics_port: Port | None = None
    """Port of the same interface where Prometheus reads metrics, unencrypted and without a token;
    0: a free one; none: no metrics.
    """


class RolloutServiceConfig(Section, frozen=True):
    """Settings of one replica."""

    endpoint: EndpointConfig = EndpointConfig()
    replicas: NonNegativeInt = 1
    """Replicas that the local launcher starts."""

    torch_threads: PositiveInt = 1
    """Threads of the torch engine; more than 1 is slower for tiny models."""

    batch_invariant: bool | None = None
    """Same tokens whatever else runs (fixed shapes, slower); none: on when max_staleness is 0,
    unless sluice.sampling.on_policy_fill is expected.
    """

    max_queued: PositiveInt = 4096
    """Samples that may wait for a slot before calls are refused."""

    max_n: Annotated[PositiveInt, Meta(le=1024)] = 256
    """Most samples in one call."""

    device: str | None = None
    """cpu, cuda or npu; none: what is there."""

    drain_timeout_s: PositiveFloat = 10.0
    """Seconds given to running samples at shutdown."""


ThenKey = Literal["leave_out", "drop_group"]
ScoringActionKey = Literal["score_again", "generate_again", "leave_out", "drop_group"]
"""The values of `sluice.algorithm.groups.filter.OutcomeAction`."""


class ScoringFailureConfig(Section, frozen=True):
    """A response that got no score."""

    action: ScoringActionKey = "leave_out"
    """score_again: the same response is graded again; generate_again: another response is sampled;
    leave_out: the others are trained; drop_group: the group is dropped.
    """

    max_attempts: Annotated[PositiveInt, Meta(le=16)] = 2
    """Times a sample is scored, or generated, in all; then see `then`."""

    then: ThenKey = "leave_out"
    """After the last attempt. leave_out: the group's other samples are trained, if enough are left;
    drop_group: the group is dropped as failed.
    """


class UnfinishedSampleConfig(Section, frozen=True):
    """Samples that were not generated to their end."""

    then: ThenKey = "leave_out"
    """After the last attempt. leave_out: the group's other samples are trained, if enough are left;
    drop_group: the group is dropped as failed.
    """


class SampleOutcomesConfig(Section, frozen=True):
    """Samples without a score. None of them ever becomes a number."""

    unscorable: ScoringFailureConfig = ScoringFailureConfig()
    scorer_timeout: ScoringFailureConfig = ScoringFailureConfig(action="score_again")
    scorer_crash: ScoringFailureConfig = ScoringFailureConfig(action="score_again")
    # No replica has generated it in sluice.reward.max_attempts attempts.
    engine_error: UnfinishedSampleConfig = UnfinishedSampleConfig()
    # Its group's deadline or token budget aborted it.
    aborted: UnfinishedSampleConfig = UnfinishedSampleConfig()
    min_share: Annotated[float, Meta(ge=0.5, le=1)] = 0.5
    """Share of a group's samples that must have a score for the group to be trained; two at least,
    and all where the loss compares whole groups.
    """

    max_strikes: PositiveInt | None = 3
    """A prompt is quarantined when so many attempts in a row fail by scorer timeouts, scorer
    crashes or errors of an engine; none: never.
    """


class RewardServiceConfig(Section, frozen=True):
    """Settings of the reward service."""

    endpoint: EndpointConfig = EndpointConfig()
    generate_timeout_s: PositiveFloat = 600.0
    """Seconds one replica may take for a group before its missing samples continue elsewhere."""

    max_attempts: PositiveInt = 5
    """Failed attempts to generate a group's missing samples before it is left without them
    (outcomes.engine_error).
    """

    linger_ms: NonNegativeInt = 20
    """Finished samples wait this long to travel together."""

    partial_interval_ms: NonNegativeInt = 500
    """Tokens of unfinished samples come this often, so that another replica can continue them; 0:
    never, and stalled or slow replicas are not noticed.
    """

    stall_timeout_s: PositiveFloat = 30.0
    """Seconds without a token or a report of progress after which a group's samples continue on
    another replica.
    """

    slow_factor: Annotated[float, Meta(gt=1)] | None = 4.0
    """A group on a replica that is so many times slower than the others' median moves, once; none:
    never.
    """

    group_deadline_s: PositiveFloat | None = None
    """Seconds after its start when a training group ends without its unfinished samples; none:
    never.
    """

    group_token_budget: PositiveInt | None = None
    """Response tokens at which a training group ends without its unfinished samples; none: never.
    """

    inflight_slack: PositiveFloat = 1.5
    """Sequences in flight per slot of the fleet, at most; above 1 keeps slots busy between calls.
    """

    max_client_pending: PositiveInt = 65536
    """Unfinished prompts that clients may have submitted at once."""

    group_log: bool = True
    """Write a line for every group that ended to groups.jsonl."""

    ledger: Literal["sqlite", "memory"] = "sqlite"
    """Where accepted prompts are recorded; sqlite: a file of the run's folder that survives the
    service; memory: they are lost with it.
    """

    outcomes: SampleOutcomesConfig = SampleOutcomesConfig()


class TrainerServiceConfig(Section, frozen=True):
    """Settings of the trainer as a service."""

    endpoint: EndpointConfig = EndpointConfig()
    torch_threads: PositiveInt = 1
    """Torch threads of each trainer rank on CPU."""

    min_replicas: PositiveInt = 1
    """Replicas that must serve before the first step."""

    replica_wait_timeout_s: PositiveFloat = 120.0
    """Seconds to wait for min_replicas."""

    batch_timeout_s: PositiveFloat = 600.0
    """Seconds to wait for a train batch without any progress."""

    heartbeat_interval_s: PositiveFloat = 1.0
    """Seconds between a replica's heartbeats."""

    replica_ttl_s: PositiveFloat = 6.0
    """Seconds without a heartbeat after which a replica is dropped."""

    replica_stall_s: PositiveFloat = 60.0
    """Seconds without a token after which a replica that has work is out of use until it makes
    progress.
    """

    command_timeout_s: PositiveFloat = 120.0
    """Seconds a trainer rank waits for rank 0's next command."""

    skip_zero_advantage: bool = False
    """Run no passes over samples whose advantages are all 0, such as those of a group with equal
    rewards where nothing whitens them: they have no gradient. The loss is divided as if they were
    there.
    """


class WeightsConfig(Section, frozen=True):
    """Weight transfer."""

    bucket_mb: PositiveInt = 64
    """Largest collective, MiB."""

    timeout_s: PositiveFloat = 30.0
    """Seconds for forming a group, and for each collective."""

    probe_timeout_s: PositiveFloat = 3.0
    """Seconds a replica has to answer, before a group is formed and after a failed update."""

    backend: Literal["gloo", "nccl", "hccl"] | None = None
    """Collectives; none: by device."""

    delta: Literal["auto", "off"] = "auto"
    """auto sends what changed since the version that all replicas serve, bit for bit, where that is
    at most a quarter of the bytes; off always sends all weights.
    """

    recompute_kv: bool = False
    """After a swap recompute the cache of running samples with the new weights; False keeps the old
    cache.
    """


class WatchdogConfig(Section, frozen=True):
    """When a process without progress is reported, and when it is ended."""

    stall_s: PositiveFloat | None = 300.0
    """Seconds without progress, although there is work, after which a service logs what it waits
    for; none: never.
    """

    give_up_s: PositiveFloat | None = 1800.0
    """Seconds without progress after which the process ends with exit code 75, to be started again;
    none: never.
    """


class ServiceConfig(Section, frozen=True):
    """sluice's own keys."""

    run_dir: str = "runs/default"
    """Folder for logs, metrics, checkpoints, reports."""

    asynchrony: AsynchronyConfig = AsynchronyConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutServiceConfig = RolloutServiceConfig()
    reward: RewardServiceConfig = RewardServiceConfig()
    trainer: TrainerServiceConfig = TrainerServiceConfig()
    weights: WeightsConfig = WeightsConfig()
    security: SecurityConfig = SecurityConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    limits: LimitsConfig = LimitsConfig()
    dashboard: DashboardConfig = DashboardConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    max_message_mb: Annotated[int, Meta(ge=1, le=MOST_MESSAGE_MB)] | None = None
    """Largest gRPC message, MiB; none: 64, or a whole train batch if larger."""

    shutdown_grace_s: PositiveFloat = 15.0
    """Seconds a service may take to end in order."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe log line."""
