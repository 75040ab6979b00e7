"""The bodies of every method, typed: client -> hub, hub -> site, program -> site. The first words of a docstring name the
method and its answer. Unknown fields are ignored, so a field may be added within a version.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fedpool.records import Inventory, Lease, Signed, SiteLease, Tenant


class Nothing(msgspec.Struct, frozen=True):
    """An empty body."""


# --- client -> hub -------------------------------------------------------------------------------------------------------


class SiteError(msgspec.Struct, frozen=True):
    """Why a site is missing from a listing."""

    site: str
    code: str
    message: str


class Listing(msgspec.Struct, frozen=True):
    """An answer over all sites, which is always partial: what came, what is missing, how old each part is.

    Attributes:
        items: one map a row, keys with units.
        errors: sites that are missing or silent.
        as_of: {site: wall clock of its latest word}.
    """

    items: list[dict[str, Any]]
    errors: list[SiteError] = []
    as_of: dict[str, str] = {}


class ById(msgspec.Struct, frozen=True):
    """Names one thing; an id may be a unique prefix."""

    id: str


class LeaseWanted(msgspec.Struct, frozen=True, omit_defaults=True):
    """lease.request, lease.foresee -> LeaseView: devices at several sites, all or none; or only what would happen.

    Sizes and wishes are as in `records.Demand`.

    Attributes:
        gpus: over all sites.
        sites: how many sites, 0 for as few as possible.
        site_names: exactly these sites, or empty.
        gpu_type: or None for any; a MIG slice as `h100/1g.10gb`.
        devices: exactly these, by UUID or as `SITE:NODE/INDEX`, or empty.
        starts_in_s: seconds until it is to start, 0 for as soon as possible.
        max_wait_s: how long it may wait: 0 not at all, None for ever.
        id: the lease's id, chosen by who asks, who can then give it back whatever became of the answer; "" lets the hub choose.
    """

    tenant: str
    gpus: int
    duration_s: float
    sites: int = 0
    site_names: list[str] = []
    gpu_type: str | None = None
    gpus_max: int = 0
    memory_min_bytes: int = 0
    memory_max_bytes: int = 0
    milli: int = 1000
    devices: list[str] = []
    same_leaf: bool = False
    spread: str = ""
    avoid: list[str] = []
    per_site_min: int = 1
    priority: str = "normal"
    starts_in_s: float = 0.0
    max_wait_s: float | None = 0.0
    id: str = ""


class LeaseView(msgspec.Struct, frozen=True, omit_defaults=True):
    """A lease as people see it; `expires_in_s` is the hub's estimate, the sites decide.

    Attributes:
        waits_for: what is in the way of a lease that waits.
        starts_in_s: when it starts at the earliest, None where that cannot be said.
        ahead: requests that come before it.
        forbidden: {site: why its policy forbids it}, before anything is asked.
    """

    lease: Lease
    expires_in_s: float | None
    silent_sites: dict[str, str] = {}
    waits_for: str = ""
    starts_in_s: float | None = None
    ahead: int = 0
    forbidden: dict[str, str] = {}


class LeaseAwaited(msgspec.Struct, frozen=True):
    """lease.wait -> LeaseView: once the lease is in another state than this, or after `wait_s`."""

    id: str
    state: str
    wait_s: float


class LeaseRenewal(msgspec.Struct, frozen=True):
    """lease.renew -> LeaseView."""

    id: str
    duration_s: float


class LeaseEnding(msgspec.Struct, frozen=True):
    """lease.revoke -> LeaseView: with a reason, and a grace in which its jobs are told."""

    id: str
    reason: str
    grace_s: float = 0.0


class LeaseSize(msgspec.Struct, frozen=True):
    """lease.resize -> LeaseView: devices over all sites, within what was asked for."""

    id: str
    gpus: int


class LeaseOffer(msgspec.Struct, frozen=True):
    """lease.offer, lease.accept -> LeaseView: to another tenant, with both sides' consent."""

    id: str
    tenant: str


class TenantView(msgspec.Struct, frozen=True):
    """A tenant and what it holds."""

    tenant: Tenant
    gpus_held: int
    gpus_borrowed: int
    device_hours: float


class TenantNamed(msgspec.Struct, frozen=True):
    """tenant.show, tenant.remove."""

    name: str


class CordonWanted(msgspec.Struct, frozen=True):
    """site.cordon, site.uncordon -> CordonState: a node, a device, or with `what` empty the whole site."""

    site: str
    what: str = ""
    reason: str = ""


