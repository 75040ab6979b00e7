"""Requests signed as whoever may ask them, beside a hub where things change between two questions."""

import pytest

from fedpool.client.acting import act
from fedpool.errors import NotAuthorised
from fedpool.records import Demand, Lease, Signed
from fedpool.wire.messages import ById, LeaseView


class Hub:
    """A connection to a hub that hands a lease over after the first look at it."""

    def __init__(self, holders):
        self.holders = list(holders)
        self.asked = []
        self.signer = self

    def sign(self, method, body, principal, sites):
        if principal == "operator":
            raise NotAuthorised("there is no certificate as operator")
        return Signed(principal.encode(), b"")

    def call(self, method, body, expect, timeout_s=None, key=""):
        if method == "lease.show":
            holder = self.holders.pop(0) if len(self.holders) > 1 else self.holders[0]
            return LeaseView(Lease("0badcafe", holder, "active", Demand(1), 60.0, ""), 1.0)
        self.asked.append(body.payload.decode())
        if self.asked[-1] != f"tenant/{self.holders[0]}":
            raise NotAuthorised(f"{self.asked[-1]} may not ask for {method}")
        return "released"


def test_a_lease_that_changes_hands_between_two_questions_is_asked_for_again():
    hub = Hub(["a", "b"])
    assert act(hub, "lease.release", ById("0bad"), LeaseView) == "released"
    assert hub.asked == ["tenant/a", "tenant/b"]


def test_a_refusal_of_who_still_holds_it_stands():
    hub = Hub(["a"])
    hub.sign = lambda method, body, principal, sites: Signed(b"tenant/stranger", b"")
    with pytest.raises(NotAuthorised, match="stranger may not"):
        act(hub, "lease.release", ById("0bad"), LeaseView)
    assert len(hub.asked) == 1, "asked once"
