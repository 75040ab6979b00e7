"""A repeated request returns the first answer: answers remembered by idempotency key, the oldest forgotten first."""

import hashlib
from collections import OrderedDict
from typing import Generic, TypeVar

import msgspec

from fedpool.errors import Refused

Answer = TypeVar("Answer")


class Answers(Generic[Answer]):
    """Remembers answers by key.

    Args:
        capacity: how many are kept.
        weight: what they weigh together at most; one weighs 1 until it is weighed.
    """

    def __init__(self, capacity: int = 4096, weight: int = 20_000) -> None:
        self._capacity = capacity
        self._weight_max = weight
        self._weight = 0
        self._kept: OrderedDict[str, tuple[bytes, Answer, int]] = OrderedDict()

    @staticmethod
    def _content(method: str, body: object) -> bytes:
        return hashlib.sha256(method.encode() + b"\0" + msgspec.msgpack.encode(body)).digest()

    def find(self, key: str, method: str, body: object) -> Answer | None:
        """The first answer to this request, or None.

        Raises:
            Refused: the key was used for another request.
        """
        if not key or key not in self._kept:
            return None
        content, answer, _ = self._kept[key]
        if content != self._content(method, body):
            raise Refused(
                f"idempotency key {key} was used for another {method} before", "use a new key for a new request"
            )
        return answer

    def keep(self, key: str, method: str, body: object, answer: Answer) -> None:
        """Remember an answer."""
        if key:
            self.forget(key)
            self._kept[key] = (self._content(method, body), answer, 1)
            self._weight += 1
            self._trim()

    def weigh(self, key: str, weight: int) -> None:
        """Say how heavy an answer has become, against the weight of all."""
        if key in self._kept:
            content, answer, before = self._kept[key]
            self._kept[key] = (content, answer, weight)
            self._weight += weight - before
            self._trim()

    def _trim(self) -> None:
        while len(self._kept) > 1 and (len(self._kept) > self._capacity or self._weight > self._weight_max):
            _, (_, _, weight) = self._kept.popitem(last=False)
            self._weight -= weight

    def forget(self, key: str) -> None:
        """Let a key be used again."""
        _, _, weight = self._kept.pop(key, (b"", None, 0))
        self._weight -= weight
