"""The keys of one epoch: what a rendezvous store remembers, and how much of it at most."""

from __future__ import annotations

from sluice.weights.store_messages import (
    Action,
    Add,
    Answer,
    Delete,
    Question,
    Read,
    Replace,
    Write,
)

MAX_KEYS = 16384
MAX_TABLE_BYTES = 64 << 20


class KeyTable:
    """Keys and values of the newest epoch; those of earlier ones are gone.

    Pure memory, for one thread. Nothing here waits: who waits for a key asks again.
    """

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0

    def begin(self, epoch: int) -> None:
        """Forget everything, and answer questions of this epoch only."""
        self._epoch, self._values, self._num_bytes = epoch, {}, 0

    def answer(self, question: Question) -> Answer:
        """Do what is asked, or say why not: another epoch, a full table, no number to add to."""
        if question.epoch != self._epoch:
            current = "none has begun" if self._epoch is None else f"the store is at {self._epoch}"
            return Answer(refusal=f"epoch {question.epoch} is not open: {current}")
        try:
            return Answer(self._apply(question.action))
        except ValueError as error:
            return Answer(refusal=str(error))

    def _apply(self, action: Action) -> tuple[bytes | None, ...]:
        match action:
            case Write(key, value):
                self._put(key, value)
                return ()
            case Read(keys):
                return tuple(self._values.get(key) for key in keys)
            case Add(key, amount):
                return (self._put(key, str(_number(self._values.get(key)) + amount).encode()),)
            case Replace(key, expected, desired):
                held = self._values.get(key)
                if (held or b"") == expected and (held is not None or not expected):
                    return (self._put(key, desired),)
                return (expected if held is None else held,)
            case Delete(key):
                held = self._values.pop(key, None)
                self._num_bytes -= 0 if held is None else len(key) + len(held)
                return (held,)

    def _put(self, key: str, value: bytes) -> bytes:
        held = self._values.get(key)
        growth = len(value) - len(held) if held is not None else len(key) + len(value)
        num_keys = len(self._values) + (held is None)
        if num_keys > MAX_KEYS or self._num_bytes + growth > MAX_TABLE_BYTES:
            raise ValueError(
                f"the store is full: {num_keys} keys, {self._num_bytes + growth} bytes with "
                f"this one; at most {MAX_KEYS} keys and {MAX_TABLE_BYTES} bytes fit"
            )
        self._values[key] = value
        self._num_bytes += growth
        return value


def _number(value: bytes | None) -> int:
    if value is None:
        return 0
    try:
        return int(value)
    except ValueError as error:
        raise ValueError(f"{value[:20]!r} is no number to add to") from error
