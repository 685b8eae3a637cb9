"""What the loop needs of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.reward.batcher import BatchRules
from services.reward.judgement import GroupNeeds
from sluice.types import SamplingParams


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """Settings of the groups and batches of a run.

    With `greedy` one more response to each prompt is drawn, as a baseline. `needs` says
    which groups are of use. `probe_samples` are drawn of a group before the
    rest is decided about; ``None``: all are drawn at once. `epoch_rows` is the size of the data
    set, 0 without one.
    """

    rules: BatchRules
    samples_per_group: int
    sampling: SamplingParams
    filter_metric: str | None
    greedy: SamplingParams | None = None
    needs: GroupNeeds = field(default_factory=GroupNeeds)
    probe_samples: int | None = None
    epoch_rows: int = 0

    @property
    def first_sequences(self) -> int:
        """Sequences that a group asks the fleet for at first.

        The greedy response is of no use to a group that ends after its probes, so it is drawn with
        the rest.
        """
        if self.probe_samples is not None:
            return self.probe_samples
        return self.samples_per_group + (self.greedy is not None)
