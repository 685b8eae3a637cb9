"""`sluice.*`: what verl has no key for: services, limits, sources, guards, weights, traces,
environment, sandbox, security.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluice.config.schema.actor import AggregationMode, PolicyLossName
from sluice.config.schema.algorithm import EstimatorName
from sluice.config.schema.data import FileList
from sluice.config.schema.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
    Share,
)
from sluice.vision.image_limits import DEFAULT_LIMITS, MAX_PIXELS

MAX_MESSAGE_MB = 2047  # a protobuf ends below 2 GiB
Port = Annotated[int, Meta(ge=0, le=65535)]


class EnvironmentConfig(Section, frozen=True):
    """The environment of multi-turn episodes; without `path` and `addresses` a sample is one
    answer.
    """

    path: str | None = None
    """Python file that defines the environment; none: no environment, or one at `addresses`."""

    name: str | None = None
    """Class or async function in that file; none: its only one that is public."""

    addresses: list[str] = msgspec.field(default_factory=list)
    """host:port of servers of EnvironmentService, in place of `path`; after https:// with TLS."""

    agents: bool = False
    """Lease samples to programs that speak OpenAI's protocol, in place of `path`."""

    workers: PositiveInt = 2
    """Processes that run the environment of `path`."""

    memory_limit_mb: PositiveInt = 4096
    """Largest address space of a worker, MiB."""

    call_timeout_s: PositiveFloat = 60.0
    """Maximum seconds of one call of the environment; a worker that needs longer is killed."""

    episode_timeout_s: PositiveFloat = 1800.0
    """Maximum seconds of an episode, including its answers; then its sample fails."""

    max_invalid_calls: PositiveInt = 3
    """Consecutive answers with unreadable calls after which an episode ends."""


BackendKey = Literal["bubblewrap", "command", "sandbox_fusion"]


class SandboxConfig(Section, frozen=True):
    """The sandbox of programs that the policy writes; without one nothing runs them."""

    backend: BackendKey | None = None
    """bubblewrap: namespaces of this machine, without privileges; command: your own sandbox;
    sandbox_fusion: a server of SandboxFusion. None: sandbox_fusion if reward.sandbox_fusion.url is
    set, else programs are refused.
    """

    command: list[str] = msgspec.field(default_factory=list)
    """Your own sandbox, such as gVisor or nsjail: a program and its arguments. {folder} is a folder
    with the program's files; the program's own command line follows. Exit code 125 means that the
    sandbox has failed.
    """

    python: str | None = None
    """Python interpreter inside the sandbox; none: this process's, or python3 of the system if the
    sandbox's user cannot reach it.
    """

    memory_mb: PositiveInt = 1024
    """Memory of all processes of a program together, and address space of each, MiB."""

    tmp_mb: PositiveInt = 64
    """Size of a program's /tmp, MiB, which holds its files; no file can be larger."""

    processes: PositiveInt = 64
    """Maximum processes and threads of a program at once."""


FILE_FIELDS = ("ca_file", "cert_file", "key_file", "token_file")
# An empty text is a variable that was left unset; it must not switch protection off.
_Given = Annotated[str, Meta(min_length=1)]


class SecurityConfig(Section, frozen=True):
    """TLS and bearer tokens of all servers and calls. Holds names of files, never a secret."""

    tls: Literal["off", "server", "mtls"] = "off"
    """off: no encryption; server: callers check the server's certificate; mtls: the server checks
    the caller's certificate too.
    """

    ca_file: _Given | None = None
    """PEM file of the peers' certificate authorities; none, if tls is server: the system's."""

    cert_file: _Given | None = None
    """PEM file of this process's certificate chain."""

    key_file: _Given | None = None
    """PEM file of the private key of cert_file, unencrypted."""

    server_name: _Given | None = None
    """Name that callers expect in every server's certificate, instead of its address; none: the
    address to which they connect.
    """

    token_file: _Given | None = None
    """File of bearer tokens, one per line: servers accept all, callers present the first; none: the
    token in SLUICE_TOKEN, and without that no token is required.
    """


