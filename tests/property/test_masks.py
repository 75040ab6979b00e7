"""The compiled kernels agree with their plain twin to the bit, whatever they are given."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpool.secagg import _masks_reference, encoding, masks, ring

pytestmark = pytest.mark.skipif(
    not masks.is_compiled(), reason="no compiler when ibshell was installed: nothing to compare"
)

floats = hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(-1e6, 1e6, width=32))
widths = st.sampled_from(ring.WIDTHS)
KEY = bytes(range(32))


def kernel():
    from fedpool.secagg import _masks

    return _masks


def random_words(rng, r, size):
    return rng.integers(0, 2 ** (8 * r.word_bytes), size, r.dtype)


@given(floats, widths, st.integers(2, 64), st.floats(0.01, 100), st.booleans(), st.randoms())
def test_encode_agrees(values, bits, cohort, clip, based, random):
    r, fixed = ring.of(bits), encoding.fit(clip, 100, cohort, bits)
    factor = fixed.factor(random.randint(1, 100))
    base = np.roll(values, 1) if based else None
    rounding = np.array([random.randrange(65536) for _ in values], np.uint16)
    one = random_words(np.random.default_rng(len(values)), r, len(values))
    other = one.copy()
    assert kernel().encode(values, base, rounding, clip, factor, one) == _masks_reference.encode(
        values, base, rounding, clip, factor, other
    )
    assert np.array_equal(one, other)


@given(floats, widths, st.integers(0, 299), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_both_name_the_same_bad_value(values, bits, place, bad):
    if len(values):
        values = values.copy()
        values[place % len(values)] = bad
        rounding, out = np.zeros(len(values), np.uint16), ring.of(bits).zeros(len(values))
        found = [k.encode(values, None, rounding, 1.0, 8.0, out)[1] for k in (kernel(), _masks_reference)]
        assert found == [place % len(values)] * 2


@given(widths, st.integers(0, 500), st.integers(0, 2**32 - 1))
def test_add_subtract_decode_agree(bits, size, seed):
    rng, r = np.random.default_rng(seed), ring.of(bits)
    words, stream = (random_words(rng, r, size) for _ in range(2))
    base = rng.standard_normal(size).astype(np.float32)
    for name in ("add", "subtract"):
        one, other = words.copy(), words.copy()
        getattr(kernel(), name)(one, stream)
        getattr(_masks_reference, name)(other, stream)
        assert np.array_equal(one, other)
    for b in (base, None):
        one, other = np.empty(size, np.float32), np.empty(size, np.float32)
        kernel().decode(words, b, r.lift, 3e-7, one)
        _masks_reference.decode(words, b, r.lift, 3e-7, other)
        assert np.array_equal(one, other)


@given(widths, st.integers(0, 200_000), st.integers(1, 100), st.integers(0, 10_000))
def test_a_chunk_masked_alone_equals_that_part_of_the_whole(bits, start, size, tail):
    r, streams = ring.of(bits), [masks.Stream(KEY, 1), masks.Stream(bytes(32), -1)]
    whole = r.zeros(start + size + tail)
    masks.apply(whole, streams, 0)
    part = r.zeros(size)
    masks.apply(part, streams, start)
    assert np.array_equal(part, whole[start : start + size])


@given(widths, st.integers(0, 1 << 40), st.integers(0, 3000), st.integers(0, 17), st.integers(0, 2**32 - 1))
def test_keystream_in_registers_is_that_of_the_library(bits, first, size, neighbours, seed):
    """Any number of streams, any offset, words that hold something already; not every processor has both."""
    if masks.Streams is masks.CipherStreams:
        return
    rng, r = np.random.default_rng(seed), ring.of(bits)
    streams = [masks.Stream(rng.bytes(32), 1 if i % 2 else -1) for i in range(neighbours)]
    one = random_words(rng, r, size)
    other = one.copy()
    masks.RegisterStreams(streams, first * r.word_bytes).add(one)
    masks.CipherStreams(streams, first * r.word_bytes).add(other)
    assert np.array_equal(one, other)


@given(widths, st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_words_survive_their_bytes(bits, size, seed):
    r = ring.of(bits)
    words = random_words(np.random.default_rng(seed), r, size)
    wire = np.zeros(size * r.wire_bytes, np.uint8)
    r.write(words, wire)
    assert np.array_equal(r.read(wire) << r.lift, words << r.lift)
    assert wire.tobytes() == b"".join(int(w).to_bytes(8, "little")[: r.wire_bytes] for w in words)


@given(floats, widths, st.integers(2, 1000), st.floats(0.01, 100), st.integers(0, 2**32 - 1))
def test_what_is_decoded_lies_within_the_bound(values, bits, cohort, clip, seed):
    """One site of the largest weight: |decoded - clipped| <= the documented bound and float32's own rounding."""
    if bits == 16:
        cohort = 2 + cohort % 500
    r, fixed = ring.of(bits), encoding.fit(clip, 100, cohort, bits)
    words = r.zeros(len(values))
    key = np.random.default_rng(seed).bytes(32)
    masks.mask(values, None, clip, fixed.factor(100), key, [], 0, words)
    out = np.empty(len(values), np.float32)
    masks.decode(r, words, None, fixed.unit() / 100, out)
    clipped = np.clip(values.astype(np.float64), -clip, clip)
    assert np.all(np.abs(out - clipped) <= fixed.mean_error_bound(100) / cohort + np.spacing(np.float32(clip)))


def test_rounding_is_unbiased():
    """10,000 roundings of 0.3 of a step: the mean is 0.3 within five standard errors."""
    words = np.zeros(10_000, np.uint32)
    masks.mask(np.full(10_000, 0.3, np.float32), None, 1.0, 1.0, os.urandom(32), [], 0, words)
    assert set(words) == {0, 1}
    assert abs(words.mean() - 0.3) < 5 * np.sqrt(0.21 / 10_000)


def test_the_same_key_rounds_the_same_way_wherever_a_chunk_starts():
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    whole, part = np.zeros(1000, np.uint32), np.zeros(300, np.uint32)
    masks.mask(values, None, 4.0, 7.0, KEY, [], 0, whole)
    masks.mask(values[450:750], None, 4.0, 7.0, KEY, [], 450, part)
    assert np.array_equal(part, whole[450:750])


def test_saturation_is_counted():
    out = np.zeros(5, np.uint32)
    found = masks.mask(np.array([-3, -1, 0, 1, 2], np.float32), None, 1.0, 4.0, KEY, [], 0, out)
    assert (found.saturated, found.first) == (2, -1)
    assert out.view(np.int32).tolist() == [-4, -4, 0, 4, 4]
