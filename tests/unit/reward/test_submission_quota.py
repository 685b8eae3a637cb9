"""How many prompts one client may have unfinished, over all of its calls."""

from __future__ import annotations

import pytest

from services.reward.memory_ledger import MemoryLedger
from services.reward.submissions import Submission, Submissions, SubmissionSession
from sluice.errors import InvalidRequestError
from sluice.types import ChatMessage


def send(submissions: Submissions, session: SubmissionSession, prompt_id: str, most: int) -> None:
    submissions.check_quota(session, most)
    turn = (ChatMessage("user", "hello"),)
    submissions.submit(Submission(prompt_id, turn, "math_dapo", "1", {}), session)


def test_the_calls_of_one_client_count_together_and_others_and_nobodys_do_not() -> None:
    ledger = MemoryLedger()
    submissions = Submissions(ledger, ledger.accept, lambda _: None, 99)
    with (
        submissions.session(client="a") as first,
        submissions.session(client="b") as other,
        submissions.session() as unnamed,
    ):
        with submissions.session(client="a") as second:
            send(submissions, first, "1", 2)
            send(submissions, second, "2", 2)
            for session in (first, second):
                with pytest.raises(
                    InvalidRequestError, match=r"client 'a': 2 prompts .*max_client"
                ):
                    send(submissions, session, "3", 2)
            for number in range(4, 9):
                send(submissions, unnamed, str(number), 2)
            send(submissions, other, "9", 2)
        send(submissions, first, "3", 2)  # what a call that ended had is nobody's