class KeepConfig(Section, frozen=True):
    """The best checkpoints, which no retention deletes."""

    metric: str | None = None
    """Metric of validations by which checkpoints are compared; none: held-out accuracy."""

    better: Literal["max", "min"] = "max"
    """Whether larger or smaller values are better."""

    top: NonNegativeInt = 1
    """Best checkpoints that stay beside the newest ones; 0: none."""


class GuardRuleConfig(Section, frozen=True):
    """One element of sluice.guards.rules."""

    action: Literal["hold", "stop", "rollback"]
    metric: str | None = None
    better: Literal["max", "min"] = "max"
    target: float | None = None
    limit: float | None = None
    deviations: NonNegativeFloat | None = None
    times: PositiveInt = 1
    window: PositiveInt = 1
    learning_rate_factor: PositiveShare = 0.5
    most_rollbacks: PositiveInt = 2


class GuardsConfig(Section, frozen=True):
    """What a run does about its own metrics."""

    keep: KeepConfig = KeepConfig()
    rules: list[GuardRuleConfig] = msgspec.field(default_factory=list)
    """Rules that hold, stop or roll back the run when a metric reaches a target, passes a limit, or
    falls behind its best value; the first that is broken acts. docs/guards.md has their keys.
    """


class LimitsConfig(Section, frozen=True):
    """Limits of what one client may send or have unfinished; the services refuse calls beyond them.

    Those of images apply to rows of data sets too. Other limits are beside what they bound:
    `sluice.max_message_mb`, `data.max_prompt_length`, `sluice.rollout.max_n`,
    `sluice.rollout.max_queued`, `sluice.reward.max_client_pending`.
    """

    max_submit_streams: PositiveInt = 256
    """SubmitPrompts calls that may be open at the same time."""

    max_prompts_per_stream: PositiveInt = 16384
    """Unfinished prompts of one SubmitPrompts call."""

    max_client_prompts: PositiveInt = 32768
    """Unfinished prompts of one client over all its open SubmitPrompts calls."""

    max_client_samples: PositiveInt = 1024
    """Unfinished samples of one client at one replica."""

    max_client_priority: Annotated[int, Meta(ge=0, le=100)] = 0
    """Highest priority that a client may request for its samples; training has priority 0."""

    max_client_score_items: PositiveInt = 16384
    """Unscored responses of one client over all its Score calls; one call has at most 4096."""

    max_watchers: PositiveInt = 256
    """WatchSteps calls that may be open at the same time."""

    max_prompt_turns: Annotated[int, Meta(ge=1, le=1024)] = 1024
    """Turns of a prompt that a client submits; replicas accept at most 1024."""

    max_extra_info_kb: PositiveInt = 1024
    """Size of the extra_info that a client sends with a prompt or response, KiB."""

    max_prompt_images: Annotated[int, Meta(ge=1, le=256)] = DEFAULT_LIMITS.max_images
    """Images of one prompt, from a client or a data set."""

    max_image_mb: PositiveInt = DEFAULT_LIMITS.max_bytes >> 20
    """Size of one encoded image, MiB."""

    max_prompt_images_mb: PositiveInt | None = None
    """All encoded images of one prompt, MiB; none: 16, or a quarter of a message if less."""

    max_image_pixels: Annotated[int, Meta(ge=1, le=MAX_PIXELS)] = DEFAULT_LIMITS.max_pixels
    """Width times height of an image, read from its header before it is decoded."""

    max_client_images_mb: PositiveInt = 512
    """Size of the images of all unfinished prompts that clients submitted, and of the images of one
    client's unfinished samples at one replica, MiB.
    """


