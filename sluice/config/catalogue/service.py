"""`sluice.*`: keys that verl does not have."""

from __future__ import annotations

from sluice.config.catalogue.entry import Entry, honoured

_KEY = "sluice"


def _endpoint(service: str) -> tuple[Entry, ...]:
    return tuple(
        honoured(f"{_KEY}.{service}.endpoint.{name}")
        for name in ("host", "port", "advertise", "health_port", "metrics_port")
    )


def _scoring_failure(kind: str) -> tuple[Entry, ...]:
    key = f"{_KEY}.reward.outcomes.{kind}"
    return (
        honoured(
            f"{key}.action",
            effect="generate_again favours responses that can be scored, which biases what is "
            "trained",
        ),
        honoured(f"{key}.max_attempts"),
        honoured(f"{key}.then"),
    )


ENTRIES: tuple[Entry, ...] = (
    honoured(f"{_KEY}.run_dir"),
    honoured(
        f"{_KEY}.asynchrony.max_staleness",
        unit="versions",
        effect="From 1 on generation and training overlap",
        advice=(
            "1, which switches on the correction that the loss reads where none is set; 0 repeats "
            "verl's synchronous trainer"
        ),
    ),
    honoured(
        f"{_KEY}.asynchrony.ahead_share",
        effect="Lower: fresher samples, which teach more each, and less overlap of generation and "
        "training",
        advice="1 where training takes as long as generation; where it takes a quarter of that, "
        "0.25 is as fast and a third as stale",
    ),
    honoured(f"{_KEY}.asynchrony.on_stale"),
    honoured(f"{_KEY}.asynchrony.pace"),
    honoured(
        f"{_KEY}.sampling.strategy",
        effect="How many tokens are drawn for each that is trained, and how fast a batch is full",
        advice="stream; staged_memory where most groups are filtered; rounds to repeat a run of "
        "verl's",
    ),
    honoured(f"{_KEY}.sampling.probe_samples", unit="samples", advice="4 of 16"),
    honoured(
        f"{_KEY}.sampling.exploration",
        effect="Higher: more tokens on prompts that are filtered, and a quicker notice of those "
        "that become solvable",
    ),
    honoured(
        f"{_KEY}.sampling.coverage_guard",
        advice="true; false is cheaper and trains fewer hard prompts",
    ),
    honoured(
        f"{_KEY}.sampling.on_policy_fill",
        effect="expected fills a batch about twice as fast (simulated), and draws some tokens in "
        "vain",
        advice="expected, unless a run has to repeat bit for bit",
    ),
    *_endpoint("rollout"),
    honoured(f"{_KEY}.rollout.replicas", effect="Rollouts per second grow with it"),
    honoured(f"{_KEY}.rollout.torch_threads"),
    honoured(f"{_KEY}.rollout.batch_invariant", effect="true is slower"),
    honoured(f"{_KEY}.rollout.max_queued", unit="samples"),
    honoured(f"{_KEY}.rollout.max_n", unit="samples"),
    honoured(f"{_KEY}.rollout.device"),
    honoured(f"{_KEY}.rollout.drain_timeout_s", unit="seconds"),
    *_endpoint("reward"),
    honoured(
        f"{_KEY}.reward.generate_timeout_s",
        unit="seconds",
        advice="Above the time of the longest response",
    ),
    honoured(f"{_KEY}.reward.max_attempts"),
    honoured(f"{_KEY}.reward.linger_ms", unit="milliseconds"),
    honoured(
        f"{_KEY}.reward.partial_interval_ms",
        unit="milliseconds",
        effect="What a lost replica costs is at most one interval's tokens",
    ),
    honoured(
        f"{_KEY}.reward.stall_timeout_s",
        unit="seconds",
        advice="well above the longest prefill and weight swap",
    ),
    honoured(
        f"{_KEY}.reward.slow_factor",
        advice="4; it rests where sluice.rollout.batch_invariant holds, to keep runs repeatable",
    ),
    honoured(
        f"{_KEY}.reward.group_deadline_s",
        unit="seconds",
        effect="Cuts the longest answers off, which biases what is trained towards short ones",
        advice="null, or several times the time of the longest response",
    ),
    honoured(
        f"{_KEY}.reward.group_token_budget",
        unit="tokens",
        effect="As group_deadline_s",
        advice="null",
    ),
    honoured(f"{_KEY}.reward.inflight_slack"),
    honoured(f"{_KEY}.reward.max_client_pending", unit="prompts"),
    honoured(
        f"{_KEY}.reward.group_log",
        effect="About 300 bytes of disk a group",
        advice="true: sluice simulate learns pass rates, lengths and speeds from it",
    ),
    honoured(
        f"{_KEY}.reward.ledger",
        effect="A client's receipt, a batch and its acknowledgement wait for the disk",
        advice="sqlite",
    ),
    honoured(
        f"{_KEY}.reward.ledger_samples_interval_s",
        unit="seconds",
        effect="What a killed reward service costs is at most one interval's tokens",
    ),
    honoured(
        f"{_KEY}.reward.ledger_samples_mb",
        unit="MiB",
        effect="Disk of the run's folder; about 8 bytes a token",
    ),
    *_scoring_failure("unscorable"),
    *_scoring_failure("scorer_timeout"),
    *_scoring_failure("scorer_crash"),
    honoured(f"{_KEY}.reward.outcomes.engine_error.then"),
    honoured(f"{_KEY}.reward.outcomes.aborted.then"),
    honoured(f"{_KEY}.reward.outcomes.min_share", advice="0.5"),
    honoured(f"{_KEY}.reward.outcomes.max_strikes", unit="visits"),
    *_endpoint("trainer"),
    honoured(f"{_KEY}.trainer.torch_threads"),
    honoured(f"{_KEY}.trainer.min_replicas"),
    honoured(f"{_KEY}.trainer.replica_wait_timeout_s", unit="seconds"),
    honoured(f"{_KEY}.trainer.batch_timeout_s", unit="seconds"),
    honoured(f"{_KEY}.trainer.heartbeat_interval_s", unit="seconds"),
    honoured(f"{_KEY}.trainer.replica_ttl_s", unit="seconds"),
    honoured(
        f"{_KEY}.trainer.replica_stall_s",
        unit="seconds",
        effect="How long a replica with a hung engine keeps samples and delays new weights",
        advice="More than the engine's longest step, the first one's compilation included",
    ),
    honoured(f"{_KEY}.trainer.command_timeout_s", unit="seconds"),
    honoured(
        f"{_KEY}.trainer.skip_zero_advantage",
        effect="Training takes as much less time as samples are skipped; actor/entropy, "
        "actor/ppo_kl and the like are of the others",
        advice="true where algorithm.filter_groups.enable is false; false to compare metrics "
        "with verl's",
    ),
    honoured(f"{_KEY}.weights.bucket_mb", unit="MiB", effect="Memory on both sides"),
    honoured(f"{_KEY}.weights.timeout_s", unit="seconds"),
    honoured(f"{_KEY}.weights.probe_timeout_s", unit="seconds"),
    honoured(f"{_KEY}.weights.backend"),
    honoured(
        f"{_KEY}.weights.delta",
        effect="auto: each replica holds its weights once more, in host memory",
        advice="auto; off where host memory is short",
    ),
    honoured(f"{_KEY}.weights.recompute_kv"),
    honoured(f"{_KEY}.watchdog.stall_s", unit="seconds", advice="Above the time of a checkpoint"),
    honoured(
        f"{_KEY}.watchdog.give_up_s",
        unit="seconds",
        effect="A wait with a deadline of its own is left to that one",
        advice="Well above stall_s; null where somebody looks at every stall",
    ),
    honoured(
        f"{_KEY}.security.tls",
        effect="mtls costs CPU time on each side of a call",
        advice="mtls wherever a service listens on more than loopback",
    ),
    honoured(f"{_KEY}.security.ca_file"),
    honoured(f"{_KEY}.security.cert_file"),
    honoured(f"{_KEY}.security.key_file"),
    honoured(
        f"{_KEY}.security.server_name",
        advice="sluice with the certificates of `sluice certs`, which all carry that name",
    ),
    honoured(
        f"{_KEY}.security.token_file",
        effect="Without a token nothing but health answers; read again when it changes",
        advice="the same file for all services; clients get one with a token of theirs",
    ),
    honoured(f"{_KEY}.limits.max_submit_streams", unit="calls"),
    honoured(f"{_KEY}.limits.max_prompts_per_stream", unit="prompts"),
    honoured(f"{_KEY}.limits.max_client_prompts", unit="prompts"),
    honoured(f"{_KEY}.limits.max_client_samples", unit="samples"),
    honoured(
        f"{_KEY}.limits.max_client_priority",
        effect="Above 0, clients' samples get slots before those of training, which waits",
        advice="0; with more, tokens say who the clients are",
    ),
    honoured(f"{_KEY}.limits.max_client_score_items", unit="responses"),
    honoured(f"{_KEY}.limits.max_watchers", unit="calls"),
    honoured(f"{_KEY}.limits.max_prompt_turns", unit="turns"),
    honoured(f"{_KEY}.limits.max_extra_info_kb", unit="KiB"),
    honoured(f"{_KEY}.limits.max_prompt_images", unit="images"),
    honoured(f"{_KEY}.limits.max_image_mb", unit="MiB"),
    honoured(f"{_KEY}.limits.max_prompt_images_mb", unit="MiB"),
    honoured(
        f"{_KEY}.limits.max_image_pixels",
        unit="pixels",
        effect="An image of 4 MiB may claim more pixels than a machine has memory for",
    ),
    honoured(
        f"{_KEY}.limits.max_client_images_mb",
        unit="MiB",
        effect="Memory of the reward service and of each replica",
    ),
    honoured(f"{_KEY}.dashboard.port", advice="null; `sluice dashboard` serves the same page"),
    honoured(
        f"{_KEY}.dashboard.host",
        effect="Who reaches it and shows a token reads prompts and responses",
        advice="127.0.0.1",
    ),
    honoured(
        f"{_KEY}.dashboard.samples_mb",
        unit="MiB",
        effect="How far back the page's sample browser reaches",
        advice="several steps' worth: a group takes about its responses' bytes",
    ),
    honoured(f"{_KEY}.dashboard.sample_chars", unit="characters"),
    honoured(
        f"{_KEY}.telemetry.traces.endpoint",
        effect="About 25 spans a recorded group of 16 samples, each 50 microseconds of CPU",
        advice="null, or a collector on the same machine; a dead one costs spans, and no time",
    ),
    honoured(
        f"{_KEY}.telemetry.traces.file",
        effect="About 500 bytes of disk a span",
        advice="traces.jsonl for a look at a short run",
    ),
    honoured(
        f"{_KEY}.telemetry.traces.sample_ratio",
        effect="In proportion, the spans of prompts and their cost",
        advice="1 for a look at every prompt of a short run; 0.01 for a run of days",
    ),
    honoured(
        f"{_KEY}.telemetry.traces.file_mb",
        unit="MiB",
        effect="That much of the disk, and a batch of some 300 kB more for each process",
        advice="well below what the run's disk has left beside checkpoints",
    ),
    honoured(
        f"{_KEY}.telemetry.traces.follow_callers",
        advice="false, unless the run's clients are few and yours",
    ),
    honoured(
        f"{_KEY}.max_message_mb",
        unit="MiB",
        advice="null, the same at all services; a train batch is the largest message",
    ),
    honoured(
        f"{_KEY}.shutdown_grace_s",
        unit="seconds",
        advice="half of it is what loggers with a server get to send what is queued",
    ),
    honoured(f"{_KEY}.log_level"),
)
