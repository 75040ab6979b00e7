"""What a report says a tenant used: against a plain count, second by second."""

import re

from hypothesis import given
from hypothesis import strategies as st

from fedpool.leasing.usage import USING, LeaseUse, Outflow, Usage
from fedpool.ledger.records import Granted, LeaseDevices, LeaseSaid, PolicyObeyed, RoundSaid
from ibshell.ledger import report

ENDINGS = {"release": "released", "expire": "expired", "revoke": "revoked"}


def said(time, event, state, lease="aaaaaaaa", tenant="onc", grants=None, **more):
    return LeaseSaid(time=time, lease=lease, tenant=tenant, event=event, state=state, grants=grants, **more)


def devices(count, milli=1000):
    return (Granted(tuple(f"GPU-{n}" for n in range(count)), 1, milli),)


@st.composite
def lives(draw):
    """The life of one lease, by the second."""
    time = draw(st.integers(0, 20)) * 1000
    records = [said(time, "hold", "held", grants=devices(draw(st.integers(1, 4)), draw(st.sampled_from([1000, 500]))))]
    tenants = iter(("onc", "phys", "chem", "bio"))
    tenant = next(tenants)
    for event in ["commit", *draw(st.lists(st.sampled_from(["renew", "resize", "transfer"]), max_size=3))]:
        time += draw(st.integers(0, 20)) * 1000
        tenant = next(tenants) if event == "transfer" else tenant
        grants = devices(draw(st.integers(1, 4))) if event == "resize" else None
        records.append(said(time, event, "active", tenant=tenant, grants=grants))
    if draw(st.booleans()):
        records.append(said(time + 5000, "end", "ending", tenant=tenant, reason="released"))
        records.append(said(time + 7000, "release", "released", tenant=tenant, reason="released"))
    return records


@given(lives(), st.integers(0, 60), st.integers(0, 60))
def test_device_time_is_what_a_clock_would_count(records, first, length):
    since, until, now = first * 1000, (first + length) * 1000, 200_000
    usage = Usage(since, until)
    for number, record in enumerate(records):
        usage.take(number, record)
    found = {}
    for use in usage.uses(now):
        found[use.tenant] = found.get(use.tenant, 0) + use.device_ms
    plain = {}
    for second in range(now // 1000):
        latest = [record for record in records if record.time <= second * 1000]
        if latest and latest[-1].state in USING and since <= second * 1000 < until:
            grants = next(record.grants for record in reversed(latest) if record.grants is not None)
            milli = sum(len(group.devices) * group.milli for group in grants)
            plain[latest[-1].tenant] = plain.get(latest[-1].tenant, 0) + milli
    assert {tenant: ms for tenant, ms in found.items() if ms} == plain


def test_a_lease_is_one_line_a_tenant():
    usage = Usage(0, 10**12)
    grants = devices(1000)
    records = [
        said(1000, "hold", "held", grants=grants, more=1),
        LeaseDevices(time=1000, lease="aaaaaaaa", grants=(Granted(("GPU-last",), 1),)),
        said(2000, "commit", "active"),
        said(5000, "transfer", "active", tenant="phys"),
        said(9000, "end", "ending", tenant="phys", reason="revoked: heat"),
        said(9500, "revoke", "revoked", tenant="phys", reason="revoked: heat"),
        said(9600, "commit", "active", lease="unheard"),
    ]
    for number, record in enumerate(records):
        usage.take(number, record)
    first, second = usage.uses(20_000)
    assert (first.tenant, first.started_ms, first.ended_ms, first.state) == ("onc", 2000, 5000, "transferred")
    assert (second.tenant, second.ended_ms, second.state, second.reason) == ("phys", 9500, "revoked", "revoked: heat")
    assert len(first.devices) == 1001 and (first.device_ms, second.device_ms) == (3_003_000, 4_504_500)
    assert usage.uses(20_000)[1].device_ms == 4_504_500, "asking again counts nothing twice"


def test_what_left_a_site_and_under_which_policy():
    usage = Usage(0, 10**12)
    more = {"run": "r", "lease": "aaaaaaaa", "attempt": 1, "plan": "aa", "model": "bb", "form": "masked"}
    records = [
        PolicyObeyed(digest="d1", text=""),
        said(1000, "hold", "held", grants=devices(2)),
        said(2000, "commit", "active"),
        RoundSaid(time=3000, round=1, event="sent", cohort=("a", "b", "c"), bytes=400, **more),
        RoundSaid(time=3001, round=1, event="released", cohort=("a", "b"), bytes=0, **more),
        PolicyObeyed(time=3002, digest="d2", text="x"),
        RoundSaid(time=4000, round=2, event="sent", cohort=("a", "b", "c"), bytes=400, **more),
        RoundSaid(time=5 * 10**12, round=3, event="sent", cohort=("a", "b", "c"), bytes=400, **more),
    ]
    for number, record in enumerate(records):
        usage.take(number, record)
    [use], [left] = usage.uses(20_000), usage.outflows()
    assert use.policy == "d1"
    assert (left.tenant, left.rounds, left.bytes, left.cohort_min, left.records) == ("onc", 2, 800, 2, [3, 4, 6])
    assert report.outflows({"north": [left]}, "phys") == []


HOSTILE = LeaseUse("aaaaaaaa", "<b>|x", 0, 3_600_000, "revoked", "`rm`", ["GPU-1", "GPU-2"], 7_200_000, [3, 4, 9])


def test_the_forms_of_a_report():
    lines = report.rows({"site-01": [HOSTILE], "site-02": [HOSTILE]}, "")
    assert report.totals(lines)[0] == {"tenant": "<b>|x", "site": "site-01", "leases": 1, "gpu_hours": 2.0}
    ledgers = [{"site": "site-01", "records": 12, "root": "ab", "key": "k", "checkpoint": "c", "missing": ""}]
    left = report.outflows(
        {"site-01": [Outflow("r|n", "aaaaaaaa", "<b>|x", "ff" * 32, 3, 12_000, "masked", 4, [5, 9])]}, ""
    )
    text = report.document("a|b", lines, left, ledgers, "markdown")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert r"\<b\>\|x" in text and "3–9" in text and text.startswith("# a\\|b\n")
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {5, 11, 10, 6}, "no name breaks a table"
    page = report.document("a<b", lines, left, ledgers, "html")
    assert "<b>" not in page and "&lt;b&gt;|x" in page and "<h1>a&lt;b</h1>" in page
    assert report.rows({"site-01": [HOSTILE]}, "onc") == []
