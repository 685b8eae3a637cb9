"""Three stages of a run as workloads: early, mid, late.

A prompt is hard, middling or easy; its pass rate is drawn from that kind's Beta distribution. Over
a run prompts move from hard to easy, so that groups that are all right become more frequent (DAPO,
figure 3b). Lengths and drift are the defaults of a `WorkloadDescription`. `docs/simulator.md` has
the numbers and why.
"""

from __future__ import annotations

from sluice.errors import ConfigError
from sluice.simulate.described_workload import (
    NUM_PROMPTS,
    BetaComponent,
    DescribedWorkload,
    WorkloadDescription,
)


def _mixture(*, hard: float, middle: float, easy: float) -> tuple[BetaComponent, ...]:
    """Kinds of prompts with their shares, which sum to 1."""
    return (
        BetaComponent(0.25, 5.0, hard),
        BetaComponent(1.2, 1.2, middle),
        BetaComponent(6.0, 0.25, easy),
    )


MIXTURES = {
    "early": _mixture(hard=0.60, middle=0.30, easy=0.10),
    "mid": _mixture(hard=0.32, middle=0.40, easy=0.28),
    "late": _mixture(hard=0.20, middle=0.25, easy=0.55),
}


class MixtureWorkload(DescribedWorkload):
    """Prompts of a mixture.

    Args:
        mixture: a name in `MIXTURES`.
        seed: decides prompts, orders and samples.
        num_prompts: rows of the data set.

    Raises:
        ConfigError: there is no such mixture.
    """

    def __init__(self, mixture: str, seed: int = 0, num_prompts: int = NUM_PROMPTS) -> None:
        if mixture not in MIXTURES:
            raise ConfigError(f"mixture '{mixture}' is none of {', '.join(MIXTURES)}")
        super().__init__(WorkloadDescription(MIXTURES[mixture], num_prompts=num_prompts), seed)
