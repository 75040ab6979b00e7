"""What a round is: the one record whose digest every key, mask, share and signature of that round is bound to.

A hub that shows two sites different manifests, models or cohorts gets masks that do not cancel.
"""

import msgspec

from fedpool.errors import Forbidden, UsageError
from fedpool.secagg import transcript
from fedpool.secagg.encoding import RING_BITS, FixedPoint, fit

VERSION = 1
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


class Manifest(msgspec.Struct, frozen=True):
    """A round, as every party binds it.

    Attributes:
        federation: id of the run.
        round: 1, 2, … within the run.
        attempt: 1, 2, … of that round; a round that failed before anything was released may be tried again.
        plan: SHA-256 of the plan.
        model: SHA-256 of the parameters the round starts from, as the site must find them on its own disk.
        participants: the cohort, ordered by index.
        threshold: shares needed to rebuild a secret, and signatures needed on the survivors.
        minimum_cohort: fewest survivors whose sum may be revealed.
        parameters: number of real values in the update.
        metrics: names of the values reported beside it.
        clip: clipping range of an update's values.
        metric_range: clipping range of a metric.
        max_weight: largest sample count of a site.
    """

    federation: str
    round: int
    attempt: int
    plan: bytes
    model: bytes
    participants: tuple[Participant, ...]
    threshold: int
    minimum_cohort: int
    parameters: int
    metrics: tuple[str, ...]
    clip: float
    metric_range: float
    max_weight: int
    ring_bits: int = RING_BITS
    version: int = VERSION
    suite: str = SUITE

    @property
    def words(self) -> int:
        """Length of the masked vector: parameters, the weight, the metrics."""
        return self.parameters + 1 + len(self.metrics)

    @property
    def quorum(self) -> int:
        """Fewest sites with which the round may go on."""
        return max(self.threshold, self.minimum_cohort)

    def participant(self, index: int) -> Participant:
        """The participant with this index."""
        return self.participants[index - 1]

    def parameter_encoding(self) -> FixedPoint:
        """Fixed point of the update's values."""
        return fit(self.clip, self.max_weight, len(self.participants))

    def metric_encoding(self) -> FixedPoint:
        """Fixed point of the metrics."""
        return fit(self.metric_range, self.max_weight, len(self.participants))

    def digest(self) -> bytes:
        """The hash that stands for this round everywhere (HM in the specification)."""
        t = transcript
        parts = [t.u32(self.version), self.suite.encode(), self.federation.encode(), t.u64(self.round)]
        parts += [t.u64(self.attempt), self.plan, self.model, t.u32(self.threshold), t.u32(self.minimum_cohort)]
        parts += [t.u32(self.ring_bits), t.u64(self.parameters), t.f64(self.clip), t.f64(self.metric_range)]
        parts += [t.u64(self.max_weight), t.u32(len(self.metrics)), *(name.encode() for name in self.metrics)]
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
        if self.ring_bits != RING_BITS:
            raise UsageError(f"a ring of {self.ring_bits} bits is not supported", f"use {RING_BITS}")
        if self.parameters < 0 or self.words > 1 << 40:
            raise UsageError(f"a vector of {self.words} words is not possible")
        self.parameter_encoding()
        self.metric_encoding()


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