class SourceConfig(Section, frozen=True):
    """Files with a share of every batch. What is null is as in the run."""

    files: FileList
    """Training files, as data.train_files; a source that ends begins again."""

    share: PositiveShare
    """Share of the groups of every train batch; the shares of all sources add up to 1."""

    curriculum: Literal["fixed", "yield"] = "fixed"
    """fixed: the share stays; yield: the sources with this word divide the sum of their shares in
    proportion to share times yield, so that groups go where the filter keeps most.
    """

    environment: str | None = None
    """Environment of rows without agent_name: a class of sluice.environment.path, tool_agent, or
    single_turn_agent for none; null: as in the run.
    """

    n: PositiveInt | None = None
    """Responses to each prompt, as actor_rollout_ref.rollout.n."""

    adv_estimator: EstimatorName | None = None
    """Estimator, as algorithm.adv_estimator; it sees the source's rows alone."""

    loss_mode: PolicyLossName | None = None
    """Loss, as actor_rollout_ref.actor.policy_loss.loss_mode."""

    loss_agg_mode: AggregationMode | None = None
    """As actor_rollout_ref.actor.loss_agg_mode; denominators count all sources."""

    clip_ratio_low: PositiveFloat | None = None
    """As actor_rollout_ref.actor.clip_ratio_low."""

    clip_ratio_high: PositiveFloat | None = None
    """As actor_rollout_ref.actor.clip_ratio_high."""

    clip_ratio_c: Annotated[float, Meta(gt=1)] | None = None
    """As actor_rollout_ref.actor.clip_ratio_c."""

    use_kl_loss: bool | None = None
    """As actor_rollout_ref.actor.use_kl_loss."""

    kl_loss_coef: NonNegativeFloat | None = None
    """As actor_rollout_ref.actor.kl_loss_coef."""


class DashboardConfig(Section, frozen=True):
    """The dashboard of a run, and the samples that it shows."""

    port: Port | None = None
    """Port of the dashboard, which a process beside trainer rank 0 serves; 0: a free port, written
    to dashboard.url in the run's folder; none: no dashboard.
    """

    host: str = "127.0.0.1"
    """Interface of the dashboard; any other than loopback requires a token_file."""

    samples_mb: NonNegativeInt = 256
    """Largest size of the run's samples folder, MiB. It holds finished groups with all responses;
    the oldest are deleted first; 0: no samples are written.
    """

    sample_chars: PositiveInt = 16384
    """Maximum characters of a stored prompt or response; longer ones lose their middle."""


class TracesConfig(Section, frozen=True):
    """Spans from prompt to gradient; off unless endpoint or file is set."""

    endpoint: str | None = None
    """Collector that receives spans by OTLP over gRPC, as http://host:port or https://host:port;
    none: no collector, even if OTEL_EXPORTER_OTLP_ENDPOINT is set.
    """

    file: str | None = None
    """File for spans, as lines of OTLP JSON; relative to the run's folder; none: no file."""

    sample_ratio: Share = 0.1
    """Share of prompts whose traces are recorded; steps are always recorded."""

    file_mb: PositiveInt = 1024
    """Largest size of the file, MiB. A full file gets no more spans, and the log reports that once;
    after you move the file away, a new one starts.
    """

    follow_callers: bool = False
    """true: a client that sends a trace decides whether it is recorded; false: sample_ratio
    decides, by the trace's id.
    """


class TelemetryConfig(Section, frozen=True):
    """Traces."""

    traces: TracesConfig = TracesConfig()


class AsynchronyConfig(Section, frozen=True):
    """How far generation may run ahead of training."""

    max_staleness: NonNegativeInt = 0
    """Maximum lag of a sample's oldest token in versions; 0: synchronous, on-policy."""

    ahead_share: PositiveShare = 1.0
    """Share of max_staleness batches that may be generated ahead of the policy that trains them. It
    bounds the mean age, while max_staleness bounds the age of every sample; no effect if
    max_staleness is 0.
    """

    on_stale: Literal["wait", "drop"] = "wait"
    """wait: a batch waits for groups that would become stale; drop: they are dropped, counted."""

    pace: bool = True
    """true: prompts with long earlier responses start early in a version's time, so that fewer
    batches wait; false: prompts start in the order of issue.
    """


StrategyKey = Literal["rounds", "stream", "staged", "memory", "staged_memory"]
"""The names of `sluice.algorithm.sampling.rules.StrategyName`."""


