"""Read a trainer rank's samples of a leased batch from the reward service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.codec.train_batch import with_samples
from sluice.config.addresses import peer_address
from sluice.config.derived import message_mb
from sluice.config.run import RunConfig
from sluice.errors import DeadlineError, NotFoundError, PeerError
from sluice.rpc.client import open_channel, reward_stub, stream_call
from sluice.rpc.credentials import OPEN, Credentials, service_credentials
from sluice.types import TrainBatch

_PEER = "reward service"


class RewardSamples:
    """Reads samples from the reward service.

    All reads share an event loop, in which gRPC may still have events of earlier reads. Each read
    has a separate connection.

    Args:
        address: host:port of the reward service.
        stall_s: seconds without a message after which a call fails.
    """

    def __init__(
        self, address: str, max_message_bytes: int, stall_s: float, credentials: Credentials = OPEN
    ) -> None:
        self._address = address
        self._max_message_bytes = max_message_bytes
        self._stall_s = stall_s
        self._credentials = credentials
        self._runner = asyncio.Runner()

    def read(self, outline: TrainBatch, rows: Sequence[int], step: int) -> TrainBatch:
        """Return the batch with the samples of `rows`; the others stay absent. Blocks.

        Args:
            outline: the leased batch, with absent tokens.
            rows: numbers of samples in the batch, ascending; if empty, there is no call.

        Raises:
            InvalidRequestError: the samples do not fit the outline.
            PeerError: the service or the lease is gone; the batch can be taken again.
            DeadlineError: the next part did not come in time.
        """
        if not rows:
            return outline
        return self._runner.run(self._read(outline, rows, f"taking samples of step {step}"))

    def close(self) -> None:
        """Close the event loop, after the last read."""
        self._runner.close()

    async def _read(self, outline: TrainBatch, rows: Sequence[int], phase: str) -> TrainBatch:
        request = reward.TakeSamplesRequest(batch_id=outline.batch_id, rows=rows)
        async with open_channel(
            self._address,
            max_message_bytes=self._max_message_bytes,
            credentials=self._credentials,
        ) as channel:
            stream = stream_call(
                reward_stub(channel).TakeSamples,
                request,
                peer=_PEER,
                phase=phase,
            )
            async with aclosing(stream) as answers:
                try:
                    return await with_samples(outline, rows, self._until_stall(answers, phase))
                except NotFoundError as error:  # the service has restarted since
                    raise PeerError(_PEER, phase, str(error)) from error

    async def _until_stall(
        self, answers: AsyncIterator[reward.TakeSamplesResponse], phase: str
    ) -> AsyncIterator[reward.TakeSamplesResponse]:
        num_came = 0
        while True:
            try:
                async with asyncio.timeout(self._stall_s):
                    answer = await anext(answers, None)
            except TimeoutError as error:
                detail = f"{num_came} messages had come"
                raise DeadlineError(_PEER, phase, self._stall_s, detail) from error
            if answer is None:
                return
            num_came += 1
            yield answer


def reward_samples(config: RunConfig) -> RewardSamples:
    """Return the reader of a rank of this run.

    Raises:
        ConfigError: the run's credentials are invalid.
    """
    service = config.sluice.trainer
    return RewardSamples(
        peer_address(config.sluice.reward.endpoint, "sluice.reward.endpoint"),
        message_mb(config) << 20,
        service.batch_timeout_s,
        service_credentials(config.sluice.security, service.endpoint),
    )
