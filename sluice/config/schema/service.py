"""`sluice.*`: what verl has no key for: services, asynchrony, weights, fleet, live page, traces."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluice.config.schema.limits import LimitsConfig
from sluice.config.schema.sample_outcomes import SampleOutcomesConfig
from sluice.config.schema.sampling import SamplingConfig
from sluice.config.schema.section import NonNegativeInt, PositiveFloat, PositiveInt, Section, Share
from sluice.config.schema.security import SecurityConfig

PagePort = Annotated[int, Meta(ge=0, le=65535)]


class DashboardConfig(Section, frozen=True):
    """The live page beside the trainer, and the samples that it shows."""

    port: Annotated[
        PagePort | None,
        Meta(
            description=(
                "Port of the live page, which a process beside trainer rank 0 serves; 0: the "
                "system chooses, see dashboard.url in the run's folder; none: not served."
            )
        ),
    ] = None
    host: Annotated[
        str, Meta(description="Interface of the live page; others than loopback need a token_file.")
    ] = "127.0.0.1"
    samples_mb: Annotated[
        NonNegativeInt,
        Meta(
            description=(
                "Size of the folder samples of the run, MiB; it holds ended groups with all their "
                "responses, and the oldest are deleted; 0: none are written."
            )
        ),
    ] = 256
    sample_chars: Annotated[
        PositiveInt,
        Meta(
            description=(
                "Characters of a prompt or response that are kept there; a longer one keeps its "
                "beginning and its end."
            )
        ),
    ] = 16384


class TracesConfig(Section, frozen=True):
    """Spans from prompt to gradient. Off unless they go somewhere."""

    endpoint: Annotated[
        str | None,
        Meta(
            description=(
                "Collector that takes spans by OTLP over gRPC, as http://host:port or https://"
                "host:port; none: spans are sent nowhere, whatever OTEL_EXPORTER_OTLP_ENDPOINT "
                "is."
            )
        ),
    ] = None
    file: Annotated[
        str | None,
        Meta(
            description=(
                "File that spans are appended to, as lines of OTLP in JSON; a relative one is in "
                "the run's folder; none: spans are written nowhere."
            )
        ),
    ] = None
    sample_ratio: Annotated[
        Share,
        Meta(
            description=(
                "Share of the prompts whose traces are recorded. Steps are always recorded."
            )
        ),
    ] = 1.0
    file_mb: Annotated[
        PositiveInt,
        Meta(
            description=(
                "Size in MiB at which nothing more is appended to the file; the log reports it "
                "once; a file that is moved away starts again."
            ),
        ),
    ] = 1024
    follow_callers: Annotated[
        bool,
        Meta(
            description=(
                "Clients that send a trace decide whether it is recorded, whatever sample_ratio "
                "is; false: the same share of their traces is recorded, chosen by the trace's id."
            )
        ),
    ] = False


class TelemetryConfig(Section, frozen=True):
    """Traces."""

    traces: TracesConfig = msgspec.field(default_factory=TracesConfig)


Port = Annotated[int, Meta(ge=0, le=65535)]
AheadShare = Annotated[float, Meta(gt=0, le=1)]
SlowFactor = Annotated[float, Meta(gt=1)]
MOST_MESSAGE_MB = 2047  # a protobuf ends below 2 GiB
MessageSize = Annotated[int, Meta(ge=1, le=MOST_MESSAGE_MB)]


class AsynchronyConfig(Section, frozen=True):
    """How far generation may run ahead of training."""

    max_staleness: Annotated[
        NonNegativeInt,
        Meta(
            description=(
                "Versions the oldest token of a trained sample may lag behind; 0: "
                "synchronous, on-policy."
            )
        ),
    ] = 0
    ahead_share: Annotated[
        AheadShare,
        Meta(
            description=(
                "Share of max_staleness batches that may be generated ahead of the policy that "
                "trains them; it bounds the mean age, as max_staleness bounds that of the oldest "
                "sample. It has no effect where max_staleness is 0."
            )
        ),
    ] = 1.0
    on_stale: Annotated[
        Literal["wait", "drop"],
        Meta(
            description=(
                "wait: a batch waits for groups that would grow stale; drop: they are dropped "
                "and counted."
            )
        ),
    ] = "wait"
    pace: Annotated[
        bool,
        Meta(
            description=(
                "Start prompts that are expected to take long early in a version's time, by their "
                "earlier lengths, so that fewer batches wait; false: in the order of issue."
            )
        ),
    ] = True


class EndpointConfig(Section, frozen=True):
    """Where a service listens and is found."""

    host: Annotated[str, Meta(description="Interface to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port to listen on; 0: chosen by the launcher.")] = 0
    advertise: Annotated[
        str | None,
        Meta(description="host or host:port that peers use; none, or without a port: those above."),
    ] = None
    health_port: Annotated[
        Port,
        Meta(
            description=(
                "Unencrypted port where health answers and nothing else, for probes without "
                "credentials; 0: health answers on the service's port alone."
            )
        ),
    ] = 0
    metrics_port: Annotated[
        Port | None,
        Meta(
            description=(
                "Port of the same interface where Prometheus reads metrics, unencrypted and "
                "without a token; 0: a free one; none: no metrics."
            )
        ),
    ] = None


class RolloutServiceConfig(Section, frozen=True):
    """Settings of one replica."""

    endpoint: EndpointConfig = msgspec.field(default_factory=EndpointConfig)
    replicas: Annotated[
        NonNegativeInt, Meta(description="Replicas that the local launcher starts.")
    ] = 1
    torch_threads: Annotated[
        PositiveInt,
        Meta(description="Threads of the torch engine; more than 1 is slower for tiny models."),
    ] = 1
    batch_invariant: Annotated[
        bool | None,
        Meta(
            description=(
                "Same tokens whatever else runs (fixed shapes, slower); none: on when "
                "max_staleness is 0, unless sluice.sampling.on_policy_fill is expected."
            )
        ),
    ] = None
    max_queued: Annotated[
        PositiveInt, Meta(description="Samples that may wait for a slot before calls are refused.")
    ] = 4096
    max_n: Annotated[PositiveInt, Meta(le=1024, description="Most samples in one call.")] = 256
    device: Annotated[str | None, Meta(description="cpu, cuda or npu; none: what is there.")] = None
    drain_timeout_s: Annotated[
        PositiveFloat, Meta(description="Seconds given to running samples at shutdown.")
    ] = 10.0


class RewardServiceConfig(Section, frozen=True):
    """Settings of the reward service."""

    endpoint: EndpointConfig = msgspec.field(default_factory=EndpointConfig)
    generate_timeout_s: Annotated[
        PositiveFloat,
        Meta(
            description=(
                "Seconds one replica may take for a group before its missing samples continue "
                "elsewhere."
            )
        ),
    ] = 600.0
    max_attempts: Annotated[
        PositiveInt,
        Meta(
            description=(
                "Failed attempts to generate a group's missing samples before it is left without "
                "them (outcomes.engine_error)."
            )
        ),
    ] = 5
    linger_ms: Annotated[
        NonNegativeInt, Meta(description="Finished samples wait this long to travel together.")
    ] = 20
    partial_interval_ms: Annotated[
        NonNegativeInt,
        Meta(
            description=(
                "Tokens of unfinished samples come this often, so that another replica can "
                "continue them; 0: never, and stalled or slow replicas are not noticed."
            )
        ),
    ] = 500
    stall_timeout_s: Annotated[
        PositiveFloat,
        Meta(
            description=(
                "Seconds without a token or a report of progress after which a group's samples "
                "continue on another replica."
            )
        ),
    ] = 30.0
    slow_factor: Annotated[
        SlowFactor | None,
        Meta(
            description=(
                "A group on a replica that is so many times slower than the others' median moves, "
                "once; none: never."
            )
        ),
    ] = 4.0
    group_deadline_s: Annotated[
        PositiveFloat | None,
        Meta(
            description=(
                "Seconds after its start when a training group ends without its unfinished "
                "samples; none: never."
            )
        ),
    ] = None
    group_token_budget: Annotated[
        PositiveInt | None,
        Meta(
            description=(
                "Response tokens at which a training group ends without its unfinished samples; "
                "none: never."
            )
        ),
    ] = None
    inflight_slack: Annotated[
        PositiveFloat,
        Meta(
            description=(
                "Sequences in flight per slot of the fleet, at most; above 1 keeps slots busy "
                "between calls."
            )
        ),
    ] = 1.5
    max_client_pending: Annotated[
        PositiveInt, Meta(description="Unfinished prompts that clients may have submitted at once.")
    ] = 65536
    group_log: Annotated[
        bool, Meta(description="Write a line for every group that ended to groups.jsonl.")
    ] = True
    ledger: Annotated[
        Literal["sqlite", "memory"],
        Meta(
            description=(
                "Where accepted prompts are recorded; sqlite: a file of the run's folder that "
                "survives the service; memory: they are lost with it."
            )
        ),
    ] = "sqlite"
    outcomes: SampleOutcomesConfig = msgspec.field(default_factory=SampleOutcomesConfig)


class TrainerServiceConfig(Section, frozen=True):
    """Settings of the trainer as a service."""

    endpoint: EndpointConfig = msgspec.field(default_factory=EndpointConfig)
    torch_threads: Annotated[
        PositiveInt, Meta(description="Torch threads of each trainer rank on CPU.")
    ] = 1
    min_replicas: Annotated[
        PositiveInt, Meta(description="Replicas that must serve before the first step.")
    ] = 1
    replica_wait_timeout_s: Annotated[
        PositiveFloat, Meta(description="Seconds to wait for min_replicas.")
    ] = 120.0
    batch_timeout_s: Annotated[
        PositiveFloat, Meta(description="Seconds to wait for a train batch without any progress.")
    ] = 600.0
    heartbeat_interval_s: Annotated[
        PositiveFloat, Meta(description="Seconds between a replica's heartbeats.")
    ] = 1.0
    replica_ttl_s: Annotated[
        PositiveFloat,
        Meta(description="Seconds without a heartbeat after which a replica is dropped."),
    ] = 6.0
    replica_stall_s: Annotated[
        PositiveFloat,
        Meta(
            description=(
                "Seconds without a token after which a replica that has work is out of use until "
                "it makes progress."
            )
        ),
    ] = 60.0
    command_timeout_s: Annotated[
        PositiveFloat, Meta(description="Seconds a trainer rank waits for rank 0's next command.")
    ] = 120.0
    skip_zero_advantage: Annotated[
        bool,
        Meta(
            description=(
                "Run no passes over samples whose advantages are all 0, such as those of a group "
                "with equal rewards where nothing whitens them: they have no gradient. The loss is "
                "divided as if they were there."
            )
        ),
    ] = False


class WeightsConfig(Section, frozen=True):
    """Weight transfer."""

    bucket_mb: Annotated[PositiveInt, Meta(description="Largest collective, MiB.")] = 64
    timeout_s: Annotated[
        PositiveFloat, Meta(description="Seconds for forming a group, and for each collective.")
    ] = 30.0
    probe_timeout_s: Annotated[
        PositiveFloat,
        Meta(
            description=(
                "Seconds a replica has to answer, before a group is formed and after a failed "
                "update."
            )
        ),
    ] = 3.0
    backend: Annotated[
        Literal["gloo", "nccl", "hccl"] | None, Meta(description="Collectives; none: by device.")
    ] = None
    delta: Annotated[
        Literal["auto", "off"],
        Meta(
            description=(
                "auto sends what changed since the version that all replicas serve, bit for bit, "
                "where that is at most a quarter of the bytes; off always sends all weights."
            )
        ),
    ] = "auto"
    recompute_kv: Annotated[
        bool,
        Meta(
            description=(
                "After a swap recompute the cache of running samples with the new weights; "
                "False keeps the old cache."
            )
        ),
    ] = False


class WatchdogConfig(Section, frozen=True):
    """When a process without progress is reported, and when it is ended."""

    stall_s: Annotated[
        PositiveFloat | None,
        Meta(
            description=(
                "Seconds without progress, although there is work, after which a service logs what "
                "it waits for; none: never."
            )
        ),
    ] = 300.0
    give_up_s: Annotated[
        PositiveFloat | None,
        Meta(
            description=(
                "Seconds without progress after which the process ends with exit code 75, to be "
                "started again; none: never."
            )
        ),
    ] = 1800.0


class ServiceConfig(Section, frozen=True):
    """sluice's own keys."""

    run_dir: Annotated[str, Meta(description="Folder for logs, metrics, checkpoints, reports.")] = (
        "runs/default"
    )
    asynchrony: AsynchronyConfig = msgspec.field(default_factory=AsynchronyConfig)
    sampling: SamplingConfig = msgspec.field(default_factory=SamplingConfig)
    rollout: RolloutServiceConfig = msgspec.field(default_factory=RolloutServiceConfig)
    reward: RewardServiceConfig = msgspec.field(default_factory=RewardServiceConfig)
    trainer: TrainerServiceConfig = msgspec.field(default_factory=TrainerServiceConfig)
    weights: WeightsConfig = msgspec.field(default_factory=WeightsConfig)
    security: SecurityConfig = msgspec.field(default_factory=SecurityConfig)
    watchdog: WatchdogConfig = msgspec.field(default_factory=WatchdogConfig)
    limits: LimitsConfig = msgspec.field(default_factory=LimitsConfig)
    dashboard: DashboardConfig = msgspec.field(default_factory=DashboardConfig)
    telemetry: TelemetryConfig = msgspec.field(default_factory=TelemetryConfig)
    max_message_mb: Annotated[
        MessageSize | None,
        Meta(description="Largest gRPC message, MiB; none: 64, or a whole train batch if larger."),
    ] = None
    shutdown_grace_s: Annotated[
        PositiveFloat, Meta(description="Seconds a service may take to end in order.")
    ] = 15.0
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], Meta(description="Least severe log line.")
    ] = "INFO"