class SamplingConfig(Section, frozen=True):
    """Sampling strategy: how many groups start, and which."""

    strategy: StrategyKey = "stream"
    """rounds: verl's waves of prompts, surplus groups are discarded; stream: a new group starts
    whenever one ends, surplus groups wait for the next batch; staged: the first samples of a group
    decide whether the rest is generated; memory: earlier attempts of a prompt decide whether it
    starts; staged_memory: both.
    """

    probe_samples: PositiveInt = 4
    """staged: samples of a group that are generated first; below rollout.n."""

    exploration: PositiveShare = 0.1
    """Minimum probability of generating a prompt or group that the estimates would skip."""

    coverage_guard: bool = True
    """staged, memory: keep the share of hard prompts among trained groups as without skipping."""

    on_policy_fill: Literal["exact", "expected"] | None = None
    """How a batch fills if max_staleness is 0 (not with rounds). exact: never more groups than the
    batch can use, so that a run can repeat; expected: as many groups as are expected to fill the
    batch, and the next policy samples the rest again; none: exact if the engine's samples repeat
    (sluice.rollout.batch_invariant), else expected.
    """

    train_truncated: bool = False
    """Train on samples that rollout.top_p or rollout.top_k truncated, though the trainer's logprobs
    are of the whole distribution; false: such a run is refused.
    """


class EndpointConfig(Section, frozen=True):
    """Where a service listens, and where peers find it."""

    host: str = "127.0.0.1"
    """Interface to listen on."""

    port: Port = 0
    """Port to listen on; 0: the launcher chooses one."""

    advertise: str | None = None
    """host or host:port to which peers connect; a missing part is taken from host and port."""

    health_port: Port = 0
    """Unencrypted port that answers only health checks, for probes without credentials; 0: health
    answers only on the service's port.
    """

    metrics_port: Port | None = None
    """Port on the same interface where Prometheus reads metrics, without encryption or token; 0: a
    free port; none: no metrics.
    """


class RolloutServiceConfig(Section, frozen=True):
    """Settings of one replica."""

    endpoint: EndpointConfig = EndpointConfig()
    replicas: NonNegativeInt = 1
    """Replicas that the local launcher starts."""

    torch_threads: PositiveInt = 1
    """Threads of the torch engine on the CPU; more than 1 is slower for tiny models."""

    batch_invariant: bool | None = None
    """Generate the same tokens whatever else runs in the engine (fixed shapes, slower); none: on if
    max_staleness is 0, unless sluice.sampling.on_policy_fill is expected.
    """

    max_queued: PositiveInt = 4096
    """Maximum samples that may wait for a slot; the replica refuses further calls."""

    max_n: Annotated[PositiveInt, Meta(le=1024)] = 256
    """Maximum samples of one call."""

    device: str | None = None
    """cpu, cuda or npu; none: an accelerator if there is one, else the CPU."""

    drain_timeout_s: PositiveFloat = 10.0
    """Maximum seconds that running samples get to finish at shutdown."""

    serves_model_files: bool = False
    """Serve the weights of the model's files, as version 0, without a trainer. Only for an
    evaluation; a trainer refuses it.
    """


ThenKey = Literal["leave_out", "drop_group"]
ScoringActionKey = Literal["score_again", "generate_again", "leave_out", "drop_group"]
"""The values of `sluice.algorithm.groups.filter.OutcomeAction`."""


class ScoringFailureConfig(Section, frozen=True):
    """What happens to a response that got no score."""

    action: ScoringActionKey = "leave_out"
    """score_again: grade the same response again; generate_again: sample another response;
    leave_out: train the group's other samples; drop_group: drop the group.
    """

    max_attempts: Annotated[PositiveInt, Meta(le=16)] = 2
    """Maximum times that a sample is scored or generated, in total; then `then` applies."""

    then: ThenKey = "leave_out"
    """After the last attempt. leave_out: train the group's other samples, if enough are left
    (min_share); drop_group: drop the group as failed.
    """


class UnfinishedSampleConfig(Section, frozen=True):
    """What happens to a sample that was not generated to its end."""

    then: ThenKey = "leave_out"
    """leave_out: train the group's other samples, if enough are left (min_share); drop_group: drop
    the group as failed.
    """


