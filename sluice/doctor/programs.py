"""Check the sandbox: whether a program runs in it here."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.config.schema.sandbox import SandboxConfig
from sluice.doctor.finding import Examined, Finding, fine, of_text
from sluice.errors import SluiceError
from sluice.sandbox.choice import backend_of, proven_sandbox

DEADLINE_S = 60.0


def check_sandbox(examined: Examined) -> Iterator[Finding]:
    """Run a program of one line in the configured sandbox; without a run, in bubblewrap."""
    sandbox, fusion = examined.config.sluice.sandbox, examined.config.reward.sandbox_fusion
    backend = backend_of(sandbox, fusion)
    if backend is not None:
        try:
            proven_sandbox(sandbox, fusion)
        except SluiceError as error:
            yield of_text(
                f"sluice.sandbox.backend = {backend}: {error}", "the run refuses to start"
            )
        else:
            yield fine(f"{backend} runs programs")
    elif not examined.has_run:
        try:
            proven_sandbox(SandboxConfig(backend="bubblewrap"))
        except SluiceError as error:
            yield fine(f"no sandbox for programs by sluice.sandbox.backend=bubblewrap: {error}")
        else:
            yield fine("bubblewrap can run programs (sluice.sandbox.backend=bubblewrap)")
