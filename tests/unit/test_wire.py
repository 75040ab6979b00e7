"""The control protocol: frames, limits, sessions. A hostile peer gets a clear error and costs little memory."""

import struct
import tracemalloc

import msgpack
import pytest

from fedpool.errors import LocalProtocolError, NotFound, PeerProtocolError, Refused, VersionMismatch
from fedpool.wire import bulk, frames
from fedpool.wire.idempotency import Answers
from fedpool.wire.messages import ById, LeaseWanted
from fedpool.wire.session import Cancelled, Notice, Ready, Request, Response, Session, from_body


def framed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def pair():
    one, other = Session("client", "alice"), Session("hub", "pool")
    other.receive(one.start())
    one.receive(other.start())
    return one, other


def test_a_frame_arrives_whole_however_it_is_cut():
    data = frames.write({"v": 1, "kind": "event"}) * 3
    for size in (1, 2, 3, 7, len(data)):
        reader, got = frames.FrameReader(), []
        for at in range(0, len(data), size):
            got += reader.receive(data[at : at + size])
        assert got == [{"v": 1, "kind": "event"}] * 3
        reader.end()


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"\x91" * 40 + b"\xc0", "nested more than 32"),
        (b"\xdf" + struct.pack(">I", 65_537), "map of 65537 entries"),
        (b"\xdd" + struct.pack(">I", 1 << 31), "the limit is 65536"),
        (b"\x93\x01\x02", "ends inside"),
        (b"\xc1", "unused code"),
        (b"\xd4\x01\x00", "extension type"),
        (msgpack.packb([1]), "not a map"),
        (msgpack.packb({1: 2}), "not valid msgpack"),
        (msgpack.packb({"a": 1}) + b"\xc0", "after the end"),
        (b"\x81\xa1a\xd9\xff", "ends inside"),
    ],
)
def test_malformed_frames_are_named(payload, says):
    with pytest.raises(PeerProtocolError, match=says):
        frames.FrameReader().receive(framed(payload))


def test_an_oversized_frame_is_refused_by_its_length_alone():
    with pytest.raises(PeerProtocolError, match="1048577 bytes; the limit is 1048576"):
        frames.FrameReader().receive(struct.pack(">I", (1 << 20) + 1))
    with pytest.raises(LocalProtocolError, match="the limit is 1048576"):
        frames.write({"body": bytes(1 << 20)})


def test_a_truncated_frame_is_an_error_at_the_end():
    reader = frames.FrameReader()
    reader.receive(frames.write({"v": 1})[:-1])
    with pytest.raises(PeerProtocolError, match="ended inside a frame"):
        reader.end()


def test_nested_empty_arrays_cost_little_memory():
    inner = b"\x90" * 60_000
    payload = b"\x81\xa1a\xdc" + struct.pack(">H", 16) + (b"\xdc" + struct.pack(">H", 60_000) + inner) * 16
    tracemalloc.start()
    with pytest.raises(PeerProtocolError, match="more than 200000 objects"):
        frames.FrameReader().receive(framed(payload))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_request_and_its_answer():
    one, other = pair()
    request_id, data = one.request("lease.show", ById("7f3a"), 5.0, "key-1")
    [request] = other.receive(data)
    assert isinstance(request, Request)
    assert (request.method, request.deadline_s, request.key) == ("lease.show", 5.0, "key-1")
    assert from_body(request.body, ById, request.method) == ById("7f3a")
    [answer] = one.receive(other.respond(request.id, ById("7f3a9c01")))
    assert isinstance(answer, Response) and answer.id == request_id and answer.body == {"id": "7f3a9c01"}


def test_a_refusal_carries_code_message_and_hint():
    one, other = pair()
    request_id, data = one.request("lease.show", ById("x"))
    other.receive(data)
    [answer] = one.receive(other.refuse(request_id, NotFound("no lease x", "look")))
    assert isinstance(answer.error, NotFound) and answer.error.hint == "look"


def test_an_answer_nobody_waits_for_is_dropped():
    one, other = pair()
    request_id, data = one.request("lease.show", ById("x"))
    other.receive(data)
    assert other.receive(one.cancel(request_id)) == [Cancelled(request_id)]
    assert one.receive(other.respond(request_id, ById("x"))) == []


def test_an_answer_too_large_for_a_frame_travels_in_pieces():
    one, other = pair()
    request_id, data = one.request("gpu.list", ById("x"))
    other.receive(data)
    rows = [{"gpu": f"site:node{n}/0", "type": "h100", "uuid": "GPU-" + "0" * 36} for n in range(30_000)]
    data = other.respond(request_id, rows)
    assert len(data) > frames.FRAME_BYTES_MAX
    events = [event for at in range(0, len(data), 100_000) for event in one.receive(data[at : at + 100_000])]
    assert [event.body for event in events] == [rows]
    assert one.receive(data) == [], "nobody waits for it any more, and nothing of it is kept"