class SampleOutcomesConfig(Section, frozen=True):
    """What happens to samples without a score; none of them ever becomes a number."""

    unscorable: ScoringFailureConfig = ScoringFailureConfig()
    scorer_timeout: ScoringFailureConfig = ScoringFailureConfig(action="score_again")
    scorer_crash: ScoringFailureConfig = ScoringFailureConfig(action="score_again")
    # No replica has generated it in sluice.reward.max_attempts attempts.
    engine_error: UnfinishedSampleConfig = UnfinishedSampleConfig()
    # Its group's deadline or token budget aborted it.
    aborted: UnfinishedSampleConfig = UnfinishedSampleConfig()
    # Its environment is down, was killed or hung, or its episode had no time left.
    environment: UnfinishedSampleConfig = UnfinishedSampleConfig()
    # The program that worked on it failed, or its lease expired.
    agent: UnfinishedSampleConfig = UnfinishedSampleConfig()
    min_share: Annotated[float, Meta(ge=0.5, le=1)] = 0.5
    """Minimum share of a group's samples that must have a score for the group to be trained; at
    least two samples, and all of them if the loss compares whole groups.
    """

    max_strikes: PositiveInt | None = 3
    """A prompt is quarantined after this many strikes: attempts in a row that failed by a scorer
    timeout, a scorer crash or an engine error; none: never.
    """


class RewardServiceConfig(Section, frozen=True):
    """Settings of the reward service."""

    endpoint: EndpointConfig = EndpointConfig()
    generate_timeout_s: PositiveFloat | None = None
    """Maximum seconds of a replica for a group; its missing samples then continue on another one.
    None: 0.1 for each token of data.max_response_length, and at least 600.
    """

    max_attempts: PositiveInt = 5
    """Maximum failed attempts to generate the missing samples of a group; after that the group
    continues without them (outcomes.engine_error).
    """

    linger_ms: NonNegativeInt = 20
    """Time that a finished sample waits for others to be sent with it."""

    partial_interval_ms: NonNegativeInt = 500
    """Minimum interval at which replicas send the tokens of unfinished samples, so that another
    replica can continue them; 0: never, and then stalled or slow replicas are not detected. With
    more than 5000 slots in the fleet it grows: 1 ms for 10 slots, up to a quarter of
    stall_timeout_s.
    """

    stall_timeout_s: PositiveFloat = 30.0
    """Seconds without progress after which a group's missing samples continue elsewhere; data
    that has arrived but is not read yet counts as progress.
    """

    slow_factor: Annotated[float, Meta(gt=1)] | None = 4.0
    """A group moves to another replica, once, if its replica is this many times slower than the
    median of the others; none: never.
    """

    group_deadline_s: PositiveFloat | None = None
    """Seconds after which a training group ends without its unfinished samples; none: never."""

    group_token_budget: PositiveInt | None = None
    """Tokens at which a training group ends without its unfinished samples; none: never."""

    inflight_slack: PositiveFloat = 1.5
    """Maximum sequences in flight per slot of all replicas; above 1 keeps slots busy
    between calls.
    """

    max_client_pending: PositiveInt = 65536
    """Maximum unfinished prompts of all clients together."""

    group_log: bool = True
    """Write one line per finished group to groups.jsonl."""

    ledger: Literal["sqlite", "memory"] = "sqlite"
    """Where accepted prompts are recorded: sqlite, a file in the run's folder that survives a
    restart of the service; memory: a restart loses them.
    """

    outcomes: SampleOutcomesConfig = SampleOutcomesConfig()


class TrainerServiceConfig(Section, frozen=True):
    """Settings of the trainer as a service."""

    endpoint: EndpointConfig = EndpointConfig()
    torch_threads: PositiveInt = 1
    """Torch threads of each trainer rank on CPU."""

    min_replicas: PositiveInt = 1
    """Replicas that must be ready before the first step."""

    replica_wait_timeout_s: PositiveFloat | None = None
    """Maximum seconds to wait for min_replicas; then the run fails. None: 120, or 600 for vllm and
    sglang, and 4 for each GB of weights.
    """

    batch_timeout_s: PositiveFloat = 600.0
    """Maximum seconds without progress while the trainer waits for a batch; then the run fails.
    Seconds in which all samples wait for agents or environments do not count.
    """

    heartbeat_interval_s: PositiveFloat = 1.0
    """Seconds between two heartbeats of a replica."""

    replica_ttl_s: PositiveFloat = 6.0
    """Seconds without a heartbeat after which a replica is removed."""

    replica_stall_s: PositiveFloat = 60.0
    """Seconds without a token after which a replica with work is unused until it progresses."""

    command_timeout_s: PositiveFloat | None = None
    """Maximum seconds that a trainer rank waits for the other ranks. None: 120, and 4 for each GB
    of weights.
    """

    skip_zero_advantage: bool = False
    """Skip the passes over samples whose advantages are all 0, which have no gradient, such as
    groups of equal rewards. The loss is divided as if they were included.
    """

    turn_rewards: bool = False
    """Train on the rewards that an environment gives turns: the return of a turn is the episode's
    reward plus its own and later turns', and the group's whole returns are the baseline; false:
    only the episode's reward counts.
    """


