"""Control frames: the compiled look at a payload says what its plain twin says, whatever the bytes."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpool.wire import _walk_reference, frames

LIMITS = (8, 20, 20, 60)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=25) | st.dictionaries(st.text(max_size=5), inner, max_size=25),
    max_leaves=40,
)


@given(st.binary(max_size=200) | values.map(msgpack.packb), st.integers(0, 12))
def test_kernel_and_twin_agree(payload, cut):
    compiled = pytest.importorskip("fedpool.wire._walk")
    for data in (payload, payload[: len(payload) - cut], payload + bytes(cut)):
        assert compiled.walk(data, *LIMITS) == _walk_reference.walk(data, *LIMITS)


@given(values)
def test_what_msgpack_writes_passes(value):
    assert _walk_reference.walk(msgpack.packb({"body": value}), 64, 65_536, 65_536, 200_000) == ("", 0)
    assert frames.FrameReader().receive(frames.write({"v": 1})) == [{"v": 1}]
