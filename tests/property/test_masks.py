"""The compiled kernels agree with their plain twin to the bit, whatever they are given."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpool.secagg import _masks_reference, encoding, masks

pytestmark = pytest.mark.skipif(
    not masks.is_compiled(), reason="no compiler when ibshell was installed: nothing to compare"
)

floats = hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(-1e6, 1e6, width=32))
KEY = bytes(range(32))


def kernel():
    from fedpool.secagg import _masks

    return _masks


@given(floats, st.integers(2, 64), st.floats(0.01, 100), st.booleans(), st.randoms())
def test_encode_agrees(values, cohort, clip, based, random):
    fixed = encoding.fit(clip, 100, cohort)
    factor = fixed.factor(random.randint(1, 100))
    base = np.roll(values, 1) if based else None
    rounding = np.array([random.randrange(65536) for _ in values], np.uint16)
    one, other = np.zeros(len(values), np.uint32), np.zeros(len(values), np.uint32)
    assert kernel().encode(values, base, rounding, clip, factor, one) == _masks_reference.encode(
        values, base, rounding, clip, factor, other
    )
    assert np.array_equal(one, other)


@given(floats, st.integers(0, 299), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_both_name_the_same_bad_value(values, place, bad):
    if len(values):
        values = values.copy()
        values[place % len(values)] = bad
        rounding, out = np.zeros(len(values), np.uint16), np.zeros(len(values), np.uint32)
        found = [k.encode(values, None, rounding, 1.0, 8.0, out)[1] for k in (kernel(), _masks_reference)]
        assert found == [place % len(values)] * 2


@given(st.integers(0, 500), st.integers(0, 2**32 - 1))
def test_add_subtract_decode_agree(size, seed):
    rng = np.random.default_rng(seed)
    words, stream = (rng.integers(0, 2**32, size, np.uint32) for _ in range(2))
    base = rng.standard_normal(size).astype(np.float32)
    for name in ("add", "subtract"):
        one, other = words.copy(), words.copy()
        getattr(kernel(), name)(one, stream)
        getattr(_masks_reference, name)(other, stream)
        assert np.array_equal(one, other)
    for b in (base, None):
        one, other = np.empty(size, np.float32), np.empty(size, np.float32)
        kernel().decode(words, b, 3e-7, one)
        _masks_reference.decode(words, b, 3e-7, other)
        assert np.array_equal(one, other)


@given(st.integers(0, 200_000), st.integers(1, 100), st.integers(0, 10_000))
def test_a_chunk_masked_alone_equals_that_part_of_the_whole(start, size, tail):
    streams = [masks.Stream(KEY, 1), masks.Stream(bytes(32), -1)]
    whole = np.zeros(start + size + tail, np.uint32)
    masks.apply(whole, streams, 0)
    part = np.zeros(size, np.uint32)
    masks.apply(part, streams, start)
    assert np.array_equal(part, whole[start : start + size])


def test_rounding_is_unbiased():
    """10,000 roundings of 0.3 of a step: the mean is 0.3 within five standard errors."""
    words = np.zeros(10_000, np.uint32)
    masks.encode(np.full(10_000, 0.3, np.float32), None, 1.0, 1.0, os.urandom(32), 0, words)
    assert set(words) == {0, 1}
    assert abs(words.mean() - 0.3) < 5 * np.sqrt(0.21 / 10_000)


def test_saturation_is_counted():
    out = np.zeros(5, np.uint32)
    count, bad = masks.encode(np.array([-3, -1, 0, 1, 2], np.float32), None, 1.0, 4.0, KEY, 0, out)
    assert (count, bad) == (2, -1)
    assert out.view(np.int32).tolist() == [-4, -4, 0, 4, 4]
