"""How many prompts one client may have unfinished, over all of its calls."""

from __future__ import annotations

from services.reward.ledger.ledger import PromptLedger
from services.reward.prompts.submissions import Receipt, Submissions, SubmissionSession
from sluice.config.schema.service import LimitsConfig
from tests.support.client_prompt import client_prompt


async def refusal(submissions: Submissions, session: SubmissionSession, prompt_id: str) -> str:
    """Submit a prompt; return why it was refused, empty if it was accepted."""
    submissions.submit(client_prompt(prompt_id=prompt_id), session)
    receipt = await session.next_event()
    assert isinstance(receipt, Receipt)
    assert receipt.is_retryable == bool(receipt.refused_because)
    return receipt.refused_because


def limited(**limits: int) -> Submissions:
    ledger = PromptLedger()
    return Submissions(ledger, ledger.accept, lambda _: None, 99, LimitsConfig(**limits))


async def test_the_calls_of_one_client_count_together_and_others_and_nobodys_do_not() -> None:
    submissions = limited(max_client_prompts=2)
    with (
        submissions.session("a") as first,
        submissions.session("b") as other,
        submissions.session() as unnamed,
    ):
        with submissions.session("a") as second:
            assert not await refusal(submissions, first, "1")
            assert not await refusal(submissions, second, "2")
            for session in (first, second):
                refused = await refusal(submissions, session, "3")
                assert refused.startswith("client 'a': 2 prompts are unfinished")
                assert "max_client_prompts allows; wait" in refused
            for number in range(4, 9):
                assert not await refusal(submissions, unnamed, str(number))
            assert not await refusal(submissions, other, "9")
        assert not await refusal(submissions, first, "3")  # a call that ended has no prompts


async def test_a_prompt_that_a_client_sends_again_counts_once() -> None:
    submissions = limited(max_client_prompts=1)
    with submissions.session("a") as broken, submissions.session("a") as back:
        assert not await refusal(submissions, broken, "1")
        assert not await refusal(submissions, back, "1")
        assert await refusal(submissions, back, "2")


async def test_one_call_has_a_limit_of_unfinished_prompts() -> None:
    submissions = limited(max_prompts_per_stream=1)
    with submissions.session() as session:
        assert not await refusal(submissions, session, "1")
        refused = await refusal(submissions, session, "2")
    assert refused.startswith("1 prompts of this call are unfinished")
    assert "max_prompts_per_stream allows" in refused
