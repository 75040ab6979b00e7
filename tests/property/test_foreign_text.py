"""What others write crashes no parser, whatever it is: an error of ours, or something that can be read."""

import pytest
from fuzz.parsers import PARSERS, SEEDS, feed
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_parser_raises_anything_but_an_error_of_ours(name, data):
    seeds = SEEDS.get(name, [b""])
    seed = data.draw(st.sampled_from(seeds))
    at = data.draw(st.integers(0, len(seed)))
    cut = data.draw(st.integers(at, len(seed)))
    feed(name, data.draw(st.one_of(st.binary(max_size=300), st.text(max_size=80).map(str.encode))))
    feed(name, seed[:at] + data.draw(st.binary(max_size=40)) + seed[cut:])


DEEP = [b"[" * 100_000, b"{" * 100_000, b'{"a":' * 50_000, b"\x91" * 100_000, b"\xff" * 5000, b"a=[" * 30_000]


@pytest.mark.parametrize("name", PARSERS)
def test_nor_does_depth(name):
    for data in DEEP:
        feed(name, data)
