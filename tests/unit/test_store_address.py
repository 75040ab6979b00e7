"""The address of a store with stand-bys, and the times that must leave a margin."""

import pytest

from agent.store.etcd import Timing, parse
from fedpool.errors import UsageError


@pytest.mark.parametrize(
    ("ttl", "renew", "request_s", "retry", "expect"), [(20, 14, 5, 1, "error"), (30, 10, 5, 1, "ok")]
)
def test_a_leader_that_could_overlap_with_the_next_is_refused(ttl, renew, request_s, retry, expect):
    """Case 083: renewal, time-out and pause together stay below the time to live, with a margin; the sum is told."""
    url = f"etcd://a/x?ttl={ttl}&renew={renew}&request={request_s}&retry={retry}"
    if expect == "ok":
        assert parse(url)[2] == Timing(ttl, renew, request_s, retry)
    else:
        with pytest.raises(
            UsageError, match=r"renew 14 \+ request 5 \+ retry 1 = 20 s is not less than ttl 20"
        ) as refused:
            parse(url)
        assert refused.value.hint


def test_the_default_leaves_a_margin():
    members, prefix, timing = parse("etcd://10.0.0.1,10.0.0.2:1234/pool")
    assert members == [("10.0.0.1", 2379), ("10.0.0.2", 1234)] and prefix == "pool" and timing == Timing()


@pytest.mark.parametrize(
    "url", ["http://a", "etcd://a:x", "etcd://", "etcd://a?foo=1", "etcd://a?ttl=soon", "etcd://a:70000"]
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(UsageError, match="store = "):
        parse(url)
