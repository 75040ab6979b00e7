"""The primitives: secret sharing, sealing, hybrid agreement, encoding's head-room, the keystream."""

import itertools
import math
import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedpool.errors import IntegrityError, UsageError
from fedpool.secagg import agreement, encoding, masks, sealing, shamir, transcript


def test_any_threshold_of_shares_rebuilds_and_fewer_never_do():
    secret = os.urandom(32)
    shares = shamir.split(secret, 3, [1, 2, 5, 9], os.urandom)
    for chosen in itertools.combinations(shares, 3):
        assert shamir.join({i: shares[i] for i in chosen}, 3) == secret
    for chosen in itertools.combinations(shares, 2):
        with pytest.raises(IntegrityError, match="2 of 3 shares"):
            shamir.join({i: shares[i] for i in chosen}, 3)


def test_a_wrong_share_does_not_rebuild():
    shares = shamir.split(bytes(32), 3, [1, 2, 3], os.urandom)
    shares[2] = bytes([*shares[2][:-1], shares[2][-1] ^ 1])
    try:
        assert shamir.join(shares, 3) != bytes(32)
    except IntegrityError as error:
        assert "wrong" in error.message
    with pytest.raises(IntegrityError, match="malformed"):
        shamir.join({**shares, 2: b"short"}, 3)


def test_sealed_text_is_bound_to_key_and_context():
    key = os.urandom(32)
    sealed = sealing.seal(key, b"shares", b"context")
    assert sealing.unseal(key, sealed, b"context", "it") == b"shares"
    for k, c, context in (
        (os.urandom(32), sealed, b"context"),
        (key, sealed[:-1], b"context"),
        (key, sealed, b"other"),
        (key, bytes([sealed[0] ^ 1]) + sealed[1:], b"context"),
    ):
        with pytest.raises(IntegrityError, match="shares of a was altered"):
            sealing.unseal(k, c, context, "shares of a")


def test_both_ends_agree_on_the_pair_and_share_keys():
    low, high = agreement.RoundKeys(os.urandom), agreement.RoundKeys(os.urandom)
    up, down = agreement.encapsulate(high.public), agreement.encapsulate(low.public)
    at_low = agreement.pair_seed(b"c", 1, 2, low.exchange(high.public), up, down)
    received_up = agreement.Encapsulation(high.decapsulate(up.ciphertext), up.ciphertext)
    at_high = agreement.pair_seed(b"c", 1, 2, high.exchange(low.public), received_up, down)
    assert at_low == at_high
    assert agreement.pair_seed(b"d", 1, 2, low.exchange(high.public), up, down) != at_low
    share = agreement.share_key(b"c", 1, 2, low.exchange(high.public), up)
    assert share == agreement.share_key(b"c", 1, 2, high.exchange(low.public), received_up) != at_low


def test_a_low_order_key_is_refused():
    keys = agreement.RoundKeys(os.urandom)
    with pytest.raises(IntegrityError, match="unusable"):
        keys.exchange(bytes(1216))


def test_parts_of_a_digest_cannot_be_moved():
    assert transcript.digest(b"ab", b"c") != transcript.digest(b"a", b"bc") != transcript.digest(b"abc")


def test_hkdf_matches_rfc_5869_case_1():
    prk = transcript.extract(bytes(range(13)), b"\x0b" * 22)
    assert prk.hex() == "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    assert transcript.expand(prk, bytes(range(0xF0, 0xFA))).hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    )


@pytest.mark.parametrize("cohort", [2, 3, 10, 64, 200, 1000])
@pytest.mark.parametrize("clip", [0.01, 1.0, 8.0, 1e6])
@pytest.mark.parametrize(("bits", "most"), [(16, 2**15), (24, 2**23), (32, 2**30), (64, 2**52)])
def test_no_sum_can_wrap(cohort, clip, bits, most):
    """Integers throughout: in a ring of 64 bits a float would round the very sum that is checked."""
    if bits == 16 and cohort == 1000:
        cohort = 500
    fixed = encoding.fit(clip, 100, cohort, bits)
    largest = math.ceil(math.ldexp(clip, fixed.fraction_bits))
    finer = math.ceil(math.ldexp(clip, fixed.fraction_bits + 1))
    assert cohort * largest <= 2 ** (bits - 1) - 1 and largest < most
    assert cohort * finer > 2 ** (bits - 1) - 1 or finer >= most


def test_the_published_fraction_bits():
    """n = 64 and 200 at clip 1: 24 and 23 bits, as the encoding's proof gives them."""
    assert (encoding.fit(1.0, 1, 64).fraction_bits, encoding.fit(1.0, 1, 200).fraction_bits) == (24, 23)


def test_the_bits_a_round_needs_are_checked_before_it():
    """Case 061: 8,192 levels, 60,000 samples and 10 sites wrap around at 32 bits, silently elsewhere."""
    assert encoding.bits_needed(8192, 60_000, 10) == 33
    assert encoding.bits_needed(8192, 60_000, 7) == 32
    with pytest.raises(UsageError, match=r"8192 levels .* 10 sites need 33 bits; the ring has 32") as refused:
        encoding.fit(1.0, 60_000, 10, 32, 8192)
    assert "set ring_bits = 64" in refused.value.hint
    encoding.fit(1.0, 60_000, 7, 32, 8192)
    encoding.fit(1.0, 60_000, 10, 64, 8192)


def test_impossible_encodings_name_the_limit():
    with pytest.raises(UsageError, match="max_weight 0 "):
        encoding.fit(1.0, 0, 10)
    with pytest.raises(UsageError, match="must be counted in 63 bits"):
        encoding.fit(1.0, 2**62, 10)
    with pytest.raises(UsageError, match="5000 sites leave 6 steps"):
        encoding.fit(1.0, 1, 5000, 16)
    with pytest.raises(UsageError, match="a ring of 20 bits"):
        encoding.fit(1.0, 1, 10, 20)
    with pytest.raises(UsageError, match="hides nothing"):
        encoding.fit(1.0, 1, 1)
    with pytest.raises(UsageError, match="clip nan"):
        encoding.fit(float("nan"), 1, 10)


@pytest.mark.parametrize("streams", [masks.CipherStreams, masks.Streams])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_the_keystream_is_aes_256_ctr_at_any_offset(streams, dtype):
    """Against the library's own cipher, whose counter starts at zero; past 2^32 blocks against itself."""
    key, width = bytes(range(32)), np.dtype(dtype).itemsize
    plain = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(2000 * width))
    whole = np.frombuffer(plain, dtype)
    for first in (0, 1, 3, 4, 7, 1000, 1999):
        words = np.zeros(2000 - first, dtype)
        streams([masks.Stream(key, 1)], first * width).add(words)
        assert np.array_equal(words, whole[first:])
    far, near = np.zeros(4, dtype), np.zeros(6, dtype)
    streams([masks.Stream(key, 1)], (1 << 37) * width).add(far)
    streams([masks.Stream(key, 1)], ((1 << 37) - 2) * width).add(near)
    assert np.array_equal(far, near[2:])
