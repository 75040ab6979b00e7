"""Tokens with which a site or a person joins a pool: one line that says where, whom to believe, and proves the invitation.

The secret in it never travels. Whoever joins uses it to authenticate the key it has made (HMAC, RFC 2104), and the operator, who
alone has it too, sees by that that no hub and nobody on the way has put another key in its place.
"""

import base64
import binascii
import hashlib
import hmac

import msgspec

from fedpool.errors import UsageError
from fedpool.identity.authorities import authority_line
from fedpool.identity.principals import require_principal

PREFIX = "ibshell1."
SECRET_BYTES = 16
TOKEN_CHARS_MAX = 1024


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One invitation.

    Attributes:
        pool: identity of the pool.
        hub: `host:port` of the hub for people.
        authority: key of the authority that vouches for the hub, as it travels.
        invite: hexadecimal, by which the hub knows the invitation.
        secret: 16 bytes.
        role: what the joiner becomes.
        until: Unix seconds after which it is worth nothing.
    """

    pool: str
    hub: str
    authority: bytes
    invite: str
    secret: bytes
    role: str
    until: int

    def line(self) -> str:
        """As it is handed over."""
        return PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")

    def proof(self, public: bytes, name: str, address: str) -> bytes:
        """What shows that somebody who has the token has made a key, as whom, and where it may be reached.

        Args:
            public: the 32 bytes of the key.
            name: as whom it joins.
            address: where it listens, or "".
        """
        said = msgspec.msgpack.encode(["ibshell/join", self.pool, self.invite, self.role, public, name, address])
        return hmac.digest(self.secret, said, hashlib.sha256)


def parse(line: str) -> Token:
    """Read a token.

    Raises:
        UsageError: it is none.
    """
    text = line.strip()
    try:
        if not text.startswith(PREFIX) or len(text) > TOKEN_CHARS_MAX:
            raise ValueError(f"it begins with {PREFIX}")
        data = text.removeprefix(PREFIX)
        raw = base64.b64decode(data + "=" * (-len(data) % 4), altchars=b"-_", validate=True)
        token = msgspec.msgpack.decode(raw, type=Token)
        if len(token.secret) != SECRET_BYTES:
            raise ValueError("a part of it is cut off")
        authority_line(token.authority)
        require_principal(token.role)
    except (ValueError, binascii.Error, msgspec.MsgspecError, UsageError) as error:
        raise UsageError(f"no token: {error}", "copy the whole line that ibshell site invite printed") from None
    return token
