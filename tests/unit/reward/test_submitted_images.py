"""Images of clients' prompts: how many bytes may be unfinished, and which prompt is which."""

from __future__ import annotations

from services.reward.ledger.ledger import PromptLedger
from services.reward.prompts.submissions import Receipt, Submissions, SubmissionSession
from sluice.config.schema.service import LimitsConfig
from sluice.types import Prompt, PromptEnd
from tests.support.client_prompt import client_prompt
from tests.support.group_events import group_ended

LIMITS = LimitsConfig(max_client_images_mb=2)


def submission(prompt_id: str, *images: bytes) -> Prompt:
    return client_prompt("<image>" * len(images), prompt_id, images)


async def receipt(session: SubmissionSession) -> Receipt:
    event = await session.next_event()
    assert isinstance(event, Receipt)
    return event


async def test_unfinished_images_of_all_clients_together_are_bounded() -> None:
    ledger = PromptLedger()
    submissions = Submissions(ledger, ledger.accept, lambda _: None, 99, LIMITS)
    with submissions.session(client="a") as first, submissions.session(client="b") as second:
        submissions.submit(submission("1", bytes(1 << 20)), first)
        submissions.submit(submission("2", bytes((1 << 20) + 1)), second)
        submissions.submit(submission("3"), second)
        assert (await receipt(first)).sequence == 0
        refused = await receipt(second)
        assert refused.sequence is None
        assert "max_client_images_mb allows 2 MiB; wait for outcomes" in refused.refused_because
        assert refused.is_retryable
        assert (await receipt(second)).sequence == 1
        prompt = ledger.end("1", PromptEnd.TRAINED)
        submissions.observe(group_ended(prompt, PromptEnd.TRAINED, step=1))
        submissions.submit(submission("2", bytes((1 << 20) + 1)), second)
        assert (await receipt(second)).sequence == 2


async def test_images_that_there_will_never_be_space_for_are_refused_permanently() -> None:
    ledger = PromptLedger()
    submissions = Submissions(ledger, ledger.accept, lambda _: None, 99, LIMITS)
    with submissions.session() as session:
        submissions.submit(submission("1", bytes((2 << 20) + 1)), session)
        refused = await receipt(session)
    assert not refused.is_retryable
    assert "max_client_images_mb allows 2 MiB; send fewer" in refused.refused_because


async def test_the_same_prompt_with_another_image_is_another_prompt() -> None:
    ledger = PromptLedger()
    submissions = Submissions(ledger, ledger.accept, lambda _: None, 99)
    with submissions.session() as first, submissions.session() as second:
        submissions.submit(submission("1", b"image"), first)
        submissions.submit(submission("1", b"image"), second)
        submissions.submit(submission("1", b"other"), second)
        assert (await receipt(second)).sequence == 0
        assert "was used before" in (await receipt(second)).refused_because
        prompt = ledger.end("1", PromptEnd.TRAINED)
        submissions.observe(group_ended(prompt, PromptEnd.TRAINED, step=1))
    with submissions.session() as third:
        submissions.submit(submission("1", b"other"), third)
        submissions.submit(submission("1", b"image"), third)
        assert "was used before" in (await receipt(third)).refused_because
        assert (await receipt(third)).sequence == 0
