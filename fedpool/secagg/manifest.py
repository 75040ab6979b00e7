"""What a round is: the one record whose digest every key, mask, share and signature of that round is bound to.

A hub that shows two sites different manifests, models or cohorts gets masks that do not cancel.
"""

import math

import msgspec

from fedpool.errors import Forbidden, UsageError
from fedpool.secagg import graph, transcript, vector
from fedpool.secagg.encoding import FixedPoint, fit
from fedpool.secagg.vector import VectorLayout

VERSION = 2
RING_BITS = 32
PARAMETERS_MAX = 1 << 40
SUITE = "x25519+mlkem768/aes256ctr/ed25519"


class Participant(msgspec.Struct, frozen=True):
    """One site of a cohort.

    Attributes:
        index: 1 to n, in the order of the cohort; also its x coordinate in secret sharing.
        name: the site's name.
        identity: its Ed25519 public key, 32 bytes.
    """

    index: int
    name: str
    identity: bytes


class ValueRange(msgspec.Struct, frozen=True):
    """So many values of the vector, one after the other, with one clipping range: [-clip, clip]."""

    values: int
    clip: float


class Manifest(msgspec.Struct, frozen=True):
    """A round, as every party binds it.

    Attributes:
        federation: id of the run.
        round: 1, 2, … within the run.
        attempt: 1, 2, … of that round; a round that failed before anything was released may be tried again.
        plan: SHA-256 of the plan.
        model: SHA-256 of the parameters the round starts from, as the site must find them on its own disk.
        participants: the cohort, ordered by index.
        threshold: signatures needed on the survivors.
        share_threshold: shares needed to rebuild a secret; the threshold in a complete graph.
        degree: neighbours with which a site shares masks; 0: everybody (see `graph`).
        minimum_cohort: fewest survivors whose sum may be revealed.
        parameters: number of real values in the update.
        metrics: names of the values reported beside it.
        ranges: clipping ranges of the update's values, in their order; they cover all of them.
        metric_range: clipping range of a metric.
        max_weight: largest sample count of a site.
        norm_clip: largest Euclidean norm of an update, scaled down by the site before it is encoded; 0: any.
        exclude: patterns of tensors that are no part of the vector.
        ring_bits: width of the ring.
    """

    federation: str
    round: int
    attempt: int
    plan: bytes
    model: bytes
    participants: tuple[Participant, ...]
    threshold: int
    share_threshold: int
    degree: int
    minimum_cohort: int
    parameters: int
    metrics: tuple[str, ...]
    ranges: tuple[ValueRange, ...]
    metric_range: float
    max_weight: int
    norm_clip: float = 0.0
    exclude: tuple[str, ...] = ()
    ring_bits: int = RING_BITS
    version: int = VERSION
    suite: str = SUITE

    @property
    def vector(self) -> VectorLayout:
        """How a masked vector lies in its file."""
        return vector.layout(self.ring_bits, self.parameters, len(self.metrics))

    @property
    def quorum(self) -> int:
        """Fewest sites with which the round may go on."""
        return max(self.threshold, self.minimum_cohort)

    def participant(self, index: int) -> Participant:
        """The participant with this index."""
        return self.participants[index - 1]

    def value_encoding(self, clip: float) -> FixedPoint:
        """Fixed point of values with this clipping range."""
        return fit(clip, self.max_weight, len(self.participants), self.ring_bits)

    def metric_encoding(self) -> FixedPoint:
        """Fixed point of the metrics."""
        return fit(self.metric_range, self.max_weight, len(self.participants), vector.TAIL_BITS)

    def digest(self) -> bytes:
        """The hash that stands for this round everywhere (HM in the specification)."""
        t = transcript
        parts = [t.u32(self.version), self.suite.encode(), self.federation.encode(), t.u64(self.round)]
        parts += [t.u64(self.attempt), self.plan, self.model, t.u32(self.threshold), t.u32(self.share_threshold)]
        parts += [t.u32(self.degree), t.u32(self.minimum_cohort), t.u32(self.ring_bits), t.u64(self.parameters)]
        parts += [t.f64(self.metric_range), t.u64(self.max_weight), t.f64(self.norm_clip)]
        parts += [t.u32(len(self.metrics)), *(name.encode() for name in self.metrics)]
        parts += [t.u32(len(self.exclude)), *(pattern.encode() for pattern in self.exclude)]
        parts += [t.u32(len(self.ranges)), *(t.u64(r.values) + t.f64(r.clip) for r in self.ranges)]
        for site in self.participants:
            parts += [t.u32(site.index), site.name.encode(), site.identity]
        return t.digest_list(t.LABEL_MANIFEST, parts)

    def validate(self) -> None:
        """Refuse a manifest that no honest party would make.

        Raises:
            UsageError: naming the field, the value and the limit.
        """
        n = len(self.participants)
        if self.version != VERSION or self.suite != SUITE:
            raise UsageError(
                f"round protocol version {self.version} with suite {self.suite!r} is not spoken here",
                f"this side speaks version {VERSION} with {SUITE!r}: bring both sides to one release",
            )
        if [site.index for site in self.participants] != list(range(1, n + 1)):
            raise UsageError("the cohort's indices are not 1 to n in order")
        if len({site.name for site in self.participants}) < n or len({s.identity for s in self.participants}) < n:
            raise UsageError("the cohort names a site or an identity key twice")
        if not n // 2 < self.threshold <= n:
            raise UsageError(
                f"threshold {self.threshold} with {n} sites: two disjoint groups could each rebuild secrets",
                f"the threshold may be {n // 2 + 1} to {n}; the usual one is {default_threshold(n)}",
            )
        if not 2 <= self.minimum_cohort <= n:
            raise UsageError(f"minimum cohort {self.minimum_cohort} with {n} sites: it may be 2 to {n}")
        if not 0 <= self.parameters <= PARAMETERS_MAX:
            raise UsageError(f"a vector of {self.parameters} values; the limit is {PARAMETERS_MAX}")
        if any(r.values < 1 for r in self.ranges) or sum(r.values for r in self.ranges) != self.parameters:
            raise UsageError(f"the clipping ranges do not cover the {self.parameters} values of the update")
        if not (math.isfinite(self.norm_clip) and self.norm_clip >= 0):
            raise UsageError(f"norm_clip {self.norm_clip} is not a positive number")
        for clip in {r.clip for r in self.ranges}:
            self.value_encoding(clip)
        self.metric_encoding()
        self._validate_graph()

    def _validate_graph(self) -> None:
        n = len(self.participants)
        if not self.degree:
            if self.share_threshold != self.threshold:
                raise UsageError(f"share threshold {self.share_threshold} in a complete graph: it is {self.threshold}")
            return
        if self.degree % 2 or not 2 < self.degree < n - 1:
            raise UsageError(f"a graph of degree {self.degree} with {n} sites: it is even and under {n - 1}")
        if not self.degree // 2 <= self.share_threshold <= self.degree:
            raise UsageError(
                f"share threshold {self.share_threshold} with {self.degree} neighbours: "
                f"it may be {self.degree // 2} to {self.degree}"
            )
        found = graph.bounds(n, self.degree, self.share_threshold)
        bits = max(0.0, min(found.secrecy_bits, found.connection_bits))
        if bits < graph.SECURITY_BITS:
            raise UsageError(
                f"a graph of degree {self.degree} with share threshold {self.share_threshold} keeps the updates of {n} "
                f"sites secret but for 2^-{bits:.0f}; 2^-{graph.SECURITY_BITS} is demanded",
                f"the usual one has degree {graph.choose(n, self.threshold).degree}",
            )