class CordonState(msgspec.Struct, frozen=True):
    """What a site does not grant, and why."""

    site: str
    cordons: dict[str, str]


class PolicyText(msgspec.Struct, frozen=True):
    """site.policy -> a site's policy, TOML; "" where everything is allowed."""

    text: str


class RunWanted(msgspec.Struct, frozen=True, omit_defaults=True):
    """fed.run -> RunView: a plan's text, and the upload that holds its initial parameters.

    Attributes:
        id: of the run, chosen by who asks; "" lets the hub choose.
        lease: what is to be leased for it, as the plan says.
        renew_for_s: how long from now on the hub may renew that lease.
    """

    plan: str
    initial: str
    id: str = ""
    lease: LeaseWanted | None = None
    renew_for_s: float = 0.0


class RunAgain(msgspec.Struct, frozen=True, omit_defaults=True):
    """fed.resume -> RunView: with a new lease, where the old one is over; its fields are as in `RunWanted`."""

    id: str
    plan: str = ""
    lease: LeaseWanted | None = None
    renew_for_s: float = 0.0


class Upload(msgspec.Struct, frozen=True):
    """upload -> UploadState: a piece of a file the hub is to keep."""

    id: str
    offset: int
    data: bytes
    last: bool = False


class UploadState(msgspec.Struct, frozen=True):
    """How much of an upload the hub has."""

    size: int


class BestModel(msgspec.Struct, frozen=True):
    """The best model of a run so far: the round that made it, and its metric."""

    model: int
    metric: str
    value: float


class RunView(msgspec.Struct, frozen=True):
    """A run as people see it.

    Attributes:
        round: the last finished one.
        rounds: of training and of evaluation, when nothing ends it early.
        best: by what its plan calls the best, or None.
    """

    id: str
    name: str
    tenant: str
    state: str
    round: int
    rounds: int
    lease: str
    sites: list[str]
    reason: str = ""
    history: list[dict[str, Any]] = []
    request: Signed | None = None
    best: BestModel | None = None


class EventsWanted(msgspec.Struct, frozen=True):
    """fed.events -> Events: what happened in a run after event `after`, waiting up to `wait_s` for something new."""

    id: str
    after: int
    wait_s: float


class Events(msgspec.Struct, frozen=True):
    """Events of a run, in order; `next` is the number to ask after."""

    items: list[dict[str, Any]]
    next: int
    state: str


class ModelWanted(msgspec.Struct, frozen=True):
    """fed.model -> ModelPiece: bytes of a round's global parameters (round 0 is where the run began)."""

    id: str
    offset: int
    size: int
    round: int | None = None


class ModelPiece(msgspec.Struct, frozen=True):
    """A piece of a safetensors file and the length and hash of the whole."""

    data: bytes
    size: int
    sha256: str
    round: int


class HubView(msgspec.Struct, frozen=True):
    """fed.hub_view -> what the hub holds of one site's latest vector: masked words, as an auditor may look at them."""

    site: str
    round: int
    words: list[int]


class LedgerAsked(msgspec.Struct, frozen=True):
    """ledger.head -> LedgerHead; the hub passes it on to the site."""

    site: str


class LedgerHead(msgspec.Struct, frozen=True):
    """How far a site's ledger has come: a checkpoint that covers everything it had decided when it was asked.

    Attributes:
        note: the signed checkpoint.
        key: of who signed it, as verifiers of other people read it.
        witnessed: the latest checkpoint that other sites have cosigned, with their signatures; b"" before the first.
    """

    site: str
    note: bytes
    key: str
    witnessed: bytes = b""


class WitnessWanted(msgspec.Struct, frozen=True):
    """ledger.witness -> Cosigned: another site's checkpoint, and the proof that it continues what was cosigned before.

    Attributes:
        site: whose ledger.
        note: its signed checkpoint.
        old: the size that was cosigned last, as far as is known.
        proof: of consistency from `old` on.
    """

    site: str
    note: bytes
    old: int
    proof: list[bytes]


class Cosigned(msgspec.Struct, frozen=True):
    """A cosignature's line; "" where the proof has to begin at another size, which is told."""

    line: str
    size: int


class WitnessedCheckpoint(msgspec.Struct, frozen=True):
    """ledger.witnessed: a site's own checkpoint with the cosignatures that were gathered for it."""

    note: bytes


class SeenCheckpoints(msgspec.Struct, frozen=True):
    """ledger.seen -> {site: the checkpoint that this site cosigned last, as the site signed it}."""

    notes: dict[str, bytes]


