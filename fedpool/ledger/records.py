"""What a site's ledger says: one Struct a kind of record, and their one canonical encoding.

Field names are ASCII and values are integers, texts, lists and truth values, so that msgspec's sorted JSON is the canonical form of
RFC 8785 (`fedpool.ledger.canonical` says what that is, and a test holds the two together). A field that says nothing is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from fedpool.errors import IntegrityError

FORMAT = 1
TEXT_MAX = 500  # characters of a reason, which people of other institutions write


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """What they have in common.

    Attributes:
        time: of writing, in milliseconds of Unix; it never goes back within a ledger, whatever the clock does.
    """

    time: int = 0


class LedgerOpened(Record, frozen=True, kw_only=True, tag="ledger.opened"):
    """The first record of every ledger.

    Attributes:
        format: of the records, for their readers.
        site: whose it is.
        key: base64 of the Ed25519 key that signs its checkpoints.
    """

    format: int
    site: str
    key: str


class SiteStarted(Record, frozen=True, kw_only=True, tag="site.started"):
    """The agent started; its tokens begin above `epoch`.

    Attributes:
        pool: the identity of the pool whose requests it obeys.
        authorities: fingerprints of those who vouch for who has signed them; where there are none, it obeys the hub.
    """

    epoch: int
    software: str
    pool: str = ""
    authorities: tuple[str, ...] = ()


class OfKind(msgspec.Struct, frozen=True):
    """Devices of one kind, by UUID."""

    kind: str
    devices: tuple[str, ...]


class DevicesSaid(Record, frozen=True, kw_only=True, tag="devices"):
    """What the site has, when it is not what it had before.

    Attributes:
        kinds: the devices.
        continued: whether they come to those of the record before.
    """

    kinds: tuple[OfKind, ...]
    continued: bool = False


class HubObeyed(Record, frozen=True, kw_only=True, tag="hub.obeyed"):
    """A hub of a new term has connected; none of an earlier one is obeyed any more."""

    term: int


class Cordoned(Record, frozen=True, kw_only=True, tag="cordoned"):
    """Nothing new is granted on a node or device, or, with `what` empty, at the site."""

    what: str = ""
    reason: str = ""
    term: int = 0


class Uncordoned(Record, frozen=True, kw_only=True, tag="uncordoned"):
    """It is granted again."""

    what: str = ""
    term: int = 0


class WitnessRefused(Record, frozen=True, kw_only=True, tag="witness.refused"):
    """This site did not cosign a checkpoint of another's ledger: it does not continue what was cosigned before.

    Attributes:
        site: whose ledger.
        size: of the checkpoint.
        root: hexadecimal.
        known: size of what was cosigned before.
    """

    site: str
    size: int
    root: str
    known: int
    reason: str = ""


class Requested(Record, frozen=True, kw_only=True, tag="request"):
    """What somebody has signed, and the site obeys with the next records.

    Attributes:
        lease: which it is about, or "".
        payload: as it was signed.
        signature: base64 of the SSHSIG over it, not armoured.
    """

    lease: str = ""
    payload: str
    signature: str


class RosterObeyed(Record, frozen=True, kw_only=True, tag="roster"):
    """The site goes by a new roster of its pool.

    Attributes:
        number: of the roster.
        digest: hexadecimal SHA-256 of what is signed.
        authorities: fingerprints of those who may certify from now on.
        denied_serials: of certificates that are believed no longer.
        denied_keys: fingerprints of keys that are believed no longer.
    """

    number: int
    digest: str
    authorities: tuple[str, ...]
    denied_serials: tuple[int, ...] = ()
    denied_keys: tuple[str, ...] = ()


class ProgramSaid(Record, frozen=True, kw_only=True, tag="program"):
    """A tenant's program was started here, or has ended.

    Attributes:
        run: of which federation.
        lease: under which.
        event: "started" or "ended".
        plan: hexadecimal SHA-256 of the plan.
        reason: how it ended.
    """

    run: str
    lease: str
    event: str
    plan: str
    reason: str = ""


class RoundSaid(Record, frozen=True, kw_only=True, tag="round"):
    """What left the site in a round of a federation.

    Attributes:
        run: the federation.
        lease: under which its program trained.
        event: "sent": the masked update; "released": shares of masks, by which the sum of the survivors' updates is unmasked.
        plan: hexadecimal SHA-256 of the plan.
        model: hexadecimal SHA-256 of the parameters that were trained on.
        cohort: the sites that were in the round, or, with "released", whose updates are in the sum.
        bytes: that were sent.
        form: in which.
    """

    run: str
    lease: str
    round: int
    attempt: int
    event: str
    plan: str
    model: str
    cohort: tuple[str, ...]
    bytes: int
    form: str


class LoggedIn(Record, frozen=True, kw_only=True, tag="login"):
    """A hub has opened a control channel.

    Attributes:
        who: the name that its certificate was issued for, or that its key has in the configuration.
        software: that it says it runs.
    """

    who: str
    software: str


class PolicyObeyed(Record, frozen=True, kw_only=True, tag="policy"):
    """The site goes by a policy from here on.

    Attributes:
        digest: hexadecimal SHA-256 of its text.
        text: TOML; see `fedpool.leasing.policy`.
    """

    digest: str
    text: str


class Refusal(Record, frozen=True, kw_only=True, tag="refusal"):
    """The site has been asked for something that nobody with the right to it had signed, or that its policy forbids.

    Attributes:
        asked: what, as the hub put it.
        lease: about which, or "".
        more: so many further refusals before it were too many to be recorded one by one.
    """

    asked: str
    lease: str = ""
    reason: str = ""
    more: int = 0


class LedgerSeam(Record, frozen=True, kw_only=True, tag="seam"):
    """Records before this one may be forgotten: the next `kept` ones repeat what is still in force.

    Attributes:
        kept: how many.
        token: the largest fencing token so far.
        term: of the hub that is obeyed.
    """

    kept: int
    token: int
    term: int = 0


class Kept(Record, frozen=True, kw_only=True, tag="kept"):
    """A record that is still in force, repeated.

    Attributes:
        number: of the record that it was first.
        record: base64 of its text, compressed (RFC 1950).
    """

    number: int
    record: str


class Granted(msgspec.Struct, frozen=True, omit_defaults=True):
    """Devices that were granted together.

    Attributes:
        devices: UUIDs.
        token: their fencing token.
        milli: how much of each, in thousandths.
    """

    devices: tuple[str, ...]
    token: int
    milli: int = 1000


class LeaseSaid(Record, frozen=True, kw_only=True, tag="lease"):
    """A lease took a new state at this site, or changed in it.

    Attributes:
        lease: its id, the same at all sites of a gang.
        tenant: who holds it.
        event: what happened, as in the table of leases; "carried" where a ledger begins with leases that are older.
        state: that follows.
        version: of the lease at this site.
        term: of the hub that is obeyed.
        for_ms: how long it has from now on, where that has changed.
        grants: all its devices, where they have changed.
        more: so many records of kind lease.devices follow, with more of its devices.
        leaving: devices it is to give back, where that has changed.
        reason: why it is ending, or will.
        next_tenant: to whom it goes.
    """

    lease: str
    tenant: str
    event: str
    state: str
    version: int = 0
    term: int = 0
    for_ms: int | None = None
    grants: tuple[Granted, ...] | None = None
    more: int = 0
    leaving: tuple[str, ...] | None = None
    reason: str = ""
    next_tenant: str = ""


class LeaseDevices(Record, frozen=True, kw_only=True, tag="lease.devices"):
    """More devices of the lease whose record came before."""

    lease: str
    grants: tuple[Granted, ...]


AnyRecord: TypeAlias = (
    LedgerOpened
    | SiteStarted
    | DevicesSaid
    | HubObeyed
    | Cordoned
    | Uncordoned
    | WitnessRefused
    | Requested
    | RosterObeyed
    | PolicyObeyed
    | ProgramSaid
    | RoundSaid
    | LoggedIn
    | Refusal
    | LedgerSeam
    | Kept
    | LeaseSaid
    | LeaseDevices
)


class _Kind(msgspec.Struct):
    kind: str = ""
    time: int = 0


_ENCODER = msgspec.json.Encoder(order="sorted")
_DECODER = msgspec.json.Decoder(AnyRecord)
_KIND = msgspec.json.Decoder(_Kind)


def encode(record: Record) -> bytes:
    """The canonical encoding."""
    return _ENCODER.encode(record)


def encode_at(records: Iterable[Record], time_ms: int) -> list[bytes]:
    """Records of one moment, as they are written."""
    return [encode(msgspec.structs.replace(record, time=time_ms)) for record in records]


def decode(data: bytes) -> AnyRecord | None:
    """Read a record; None for one of a kind that this release does not know.

    Raises:
        IntegrityError: it is none.
    """
    try:
        return _DECODER.decode(data)
    except msgspec.ValidationError as error:
        kind = kind_of(data)
        if any(kind == known.__struct_config__.tag for known in AnyRecord.__args__):
            raise IntegrityError(f"a record of kind {kind!r} cannot be read: {error}") from None
        return None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise IntegrityError(f"a record cannot be read: {error}") from None


def kind_of(data: bytes) -> str:
    """Of what kind a record says it is.

    Raises:
        IntegrityError: it is none.
    """
    return _peek(data).kind


def time_of(data: bytes) -> int:
    """When a record says it was written.

    Raises:
        IntegrityError: it is none.
    """
    return _peek(data).time


def _peek(data: bytes) -> _Kind:
    try:
        return _KIND.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise IntegrityError(f"a record cannot be read: {error}") from None
