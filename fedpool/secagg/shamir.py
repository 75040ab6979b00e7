"""Shamir secret sharing of 32-byte secrets over the prime field of 2^521 - 1, and nothing else.

A secret is the constant term of a random polynomial of degree threshold - 1; a share is its value at the holder's index.
Interpolating from too few shares would give a wrong secret without any sign of it, so the count is checked here and the
secret against its commitment by the caller (Shamir, How to share a secret, CACM 22(11), 1979).
"""

from collections.abc import Callable, Iterable, Mapping

from fedpool.errors import IntegrityError

PRIME = 2**521 - 1  # a Mersenne prime: larger than any 32-byte secret, and 66 bytes a share
SECRET_BYTES = 32
SHARE_BYTES = 66

Entropy = Callable[[int], bytes]


def split(secret: bytes, threshold: int, holders: Iterable[int], entropy: Entropy) -> dict[int, bytes]:
    """Split a secret so that any `threshold` of the holders can rebuild it and fewer learn nothing.

    Args:
        secret: 32 bytes.
        threshold: shares needed, >= 1.
        holders: distinct indices > 0.
        entropy: source of random bytes.

    Returns:
        {holder: share of 66 bytes}.
    """
    assert len(secret) == SECRET_BYTES
    indices = list(holders)
    assert len(set(indices)) == len(indices) >= threshold >= 1
    assert all(0 < x < PRIME for x in indices)
    # 80 random bytes reduced modulo a 521-bit prime: the bias is under 2^-119.
    coefficients = [int.from_bytes(entropy(80), "big") % PRIME for _ in range(threshold - 1)]
    constant = int.from_bytes(secret, "big")
    shares = {}
    for x in indices:
        y = 0
        for coefficient in reversed(coefficients):
            y = (y + coefficient) * x % PRIME
        shares[x] = ((y + constant) % PRIME).to_bytes(SHARE_BYTES, "big")
    return shares


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Rebuild the secret from at least `threshold` shares.

    Raises:
        IntegrityError: too few shares, a malformed one, or shares that belong to no 32-byte secret.
    """
    if len(shares) < threshold:
        raise IntegrityError(f"{len(shares)} of {threshold} shares: a secret cannot be rebuilt")
    points = []
    for x, share in sorted(shares.items())[:threshold]:
        y = int.from_bytes(share, "big")
        if len(share) != SHARE_BYTES or y >= PRIME:
            raise IntegrityError(f"the share of holder {x} is malformed")
        points.append((x, y))
    secret = 0
    for x, y in points:
        numerator, denominator = y, 1
        for other, _ in points:
            if other != x:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - x) % PRIME
        secret += numerator * pow(denominator, -1, PRIME)
    secret %= PRIME
    if secret >> (8 * SECRET_BYTES):
        raise IntegrityError("the shares belong to no secret: at least one is wrong")
    return secret.to_bytes(SECRET_BYTES, "big")
