"""SGLang behind the engine Protocol.

SGLang's client runs in the thread of the engine; SGLang's schedulers are processes, and
`sglang.scheduler` brings the sampler and the weights into them. This module is what the service's
event loop sees of them.
"""

from __future__ import annotations

import signal
import threading

from services.rollout.engines.protocol import GenerationRequest
from services.rollout.engines.sglang.client import installed_sglang
from services.rollout.engines.sglang.core import SglangCore
from services.rollout.engines.sglang.images import SglangImages, read_images
from services.rollout.engines.sglang.settings import SglangSettings, sglang_settings
from services.rollout.engines.vendor.engine import VendorEngine
from sluice.config.run import RunConfig
from sluice.errors import MissingPackageError


def create(config: RunConfig) -> SglangEngine:
    """Return the engine for a run configuration.

    Raises:
        ConfigError: SGLang is not installed, or keys contradict each other.
    """
    if installed_sglang() is None:
        raise MissingPackageError(
            "actor_rollout_ref.rollout.name is 'sglang', but SGLang is not installed here; install "
            "sglang 0.5.23 beside sluice, in an environment of its own (it needs another torch "
            "than vLLM does), or set actor_rollout_ref.rollout.name=torch"
        )
    return SglangEngine(sglang_settings(config))


class SglangEngine(VendorEngine[SglangCore]):
    """See `services.rollout.engines.protocol.Engine`."""

    def __init__(self, settings: SglangSettings) -> None:
        super().__init__("SGLang", settings)
        self._settings = settings

    async def start(self) -> None:
        """Start SGLang without weights. Raises ConfigError for a path that holds no model."""
        _survive_quit_signals()
        await self._build(SglangCore.build(self._settings))

    async def _read_images(self, request: GenerationRequest) -> SglangImages | None:
        if not request.images:
            return None
        reader = self._in_thread()[1].image_prompts
        return await self._image_turn.read(
            len(request.sample_indexes), lambda: read_images(request, reader)
        )


def _survive_quit_signals() -> None:
    """Ignore SIGQUIT, which a failing process of SGLang sends; its end is noticed anyway."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
        signal.signal(signal.SIGQUIT, lambda *_: None)
