"""What a scorer gets: a response, and what its row holds to grade it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class ScorerInput(msgspec.Struct, frozen=True, array_like=True):
    """One response to grade. Only reward models look at `question`, the prompt's last turn.

    `num_turns` counts answers and the turns that they answer, as verl does. `truth_is_json` is
    that of a prompt.
    """

    data_source: str
    response: str
    ground_truth: str
    extra_info: Mapping[str, object] = {}
    question: str = ""
    truth_is_json: bool = False
    num_turns: int = 2