class LedgerGrew(msgspec.Struct, frozen=True):
    """site -> hub: there is a new checkpoint to be witnessed."""

    size: int


class RecordsWanted(msgspec.Struct, frozen=True):
    """ledger.records -> RecordsPage: at most so many records of a site's ledger, from number `first` on."""

    site: str
    first: int
    count: int


class RecordsPage(msgspec.Struct, frozen=True):
    """Records as they were written, as many as one answer takes; none where there are no more."""

    records: list[bytes]


class ProofWanted(msgspec.Struct, frozen=True):
    """ledger.proof -> LedgerProof: that record `index` is among the first `size`, or else that the first `old` of them stayed."""

    site: str
    size: int
    index: int | None = None
    old: int = 0


class LedgerProof(msgspec.Struct, frozen=True):
    """The hashes of a proof (RFC 9162, 2.1.3 and 2.1.4)."""

    hashes: list[bytes]


# --- hub -> site ---------------------------------------------------------------------------------------------------------


class DescriptionWanted(msgspec.Struct, frozen=True):
    """site.describe: a hub of this term wants to know everything; the site obeys no earlier one from then on.

    Attributes:
        known: {lease: version of the latest report, 0 for none} of those that the hub takes to live at this site.
    """

    term: int
    known: dict[str, int] = {}


class SiteDescription(msgspec.Struct, frozen=True):
    """site.describe -> what the site has and who holds it.

    Attributes:
        leases: every lease that lives, and what has become of those that the hub takes to live, so that it can compare.
        known: as asked; what is not described of it the site knows nothing of.
        cordons: {node, device or "" for the site: why nothing new is granted there}.
        tasks: {lease: run} of the programs that run now.
        boottime: the site's clock, against which deadlines are to be read.
        certificate_until: when its certificate ends, Unix seconds; 0 where it has none.
        certificate_authority: fingerprint of who issued it.
        roster: number of the roster it goes by.
        policy: text of its policy, "" where everything is allowed.
        tenants: digest of what operators have signed about tenants, as far as it knows.
    """

    name: str
    identity: bytes
    software: str
    inventory: Inventory
    leases: list[SiteLease]
    tasks: dict[str, str]
    recovering: bool
    epoch: int
    boottime: float
    cordons: dict[str, str] = {}
    known: dict[str, int] = {}
    certificate_until: int = 0
    certificate_authority: str = ""
    roster: int = 0
    policy: str = ""
    tenants: str = ""


class TaskWanted(msgspec.Struct, frozen=True):
    """task.start -> Nothing: start the tenant's program under an active lease (again, if it is already there: nothing).

    Attributes:
        run: id of the federation's run.
        lease: the lease it is bound to.
        token: fencing token of its devices.
        program: program and arguments; `{data}`, `{site}` and `{python}` are filled in by the site.
        plan: SHA-256 of the plan.
        config: arbitrary values the program may read.
        request: what the tenant has signed.
    """

    run: str
    lease: str
    token: int
    program: list[str]
    plan: bytes
    config: dict[str, Any] = {}
    request: Signed | None = None


class TaskEnded(msgspec.Struct, frozen=True):
    """task.stop: the run is over here."""

    run: str
    reason: str


class LeaseNotice(msgspec.Struct, frozen=True):
    """site -> hub: a lease changed at the site by itself (expired, or its processes are gone)."""

    lease: SiteLease


# --- program -> site -----------------------------------------------------------------------------------------------------


class Joined(msgspec.Struct, frozen=True):
    """program.join -> who and where the program is."""

    site: str
    run: str
    config: dict[str, Any]


class NextRound(msgspec.Struct, frozen=True):
    """program.next -> a round to train or to evaluate, or the end.

    Attributes:
        round: number, or 0 at the end.
        parameters: path of a safetensors file with the global parameters.
        update: path where the program's parameters belong.
        reason: at the end, why.
        kind: `train` or `evaluate`.
        step: 1, 2, …: the round of training this is, or the one after which this evaluates.
        config: the program's configuration in it.
    """

    round: int
    parameters: str = ""
    update: str = ""
    reason: str = ""
    kind: str = "train"
    step: int = 1
    config: dict[str, Any] = {}


class Submission(msgspec.Struct, frozen=True):
    """program.submit -> Nothing: the update is written, or there is none because the round evaluates."""

    round: int
    weight: int
    metrics: dict[str, float]
