"""The dashboard of a secured run: overlays on top of compose.yaml, in containers."""

from __future__ import annotations

import http.client
import ssl
from contextlib import closing, suppress
from functools import partial

from tools.compose_test.project import Project
from tools.compose_test.scenario import RUN
from tools.phases import until

# Without those of compose.observability.yaml that need images of other projects.
SERVICES = ("trainer", "reward", "rollout")
# Without a token, and with one.
WANTED_ANSWERS = (401, 200)
_ANSWER_S = 60.0
_PAGE_DATA = "/api/overview"


def page_answers(project: Project, port: int) -> tuple[int, ...]:
    """Return the HTTP status of the page's data without a token, and with a client's.

    Args:
        project: runs with the overlays `secure` and `dashboard`.
        port: of the page, on this host's loopback interface.

    Raises:
        CommandError: the run has no certificates.
        PhaseError: the page does not answer.
    """
    certificates = f"{RUN}/certs"
    context = ssl.create_default_context(cadata=project.read("trainer", f"{certificates}/ca.pem"))
    token = project.read("trainer", f"{certificates}/client.token").split()[-1]
    seen: list[int] = []

    def add_answer(headers: dict[str, str]) -> bool:
        """Call again while nothing answers: the page's process may still be starting."""
        # By the name that is in every certificate of `sluice certs`.
        page = http.client.HTTPSConnection("localhost", port, context=context, timeout=_ANSWER_S)
        with closing(page), suppress(OSError, http.client.HTTPException):
            page.request("GET", _PAGE_DATA, headers=headers)
            seen.append(page.getresponse().status)
            return True
        return False

    for headers in ({}, {"Authorization": f"Bearer {token}"}):
        until("an answer of the page", partial(add_answer, headers), timeout_s=_ANSWER_S)
    return tuple(seen)
