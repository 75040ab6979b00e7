"""Every error of the project, as one tree.

    IbshellError
    ├── UsageError              the request itself is malformed                                  exit 2
    │   └── PlanError           … in a plan or scenario file: the key and the line are named
    ├── NotFound                no such site, lease, run …                                       exit 3
    ├── NotAuthorised           not authenticated, or not allowed                                exit 4
    ├── Refused                 policy, quota or state says no                                   exit 5
    │   ├── Insufficient        not enough devices
    │   ├── Forbidden           a site's own policy says no
    │   ├── StaleToken          an older fencing token, term or epoch than one already seen
    │   └── Recovering          the site has not yet read its own state back
    ├── Unreachable             nobody answers there                                             exit 7
    │   └── TimedOut            … within the deadline
    ├── Pending                 the thing asked for does not exist yet; ask again                exit 8
    └── Failed                  it was tried and it failed                                       exit 1
        ├── RoundFailed         a round ended without an aggregate
        ├── ProgramFailed       the tenant's program crashed, hung or returned nonsense
        ├── StorageFailed       the disk refused: full, read-only, damaged
        ├── IntegrityError      bytes, signatures or states contradict each other
        └── ProtocolError       the wire
            ├── LocalProtocolError   we misused it
            ├── PeerProtocolError    the other side did
            └── VersionMismatch      no common version

A class has a stable `code` (documented, sent on the wire) and an exit status. A message names the thing, the value and
the limit, in lower case without a full stop; the hint says what to do. Programmer errors are `assert`, never one of these.
"""

from typing import ClassVar


class IbshellError(Exception):
    """What every error of the project is.

    Attributes:
        code: stable word for scripts and the wire.
        exit_status: what the command line exits with.
        message: what happened.
        hint: what to do about it, or "".
    """

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(IbshellError):
    """The request itself is malformed."""

    code = "usage"
    exit_status = 2


class PlanError(UsageError):
    """A plan or scenario file is malformed; the message names file, line and key."""

    code = "bad_plan"


class NotFound(IbshellError):
    """No such thing."""

    code = "not_found"
    exit_status = 3


class NotAuthorised(IbshellError):
    """The peer is not who it says, or may not do this."""

    code = "not_authorised"
    exit_status = 4


class Refused(IbshellError):
    """Policy, quota, capacity or state says no."""

    code = "refused"
    exit_status = 5


class Insufficient(Refused):
    """Not enough devices."""

    code = "insufficient"


class Forbidden(Refused):
    """A site's own policy says no, whoever asks; the site records it."""

    code = "forbidden"


class StaleToken(Refused):
    """An older fencing token or term than one already seen."""

    code = "stale_token"


class Recovering(Refused):
    """The site has restarted and has not yet read its own state back."""

    code = "recovering"


class Unreachable(IbshellError):
    """Nobody answers there."""

    code = "unreachable"
    exit_status = 7


class TimedOut(Unreachable):
    """No answer within the deadline."""

    code = "timed_out"


class Pending(IbshellError):
    """The thing asked for does not exist yet."""

    code = "pending"
    exit_status = 8


class Failed(IbshellError):
    """It was tried and it failed."""

    code = "failed"


class RoundFailed(Failed):
    """A federated round ended without an aggregate; nothing was revealed."""

    code = "round_failed"


class ProgramFailed(Failed):
    """The tenant's program crashed, hung or returned nonsense."""

    code = "program_failed"


class StorageFailed(Failed):
    """The disk refused: full, read-only or damaged."""

    code = "storage_failed"


class IntegrityError(Failed):
    """Bytes, signatures or states contradict each other."""

    code = "integrity"


class ProtocolError(Failed):
    """The wire; abstract."""

    code = "protocol"


class LocalProtocolError(ProtocolError):
    """This side misused the protocol."""

    code = "protocol_misuse"


class PeerProtocolError(ProtocolError):
    """The other side broke the protocol."""

    code = "protocol_violation"


class VersionMismatch(ProtocolError):
    """The two sides speak no common version."""

    code = "version_mismatch"


def _tree(root: type[IbshellError]) -> dict[str, type[IbshellError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[IbshellError]] = _tree(IbshellError)


def from_wire(code: str, message: str, hint: str = "") -> IbshellError:
    """Rebuild an error that a peer sent; an unknown code becomes `Failed` with the code kept in the message."""
    known = BY_CODE.get(code)
    if known is None:
        return Failed(f"{message} [{code}]", hint)
    return known(message, hint)
