"""Names of spans and of their attributes, each declared once; docs/traces.md explains them."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class SpanName(StrEnum):
    """What a span times."""

    # A prompt's trace, in the reward service.
    PROMPT = "prompt"
    SUBMIT = "submit"
    READ = "draw"
    ADMIT = "admit"
    GENERATE = "generate"
    ATTEMPT = "attempt"
    GRADE = "grade"
    FILTER = "filter"
    WAIT = "wait"
    # In a replica.
    SERVE = "serve"
    SAMPLE = "sample"
    RECEIVE_WEIGHTS = "receive weights"
    SWAP_WEIGHTS = "swap weights"
    # A step's trace, in the trainer; the first two are in the prompts' traces as well.
    TRAIN_STEP = "train step"
    PUBLISH = "publish"
    STEP = "step"
    TAKE_BATCH = "take batch"
    EVALUATE = "evaluate"
    SAVE = "save"


class Key(StrEnum):
    """Attributes."""

    PROMPT_ID = "sluice.prompt.id"
    PROMPT_ORIGIN = "sluice.prompt.origin"
    PROMPT_SEQUENCE = "sluice.prompt.sequence"
    PROMPT_PLACE = "sluice.prompt.place"
    PROMPT_END = "sluice.prompt.end"
    DATA_SOURCE = "sluice.data_source"
    DETAIL = "sluice.detail"
    NUM_SAMPLES = "sluice.samples"
    NUM_SCORED = "sluice.samples.scored"
    NUM_TOKENS = "sluice.tokens"
    SAMPLE_INDEX = "sluice.sample.index"
    FINISH_REASON = "sluice.sample.finish_reason"
    REPLICA = "sluice.replica"
    REQUEST_ID = "sluice.request.id"
    VERSION = "sluice.policy.version"
    OLDEST_VERSION = "sluice.policy.version.oldest"
    BATCH_ID = "sluice.batch.id"
    NUM_GROUPS = "sluice.groups"
    STEP = "sluice.step"


class SpanKind(IntEnum):
    """A span's side of a call, by OTLP's numbers."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3