def test_pieces_are_bounded():
    one, other = pair()
    request_id, data = one.request("gpu.list", ById("x"))
    other.receive(data)
    piece = frames.write({"v": 1, "kind": "piece", "id": request_id, "body": bytes(frames.PIECE_BYTES)})
    with pytest.raises(PeerProtocolError, match="pieces of answers"):
        for _ in range(frames.WHOLE_BYTES_MAX // frames.PIECE_BYTES + 1):
            one.receive(piece)
    with pytest.raises(LocalProtocolError, match="an answer of"):
        other.respond(request_id, [bytes(1 << 20)] * 33)
    missing = frames.write({"v": 1, "kind": "response", "id": request_id, "pieces": 3})
    one, other = pair()
    other.receive(one.request("gpu.list", ById("x"))[1])
    with pytest.raises(PeerProtocolError, match="0 of 3 pieces"):
        one.receive(missing)


def test_notices():
    one, other = pair()
    [notice] = other.receive(one.notify("lease.changed", ById("x")))
    assert notice == Notice("lease.changed", {"id": "x"})


def test_the_first_frame_must_be_hello():
    session = Session("hub", "pool")
    with pytest.raises(PeerProtocolError, match="not hello"):
        session.receive(frames.write({"v": 1, "kind": "request", "id": 1, "method": "pool.status"}))


def test_versions_that_do_not_meet_are_named_on_both_sides():
    session = Session("hub", "pool")
    hello = {"versions": [7, 8], "role": "site", "name": "zurich", "software": "9.0.0"}
    with pytest.raises(VersionMismatch) as refused:
        session.receive(frames.write({"v": 8, "kind": "event", "method": "hello", "body": hello}))
    assert "zurich runs 9.0.0 and speaks protocol versions [7, 8]" in refused.value.message
    assert refused.value.hint


def test_a_newer_peer_that_still_speaks_ours_is_welcome():
    session = Session("hub", "pool")
    hello = {"versions": [1, 2], "role": "site", "name": "zurich", "software": "2.0.0", "colour": "blue"}
    [ready] = session.receive(frames.write({"v": 2, "kind": "event", "method": "hello", "body": hello}))
    assert isinstance(ready, Ready) and ready.version == 1


def test_a_malformed_body_names_the_field():
    with pytest.raises(PeerProtocolError, match="gpus"):
        from_body({"tenant": "a", "gpus": "many", "duration_s": 1}, LeaseWanted, "lease.request")


def test_idempotency_keys():
    answers = Answers(capacity=2)
    assert answers.find("k", "m", {"a": 1}) is None
    answers.keep("k", "m", {"a": 1}, "first")
    assert answers.find("k", "m", {"a": 1}) == "first"
    with pytest.raises(Refused, match="another"):
        answers.find("k", "m", {"a": 2})
    answers.keep("l", "m", {}, 1)
    answers.keep("m", "m", {}, 2)
    assert answers.find("k", "m", {"a": 1}) is None, "the oldest is forgotten first"
    answers.forget("m")
    assert answers.find("m", "m", {}) is None


def test_heavy_answers_are_forgotten_sooner():
    answers = Answers(capacity=100, weight=10)
    for key in "abc":
        answers.keep(key, "m", {}, key)
        answers.weigh(key, 4)
    assert [answers.find(key, "m", {}) for key in "abc"] == [None, "b", "c"]
    answers.forget("b")
    answers.keep("d", "m", {}, "d")
    answers.weigh("d", 50)
    assert [answers.find(key, "m", {}) for key in "abcd"] == [None, None, None, "d"], "the latest is always kept"


def test_bulk_frames_survive_any_cut_and_damage_is_found():
    wanted = bulk.object_id("model/run/abc")
    sent = [bulk.Frame(bulk.WANT, wanted, 7), bulk.Frame(bulk.DATA, wanted, 7, b"x" * 1000, True)]
    data = b"".join(bulk.write(frame) for frame in sent)
    for size in (1, 13, len(data)):
        reader, got = bulk.BulkReader(), []
        for at in range(0, len(data), size):
            got += reader.receive(data[at : at + size])
        assert got == sent
    damaged = bytearray(data)
    damaged[15] ^= 1  # in the offset: the payload is what SSH and the end-to-end hash look after
    with pytest.raises(PeerProtocolError, match="damaged"):
        bulk.BulkReader().receive(bytes(damaged))
    with pytest.raises(PeerProtocolError, match="out of step"):
        bulk.BulkReader().receive(b"GET / HTTP/1.1\r\n" * 4)