def default_threshold(cohort: int) -> int:
    """More than two thirds: with fewer than a third colluding, no two survivor lists can both gather the signatures."""
    return 2 * cohort // 3 + 1


class SitePolicy(msgspec.Struct, frozen=True):
    """What a site demands of any round, whatever a plan or a hub says.

    Attributes:
        name: this site.
        identity: its Ed25519 public key.
        peers: {site name: identity key} of the sites it is willing to be in a cohort with.
        minimum_cohort: fewest sites whose sum may be revealed.
    """

    name: str
    identity: bytes
    peers: dict[str, bytes]
    minimum_cohort: int = 3

    def admit(self, manifest: Manifest, last_released: int) -> int:
        """Check a manifest against this policy and return this site's index in it.

        Args:
            manifest: the round proposed.
            last_released: the last round of that federation for which this site released shares, or 0.

        Raises:
            UsageError: the manifest is malformed.
            Forbidden: this site does not take part; the message says why.
        """
        manifest.validate()
        own = 0
        for site in manifest.participants:
            if site.name == self.name:
                own = site.index
                known: bytes | None = self.identity
            else:
                known = self.peers.get(site.name)
            if known is None:
                raise Forbidden(
                    f"{self.name} does not know {site.name}, which the round names as a member",
                    f"add {site.name}'s identity key to {self.name}'s peer list if it may be trusted",
                )
            if known != site.identity:
                raise Forbidden(
                    f"the round names another identity key for {site.name} than {self.name} knows",
                    "compare fingerprints by another way: either the peer list is old or the hub is not honest",
                )
        if not own:
            raise Forbidden(f"{self.name} is not a member of this round")
        if manifest.minimum_cohort < self.minimum_cohort:
            raise Forbidden(
                f"minimum cohort {manifest.minimum_cohort} is under the {self.minimum_cohort} that {self.name} demands",
                f"set minimum_cohort = {self.minimum_cohort} in the plan or leave {self.name} out",
            )
        if manifest.round <= last_released:
            raise Forbidden(
                f"{self.name} has already released its shares for round {last_released} of {manifest.federation}",
                "a second sum over another set of sites would reveal one site's update; start the next round",
            )
        return own