class WeightsConfig(Section, frozen=True):
    """Transfer of weights from the trainer to the replicas."""

    bucket_mb: PositiveInt = 64
    """Largest message of a collective, MiB."""

    timeout_s: PositiveFloat = 30.0
    """Maximum seconds to form a transfer group, and for each collective."""

    probe_timeout_s: PositiveFloat = 3.0
    """Maximum seconds for a replica's answer to a probe (new group, or after a failed update)."""

    backend: Literal["gloo", "nccl", "hccl"] | None = None
    """Backend of the collectives; none: the one that fits the device."""

    delta: Literal["auto", "off"] = "auto"
    """auto: send only changed elements, bit for bit, if they take at most a quarter of the bytes;
    off: always send all weights.
    """

    overlap: Literal["auto", "off"] = "auto"
    """auto: if sluice.asynchrony.max_staleness is 2 or more, the trainer takes and trains the next
    batch while a version is sent; off: it waits until the replicas serve the version.
    """

    recompute_kv: bool = False
    """After a swap, recompute running samples' KV cache; false: keep the old cache."""


class WatchdogConfig(Section, frozen=True):
    """When a process without progress is reported, and when it exits."""

    stall_s: PositiveFloat | None = 300.0
    """Seconds with work but no progress after which a service logs its waits; none: never."""

    give_up_s: PositiveFloat | None = 1800.0
    """Seconds without progress after which the process exits with code 75; none: never."""


class EvaluationConfig(Section, frozen=True):
    """A stand-alone evaluation; `sluice eval --model` sets its keys."""

    benchmarks: list[str] = msgspec.field(default_factory=list)
    """Names of data.val_files, in their order. Set: the run is an evaluation of
    actor_rollout_ref.model.path, without a trainer, that stores each finished prompt in
    responses/NAME.jsonl below sluice.run_dir and skips it after a restart; empty: it trains.
    """


class ServiceConfig(Section, frozen=True):
    """Keys that verl does not have."""

    run_dir: str = "runs/default"
    """Folder of the run: logs, metrics, checkpoints and reports."""

    placement: str = "auto"
    """How the devices of a launch that names one pool for both, as verl's do, are divided: auto, by
    estimated speed; or "trainer:32,rollout:32".
    """

    asynchrony: AsynchronyConfig = AsynchronyConfig()
    sampling: SamplingConfig = SamplingConfig()
    sources: dict[str, SourceConfig] = msgspec.field(default_factory=dict)
    """Several sources of prompts in place of data.train_files, by name: each with files, a share of
    every batch, and settings of its own.
    """

    rollout: RolloutServiceConfig = RolloutServiceConfig()
    reward: RewardServiceConfig = RewardServiceConfig()
    trainer: TrainerServiceConfig = TrainerServiceConfig()
    weights: WeightsConfig = WeightsConfig()
    security: SecurityConfig = SecurityConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    limits: LimitsConfig = LimitsConfig()
    dashboard: DashboardConfig = DashboardConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sandbox: SandboxConfig = SandboxConfig()
    guards: GuardsConfig = GuardsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    max_message_mb: Annotated[int, Meta(ge=1, le=MAX_MESSAGE_MB)] | None = None
    """Largest gRPC message, MiB; none: 64, or what a sample or a batch's outline needs, if more."""

    shutdown_grace_s: PositiveFloat = 15.0
    """Maximum seconds for an orderly shutdown of a service."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level of the log lines that are written."""
