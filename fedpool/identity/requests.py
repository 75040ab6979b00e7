"""Requests that somebody has signed: what is to be done, in which pool, at which sites, when, and as whom.

The hub passes them on and can change nothing in them; each site opens them for itself. What is signed are the bytes that travel, in
SSHSIG with the requester's certificate, so `ssh-keygen -Y verify -n request@ibshell` accepts them too.
"""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.errors import NotAuthorised, UsageError
from fedpool.identity import certificates, sshsig
from fedpool.identity.certificates import Certificate
from fedpool.identity.trust import Trust
from fedpool.records import Signed

NAMESPACE = "request@ibshell"
FORMAT = 1
PAYLOAD_BYTES_MAX = 1 << 20
# By so much the clocks of those who sign and those who check may differ, with the way between them.
SKEW_S = 300.0

Body = TypeVar("Body")


class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is signed, as JSON.

    Attributes:
        format: of the payload.
        pool: the identity of the pool it is for.
        method: what is asked.
        principal: as whom.
        sites: at which sites; empty: at whichever the hub chooses.
        time_ms: when it was signed, Unix milliseconds by the signer's clock.
        nonce: hexadecimal, never used before by this key.
        body: of the method.
    """

    format: int
    pool: str
    method: str
    principal: str
    sites: tuple[str, ...]
    time_ms: int
    nonce: str
    body: Any


class Opened(msgspec.Struct, Generic[Body], frozen=True):
    """A request whose signature is right and whose signer has the role that it names.

    Attributes:
        body: of the type that was expected.
        certificate: the signer's.
        signed: as it came.
    """

    payload: Payload
    body: Body
    certificate: Certificate
    signed: Signed


class RequestSigner(Protocol):
    """Signs requests for one pool."""

    def sign(self, method: str, body: object, principal: str, sites: tuple[str, ...] = ()) -> Signed:
        """Sign a request as somebody.

        Raises:
            NotAuthorised: this signer may not act as that.
        """
        ...

    def refresh(self, hub: Any) -> None:
        """Take the hub's roster, where it has a newer one that an authority has signed."""
        ...

    def trust(self) -> Trust:
        """Whom it believes."""
        ...

    def signed_plan(self, signed: Signed, tenant: str) -> str:
        """The plan in a request for a run that somebody of a tenant has signed.

        Raises:
            NotAuthorised: it was not, or for another pool.
        """
        ...


_ENCODER = msgspec.json.Encoder(order="sorted")
_DECODER = msgspec.json.Decoder(Payload)


def compose(
    pool: str, method: str, body: object, principal: str, sites: tuple[str, ...], time_ms: int, nonce: str
) -> bytes:
    """The bytes that are to be signed; see `Payload`."""
    return _ENCODER.encode(
        Payload(FORMAT, pool, method, principal, sites, time_ms, nonce, msgspec.to_builtins(body, str_keys=True))
    )


def sign(key: Ed25519PrivateKey, certificate: Certificate, payload: bytes) -> Signed:
    """Sign a payload with a key that is at hand."""
    return Signed(payload, sshsig.sign(key, certificate.blob, NAMESPACE, payload))


def read(signed: Signed) -> Payload:
    """What a request says, nothing of it checked.

    Raises:
        UsageError: it cannot be read.
    """
    if len(signed.payload) > PAYLOAD_BYTES_MAX:
        raise UsageError(f"a request of {len(signed.payload)} bytes; the limit is {PAYLOAD_BYTES_MAX}")
    try:
        payload = _DECODER.decode(signed.payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"a signed request cannot be read: {error}") from None
    if payload.format != FORMAT:
        raise UsageError(
            f"a request of format {payload.format}; format {FORMAT} is known here", "bring both to one release"
        )
    return payload


def open_(
    signed: Signed,
    trust: Trust,
    method: str,
    expected: type[Body],
    now: float,
    check: Callable[[sshsig.Signature, bytes, str, bytes], None] = sshsig.check,
) -> Opened[Body]:
    """Open a request: it is for this pool and this method, its signer has the role it names, now, and nothing was altered.

    Whether it is fresh is another question: see `require_fresh`.

    Args:
        now: Unix seconds.
        check: checks a signature, or puts that off.

    Raises:
        NotAuthorised: not so, and why.
        UsageError: it cannot be read.
    """
    payload = read(signed)
    if payload.pool != trust.pool:
        raise NotAuthorised(
            f"a request for the pool {payload.pool[:80]!r}; this is {trust.pool!r}", "ibshell pool use chooses the pool"
        )
    if payload.method != method:
        raise NotAuthorised(f"a signature for {payload.method[:40]!r} with a request for {method!r}")
    signature = sshsig.parse(signed.signature)
    certificate = trust.require_blob(signature.key, certificates.USER, payload.principal, now)
    check(signature, certificate.public, NAMESPACE, signed.payload)
    try:
        body = msgspec.convert(payload.body, expected, str_keys=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"the body of {method} is malformed: {error}") from None
    return Opened(payload, body, certificate, signed)


def require_fresh(payload: Payload, now: float, patience_s: float = 0.0) -> None:
    """A request was signed lately.

    Args:
        now: Unix seconds.
        patience_s: how much later it may come, for what is to wait.

    Raises:
        NotAuthorised: too long ago, or in the future.
    """
    age = now - payload.time_ms / 1000
    if age < -SKEW_S:
        raise NotAuthorised(
            f"a request that was signed {-age:.0f} s in the future; {SKEW_S:.0f} s are allowed", "compare the clocks"
        )
    if age > SKEW_S + patience_s:
        raise NotAuthorised(
            f"a request that was signed {age:.0f} s ago; {SKEW_S + patience_s:.0f} s are allowed",
            "ask again; if it was signed just now, compare the clocks",
        )
