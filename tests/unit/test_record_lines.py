"""Records as lines: whatever a site has written, somebody can list it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpool.ledger.records import DevicesSaid, LeaseSaid, OfKind, Refusal, RoundSaid, encode
from ibshell.ledger.lines import line
from ibshell.ledger.verifying import in_proof


@pytest.mark.parametrize(
    ("record", "kind", "what"),
    [
        (LeaseSaid(lease="a", tenant="t", event="commit", state="active", for_ms=3_600_000), "lease.commit", "for 1h"),
        (LeaseSaid(lease="a", tenant="t", event="end", state="ending", reason="released"), "lease.end", "released"),
        (LeaseSaid(lease="a", tenant="t", event="transfer", state="active", next_tenant="b"), "lease.transfer", "to b"),
        (DevicesSaid(kinds=(OfKind("a100", ("x",)), OfKind("h100", ("y", "z")))), "devices", "1 a100, 2 h100"),
        (Refusal(asked="hold", reason="no", more=3), "refusal", "no (and 3 more before)"),
        (
            RoundSaid(
                run="r",
                lease="a",
                round=2,
                attempt=1,
                event="sent",
                plan="",
                model="",
                cohort=("a", "b"),
                bytes=9,
                form="masked",
            ),
            "round.sent",
            "round 2: sent, 9 bytes, masked, 2 sites",
        ),
    ],
)
def test_what_is_said(record, kind, what):
    found = line("north", 7, encode(record))
    assert (found["id"], found["kind"], found["what"]) == ("north:7", kind, what)
    assert found["said"] == json.loads(encode(record))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"kind":"lease"}',
        b'{"kind":"devices","kinds":3,"time":1}',
        b'{"kind":"request","payload":"[","signature":"","time":1}',
        b'{"kind":"request","payload":"{}","signature":"","time":1}',
        b'{"kind":"login","time":99999999999999999,"who":"a","software":"b"}',
        b'{"kind":"of a newer release","time":5,"x":[1]}',
        b'{"kind":3}',
        b"\xff",
    ],
)
def test_what_cannot_be_read_is_a_line_too(data):
    assert line("north", 1, data)["id"] == "north:1"


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["kind", "time", "lease", "tenant", "grants", "kinds", "payload", "event", "reason"]),
                inner | st.sampled_from(["lease", "request", "round", "devices", "kept", "seam"]),
            )
        ),
    )
)
def test_whatever_is_written_is_a_line(value):
    assert line("north", 1, json.dumps(value).encode())["record"] == 1


def test_a_proof_with_what_is_no_record_is_refused_and_nothing_falls_over(tmp_path):
    path = tmp_path / "proof.json"
    part = {
        "site": "north",
        "key": "x",
        "witnesses": [],
        "checkpoint": "",
        "records": [{"number": 0, "record": "[", "proof": []}],
    }
    path.write_text(json.dumps({"format": 1, "lease": "", "run": "r", "ledgers": [part]}))
    [(row, findings)] = in_proof(path, "", "")
    assert row["result"] == "faults" and findings
