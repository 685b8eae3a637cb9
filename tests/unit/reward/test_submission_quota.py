"""How many prompts one client may have unfinished, over all of its calls."""

from __future__ import annotations

import pytest

from services.reward.ledger.ledger import PromptLedger
from services.reward.prompts.submissions import Receipt, Submission, Submissions, SubmissionSession
from sluice.errors import ExhaustedError
from sluice.types import ChatMessage


def send(submissions: Submissions, session: SubmissionSession, prompt_id: str, most: int) -> None:
    submissions.check_client_quota(session, most)
    turn = (ChatMessage("user", "hello"),)
    submissions.submit(Submission(prompt_id, turn, "math_dapo", "1", {}), session)


def test_the_calls_of_one_client_count_together_and_others_and_nobodys_do_not() -> None:
    ledger = PromptLedger()
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
                with pytest.raises(ExhaustedError, match=r"client 'a': 2 prompts .*max_client"):
                    send(submissions, session, "3", 2)
            for number in range(4, 9):
                send(submissions, unnamed, str(number), 2)
            send(submissions, other, "9", 2)
        send(submissions, first, "3", 2)  # what a call that ended had is nobody's


async def test_a_prompt_that_a_client_has_already_takes_no_further_room() -> None:
    ledger = PromptLedger()
    submissions = Submissions(ledger, ledger.accept, lambda _: None, 1)
    turn = (ChatMessage("user", "hello"),)
    prompt, other = (Submission(name, turn, "math_dapo", "1", {}) for name in "12")
    with submissions.session(client="a") as broken, submissions.session(client="a") as back:
        submissions.submit(prompt, broken, lambda: submissions.check_client_quota(broken, 1))
        for again in (prompt, other):
            submissions.submit(again, back, lambda: submissions.check_client_quota(back, 1))
        found, refused = [await back.next_event() for _ in range(2)]
    assert isinstance(found, Receipt)
    assert isinstance(refused, Receipt)
    assert found == Receipt("1", 0)
    assert (refused.prompt_id, refused.is_retryable) == ("2", True)
    assert "max_client_prompts allows; wait" in refused.refused_because


def test_a_call_may_have_so_many_unfinished_prompts() -> None:
    session = SubmissionSession()
    session.num_open = 3
    session.check_quota(4)
    with pytest.raises(ExhaustedError, match=r"3 prompts of this call .*max_prompts_per_stream"):
        session.check_quota(3)
