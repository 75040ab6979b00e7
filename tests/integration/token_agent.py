"""An ssh-agent with a FIDO key that lives in software: what a token would sign, in the form in which OpenSSH has tokens sign.

There is no token on the machines that run the tests. That the form is right is for the real ssh-keygen and sshd to say, which check
what this signs.
"""

import hashlib
import os
import socket
import struct
import threading
from contextlib import contextmanager

from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedpool.identity.authorities import SK_ECDSA_P256, SK_ED25519
from fedpool.identity.keys import ssh_string, take_string

APPLICATION = b"ssh:ibshell"
PRESENT = 1
_IDENTITIES, _ANSWER, _SIGN, _SIGNED, _FAILURE = 11, 12, 13, 14, 5


class SoftToken:
    """A key of a FIDO token's kind."""

    def __init__(self, kind=SK_ED25519, flags=PRESENT):
        self.kind = kind
        self.flags = flags
        self.counter = 0
        if kind == SK_ED25519:
            self.key = Ed25519PrivateKey.generate()
            public = [self.key.public_key().public_bytes_raw()]
        else:
            self.key = generate_private_key(SECP256R1())
            point = self.key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
            public = [b"nistp256", point]
        self.blob = b"".join(map(ssh_string, (kind, *public, APPLICATION)))

    def sign(self, message):
        """The signature as it travels."""
        self.counter += 1
        rest = struct.pack(">BI", self.flags, self.counter)
        data = hashlib.sha256(APPLICATION).digest() + rest + hashlib.sha256(message).digest()
        if self.kind == SK_ECDSA_P256:
            numbers = decode_dss_signature(self.key.sign(data, ECDSA(SHA256())))
            raw = b"".join(ssh_string(n.to_bytes(n.bit_length() // 8 + 1)) for n in numbers)
        else:
            raw = self.key.sign(data)
        return ssh_string(self.kind) + ssh_string(raw) + rest


def _answer(token, request):
    if request[0] == _IDENTITIES:
        return struct.pack(">BI", _ANSWER, 1) + ssh_string(token.blob) + ssh_string(b"token")
    if request[0] == _SIGN:
        blob, at = take_string(request, 1)
        message, _ = take_string(request, at)
        if blob == token.blob:
            return struct.pack(">B", _SIGNED) + ssh_string(token.sign(message))
    return struct.pack(">B", _FAILURE)


def _serve(listener, token):
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # the test is over
        with connection, connection.makefile("rb") as requests:
            while head := requests.read(4):
                connection.sendall(ssh_string(_answer(token, requests.read(*struct.unpack(">I", head)))))


@contextmanager
def agent_with(token, path):
    """Run the agent at a socket; gives the environment of those who ask it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=_serve, args=(listener, token))
        thread.start()
        try:
            yield {"SSH_AUTH_SOCK": os.fspath(path)}
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
