"""Whether a replica's engine gets on: judged by what it has done, not by its process's existence.

A replica's heartbeats come from its event loop and go on while its engine hangs in a step. So they
carry two counters of the engine's own: tokens drawn, and questions that its loop has answered
(turns). Pure values, with the time passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class EngineSign:
    """What one heartbeat tells. `turns` is 0 where an engine does not count them."""

    tokens: int
    turns: int
    has_work: bool


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """An engine as it was last seen to get on.

    Args:
        sign: at the time of the last progress.
        since_s: when that was.
        is_stalled: whether it is out of use until it gets on again.
    """

    sign: EngineSign
    since_s: float
    is_stalled: bool = False

    def after(self, sign: EngineSign, now_s: float, stall_s: float) -> EngineProgress:
        """What a heartbeat makes of it.

        An engine with work gets on when it draws tokens; one without has nothing to draw. A stalled
        one whose work was taken away proves itself by answering: its last known load may be stale.
        """
        has_progress = sign.tokens > self.sign.tokens
        if not self.is_stalled:
            if has_progress or not sign.has_work:
                return EngineProgress(sign, now_s)
            # Tokens and turns stay those of the stall's beginning.
            return replace(self, is_stalled=now_s - self.since_s > stall_s)
        answers = sign.turns > self.sign.turns or sign.turns == 0
        if has_progress or (answers and not sign.has_work):
            return EngineProgress(sign, now_s)
        return self

    def suspected(self) -> EngineProgress:
        """The same, out of use until it gets on; an engine that counts no turns is not suspected.

        For a replica that did not answer another question.
        """
        return replace(self, is_stalled=self.sign.turns > 0)
