"""A repeated request returns the first answer: answers remembered by idempotency key, the oldest forgotten first."""

from collections import OrderedDict
from typing import Generic, TypeVar

import msgspec

from fedpool.errors import Refused

Answer = TypeVar("Answer")


class Answers(Generic[Answer]):
    """Remembers answers by key.

    Args:
        capacity: how many are kept.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, tuple[bytes, Answer]] = OrderedDict()

    @staticmethod
    def _content(method: str, body: object) -> bytes:
        return method.encode() + msgspec.msgpack.encode(body)

    def find(self, key: str, method: str, body: object) -> Answer | None:
        """The first answer to this request, or None.

        Raises:
            Refused: the key was used for another request.
        """
        if not key or key not in self._kept:
            return None
        content, answer = self._kept[key]
        if content != self._content(method, body):
            raise Refused(
                f"idempotency key {key} was used for another {method} before", "use a new key for a new request"
            )
        return answer

    def keep(self, key: str, method: str, body: object, answer: Answer) -> None:
        """Remember an answer."""
        if key:
            self._kept[key] = (self._content(method, body), answer)
            while len(self._kept) > self._capacity:
                self._kept.popitem(last=False)

    def forget(self, key: str) -> None:
        """Let a key be used again."""
        self._kept.pop(key, None)
