"""Which sites mask with which: everybody with everybody in small cohorts, a sparse graph in large ones.

Up to 32 sites the graph is complete. Above, it is a Harary graph (a ring in which every site is joined to its k/2 nearest on
either side) over an order that follows from the hash of all round keys, so that nobody can choose its neighbours beforehand.
Degree and share threshold are computed for a stated share of corrupted and of lost sites, after Bell, Bonawitz, Gascon, Lepoint
and Raykova, Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, CCS 2020, section 3: with n sites of which c are
corrupted and d are lost, a site's neighbours are a uniform sample of k of the n - 1 others, hence

    secrecy       n * P[at least t of the k are corrupted]        <= 2^-security_bits
    connection    n * P[k/2 sites in a row are corrupted or lost] <= 2^-security_bits
    completeness  n * P[fewer than t of the k are left]           <= 2^-completeness_bits

The tails are hypergeometric and computed, not bounded by a formula. An adversary who can try G sets of round keys before the
round gains a factor of G.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from fedpool.secagg import transcript

COMPLETE_UP_TO = 32
SECURITY_BITS = 40
COMPLETENESS_BITS = 20
# The quorum of signatures on the survivors holds against fewer than a third; the graph is chosen for the same.
CORRUPTED = 1 / 3
LOST = 0.1


class Graph(msgspec.Struct, frozen=True):
    """The graph of a cohort's size, and what was proved of it.

    Attributes:
        cohort: number of sites.
        degree: neighbours of a site; 0 for a complete graph.
        share_threshold: shares that rebuild a secret.
        secrecy_bits, connection_bits, completeness_bits: -log2 of the three probabilities; infinite where it cannot happen.
    """

    cohort: int
    degree: int
    share_threshold: int
    secrecy_bits: float = math.inf
    connection_bits: float = math.inf
    completeness_bits: float = math.inf


def _choose(n: int, k: int) -> float:
    """log2 of a binomial coefficient."""
    if not 0 <= k <= n:
        return -math.inf
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def _tail(population: int, marked: int, drawn: int, least: int) -> float:
    """log2 of the probability that at least so many of those drawn are marked (hypergeometric)."""
    terms = [
        _choose(marked, x) + _choose(population - marked, drawn - x) - _choose(population, drawn)
        for x in range(max(least, 0), min(drawn, marked) + 1)
    ]
    largest = max(terms, default=-math.inf)
    if largest == -math.inf:
        return largest
    return min(0.0, largest + math.log2(sum(2.0 ** (term - largest) for term in terms)))


def _bits(cohort: int, log_probability: float) -> float:
    return -(log_probability + math.log2(cohort))


def bounds(cohort: int, degree: int, threshold: int, corrupted: float = CORRUPTED, lost: float = LOST) -> Graph:
    """What holds for a Harary graph of that degree.

    Args:
        cohort: number of sites.
        degree: even, under cohort - 1.
        threshold: shares that rebuild a secret.
        corrupted: share of the sites that collude with the hub.
        lost: share of the sites that drop out.
    """
    bad, gone = math.floor(corrupted * cohort), math.floor(lost * cohort)
    half = degree // 2
    row = _choose(cohort - half, bad + gone - half) - _choose(cohort, bad + gone)
    return Graph(
        cohort,
        degree,
        threshold,
        _bits(cohort, _tail(cohort - 1, bad, degree, threshold)),
        _bits(cohort, row),
        _bits(cohort, _tail(cohort - 1, gone, degree, degree - threshold + 1)),
    )


def choose(cohort: int, complete_threshold: int, corrupted: float = CORRUPTED, lost: float = LOST) -> Graph:
    """The sparsest graph for which all three bounds hold; complete where it must be.

    Args:
        cohort: number of sites.
        complete_threshold: shares that rebuild a secret in a complete graph.
        corrupted: share of the sites that collude with the hub.
        lost: share of the sites that drop out.
    """
    if cohort > COMPLETE_UP_TO:
        for degree in range(4, cohort - 1, 2):
            for threshold in range(degree // 2, degree + 1):
                found = bounds(cohort, degree, threshold, corrupted, lost)
                if min(found.secrecy_bits, found.connection_bits) >= SECURITY_BITS:
                    if found.completeness_bits >= COMPLETENESS_BITS:
                        return found
                    break  # more shares would only be lost more often
    return Graph(cohort, 0, complete_threshold)


def order(context: bytes, members: Sequence[int]) -> list[int]:
    """The members in the order of the ring: sorted by a hash of the round's keys and the index.

    Args:
        context: digest of manifest and all public keys of the round.
        members: indices of the sites with keys.
    """
    return sorted(members, key=lambda index: transcript.digest(transcript.LABEL_GRAPH, context, transcript.u32(index)))


def neighbours(ring: Sequence[int], degree: int, index: int) -> list[int]:
    """The sites that share a mask with this one, ascending.

    Args:
        ring: members in the order of the ring.
        degree: 0 for a complete graph, otherwise even.
        index: the site.
    """
    count = len(ring)
    if not degree or degree >= count - 1:
        return sorted(i for i in ring if i != index)
    place = ring.index(index)
    return sorted(ring[(place + step) % count] for half in range(1, degree // 2 + 1) for step in (half, -half))
