"""A plan: what `ibshell fed run plan.toml` reads. Errors name the file's line, the key, the value and the remedy."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from fedpool.errors import IbshellError, PlanError, UsageError
from fedpool.federation import schedule, strategies
from fedpool.federation.schedule import Best, Change, Evaluation, Stragglers
from fedpool.federation.strategies import FedProx, Strategy
from fedpool.names import NAME, RULE
from fedpool.secagg import encoding, graph, ring
from fedpool.secagg.graph import Graph
from fedpool.secagg.manifest import default_threshold
from fedpool.toml import TomlText
from fedpool.units import parse_duration
from fedpool.wire.messages import LeaseWanted


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A federated training.

    Attributes:
        name: of the run, for people.
        tenant: who holds the lease.
        program: program and arguments; each site fills in `{data}`, `{site}`, `{python}`.
        initial: safetensors file with the parameters to begin with, beside the plan.
        rounds: how many.
        sites: how many sites, or which.
        gpus_per_site: devices leased at each.
        gpu_type: or None for any.
        minimum_cohort: fewest sites whose sum may be revealed.
        threshold: shares needed to rebuild a secret; None: more than two thirds.
        clip: range of an update's values (trained minus global); what exceeds it is clipped.
        ranges: {pattern of tensor names: clip} where another one is wanted; the first that fits counts.
        norm_clip: largest Euclidean norm of an update; its site scales it down to that before it is masked; 0: any.
        exclude: patterns of tensors that are not averaged and keep their global value.
        buffers: patterns of tensors that are averaged but not moved by the strategy, beside running_mean and running_var.
        ring_bits: width of the ring, 16, 24, 32 or 64: bytes up for each parameter times eight.
        levels: steps over [-clip, clip] that must survive whatever a site's weight; 0 demands none.
        lost_sites: share of a large cohort that may drop out without ending the round; the graph is chosen for it.
        max_weight: largest sample count of a site.
        metrics: names of the values every site reports with its update.
        metric_range: range of a metric.
        strategy: what is done with the aggregate.
        strategy_options: its numbers.
        deadline: longest a round may wait for its sites.
        lease: length of the lease; it is renewed while the run lasts.
        config: arbitrary values for the program.
        schedule: what of them changes, and from which round of training on.
        evaluation: when the sites evaluate the global parameters, or None for never.
        best: which model is kept as the best, and when the run ends early.
        sample: sites that train in a round, drawn anew each time: a number, or a share of those that are ready.
        stragglers: when a round goes on without the slow ones; None: at its deadline.
        data_tags: of the data that is used, which sites' policies go by.
    """

    name: str
    tenant: str
    program: list[str]
    initial: str
    rounds: int
    sites: int | list[str]
    gpus_per_site: int = 1
    gpu_type: str | None = None
    minimum_cohort: int = 3
    threshold: int | None = None
    clip: float = 1.0
    ranges: dict[str, float] = {}
    norm_clip: float = 0.0
    exclude: list[str] = []
    buffers: list[str] = []
    ring_bits: int = 32
    levels: int = 0
    lost_sites: float = graph.LOST
    max_weight: int = 1000
    metrics: list[str] = []
    metric_range: float = 16.0
    strategy: str = "fedavg"
    strategy_options: dict[str, Any] = {}
    deadline: str = "10m"
    lease: str = "1h"
    config: dict[str, Any] = {}
    schedule: list[Change] = []
    evaluation: Evaluation | None = None
    best: Best | None = None
    sample: int | float = 1.0
    stragglers: Stragglers | None = None
    data_tags: list[str] = []

    @property
    def cohort(self) -> int:
        """Number of sites."""
        return self.sites if isinstance(self.sites, int) else len(self.sites)

    @property
    def deadline_s(self) -> float:
        """Longest a round may wait for its sites, seconds."""
        return parse_duration(self.deadline)

    @property
    def lease_s(self) -> float:
        """Length of the lease, seconds."""
        return parse_duration(self.lease)

    def lease_wanted(self, lease: str, sites: Sequence[str] = ()) -> LeaseWanted:
        """What is leased for it.

        Args:
            lease: id.
            sites: where it runs already, for a run that goes on.
        """
        return LeaseWanted(
            tenant=self.tenant,
            gpus=self.cohort * self.gpus_per_site,
            duration_s=self.lease_s,
            sites=self.cohort,
            site_names=list(sites) or (self.sites if isinstance(self.sites, list) else []),
            gpu_type=self.gpu_type,
            id=lease,
        )

    @property
    def longest_s(self) -> float:
        """How long it may take at most, seconds: every round up to its deadline, and the lease that is left then."""
        return self.all_rounds * self.deadline_s + self.lease_s

    @property
    def all_rounds(self) -> int:
        """Rounds of training and of evaluation, when nothing ends it early."""
        return schedule.total(self.rounds, self.evaluation)

    def optimiser(self) -> Strategy:
        """What makes the next global parameters of an aggregate.

        Raises:
            UsageError: the strategy is unknown, cannot work here, or an option is wrong.
        """
        return strategies.named(self.strategy, self.strategy_options)

    def settings(self, step: int = 1) -> dict[str, Any]:
        """What the program gets as its configuration in the round of training `step`, 1, 2, …."""
        strategy = self.optimiser()
        own = {"proximal_mu": strategy.proximal_mu} if isinstance(strategy, FedProx) else {}
        return {**schedule.config(self.config, self.schedule, step), **own}

    def graph(self, cohort: int) -> Graph:
        """Which sites mask with which in a cohort of this size."""
        return graph.choose(cohort, self.threshold_for(cohort), lost=self.lost_sites)

    def threshold_for(self, cohort: int) -> int:
        """Shares needed with this many sites; never under half, which the protocol forbids."""
        wanted = default_threshold(cohort) if self.threshold is None else self.threshold
        return max(min(wanted, cohort), cohort // 2 + 1)


def digest(text: str) -> bytes:
    """The hash that stands for a plan in every round's manifest."""
    return hashlib.sha256(text.encode()).digest()


def parse(text: str, where: str = "the plan") -> Plan:
    """Read a plan.

    Args:
        text: TOML.
        where: what to call it in messages.

    Raises:
        PlanError: not TOML, or a key is missing, unknown or wrong; line and key are named.
    """
    toml = TomlText(text, where, PlanError)
    plan = toml.convert(Plan, _HINTS)
    for problem in _problems(plan) or _problems_of_tables(plan):
        raise toml.wrong(problem.key, problem.message, _HINTS.get(problem.key, ""), problem.table, problem.number)
    return plan


class _Problem(NamedTuple):
    """A key whose value cannot work: of the plan, of a table, or of the table with this index among those of its name."""

    key: str
    message: str
    table: str = ""
    number: int = 0


def _problems(plan: Plan) -> list[_Problem]:
    """Every key of the plan itself whose value cannot work, with the value and the limit."""
    found: list[_Problem] = []

    def need(key: str, good: bool, message: str) -> None:
        if not good:
            found.append(_Problem(key, message))

    for key, value in (("name", plan.name), ("tenant", plan.tenant)):
        need(key, bool(NAME.fullmatch(value)), f"{key} = {value!r} is no name: {RULE}")
    need("program", bool(plan.program), "program is empty")
    need("rounds", 1 <= plan.rounds <= 1_000_000, f"rounds = {plan.rounds}: it may be 1 to 1000000")
    need("sites", plan.cohort >= 2, f"sites = {plan.sites}: secure aggregation needs two or more")
    if isinstance(plan.sites, list):
        need("sites", len(set(plan.sites)) == len(plan.sites), "sites names a site twice")
    need("gpus_per_site", plan.gpus_per_site >= 1, f"gpus_per_site = {plan.gpus_per_site}: at least 1")
    need(
        "minimum_cohort",
        2 <= plan.minimum_cohort <= plan.cohort,
        f"minimum_cohort = {plan.minimum_cohort}: it may be 2 to {plan.cohort}, the number of sites",
    )
    if plan.threshold is not None:
        low = plan.cohort // 2 + 1
        need(
            "threshold",
            low <= plan.threshold <= plan.cohort,
            f"threshold = {plan.threshold}: with {plan.cohort} sites it may be {low} to {plan.cohort}",
        )
    need("metrics", len(set(plan.metrics)) == len(plan.metrics), "metrics names one twice")
    need("ring_bits", plan.ring_bits in ring.WIDTHS, f"ring_bits = {plan.ring_bits}: it may be 16, 24, 32 or 64")
    need("levels", plan.levels == 0 or plan.levels >= 2, f"levels = {plan.levels}: it may be 2 or more, or 0 for any")
    need("lost_sites", 0 <= plan.lost_sites < 1 / 3, f"lost_sites = {plan.lost_sites}: it may be 0 to a third")
    need(
        "norm_clip",
        math.isfinite(plan.norm_clip) and plan.norm_clip >= 0,
        f"norm_clip = {plan.norm_clip}: it may be 0 or more",
    )
    try:
        plan.optimiser()
    except UsageError as error:
        found.append(_Problem("strategy_options" if "option" in error.message else "strategy", str(error)))
    for key, value in (("deadline", plan.deadline), ("lease", plan.lease)):
        try:
            parse_duration(value)
        except UsageError as error:
            found.append(_Problem(key, f"{key} = {error.message}"))
    need("sample", _is_share(plan.sample), f"sample = {plan.sample}: {_SHARE}")
    positive = [("clip", "clip", plan.clip), ("metric_range", "metric_range", plan.metric_range)]
    positive += [("ranges", f"ranges: {pattern!r}", value) for pattern, value in plan.ranges.items()]
    for key, what, limit in positive:
        need(key, math.isfinite(limit) and limit > 0, f"{what} = {limit}: a positive number is needed")
    if not found:
        found += _without_room(plan)
    return found


_SHARE = "it may be a number of sites, 1 or more, or a share of them, over 0 to 1.0"


def _is_share(value: float) -> bool:
    return value >= 1 if isinstance(value, int) else 0 < value <= 1


def _problems_of_tables(plan: Plan) -> list[_Problem]:
    """Every key of a table whose value cannot work."""
    found: list[_Problem] = []

    def need(table: str, key: str, good: bool, message: str, number: int = 0) -> None:
        if not good:
            found.append(_Problem(key, f"{table}: {message}", table, number))

    if (evaluation := plan.evaluation) is not None:
        named = evaluation.metrics
        need("evaluation", "metrics", bool(named), "metrics is empty: an evaluation reports one or more")
        need("evaluation", "metrics", len(set(named)) == len(named), "metrics names one twice")
        need("evaluation", "every", evaluation.every >= 1, f"every = {evaluation.every}: it may be 1 or more")
    if (best := plan.best) is not None:
        known = [*(evaluation.metrics if evaluation else []), *plan.metrics]
        says = f"metric = {best.metric!r} is none of the plan's: {', '.join(known) or 'it has none'}"
        need("best", "metric", best.metric in known, says)
        need("best", "mode", best.mode in ("min", "max"), f'mode = {best.mode!r}: it may be "min" or "max"')
        need("best", "patience", best.patience >= 0, f"patience = {best.patience}: it may be 0 or more")
        good = math.isfinite(best.min_delta) and best.min_delta >= 0
        need("best", "min_delta", good, f"min_delta = {best.min_delta}: it may be 0 or more")
    before = 0
    for number, change in enumerate(plan.schedule):
        good = before < change.first <= plan.rounds
        says = f"from = {change.first}: it may be {before + 1} to {plan.rounds}, and they ascend"
        need("schedule", "from", good, says, number)
        before = change.first
    if (slow := plan.stragglers) is not None:
        need("stragglers", "enough", _is_share(slow.enough), f"enough = {slow.enough}: {_SHARE}")
        try:
            parse_duration(slow.grace)
        except UsageError as error:
            need("stragglers", "grace", False, f"grace = {error.message}")
    return found


def _without_room(plan: Plan) -> list[_Problem]:
    """What the ring cannot carry."""
    found: list[_Problem] = []
    ranges = [("clip", plan.clip, plan.ring_bits, plan.levels), ("metric_range", plan.metric_range, 64, 0)]
    ranges += [("ranges", value, plan.ring_bits, plan.levels) for value in plan.ranges.values()]
    for key, clip, bits, levels in ranges:
        try:
            encoding.fit(clip, plan.max_weight, plan.cohort, bits, levels)
        except IbshellError as error:
            blamed = next((name for name in ("levels", "max_weight", "ring") if name in error.message), key)
            found.append(_Problem("ring_bits" if blamed == "ring" else blamed, str(error)))
    return found


_HINTS = {
    "program": 'write program = ["{python}", "train.py", "--data", "{data}"]',
    "initial": 'write initial = "initial.safetensors"',
    "sites": 'write sites = 16, or sites = ["hospital-01", "hospital-02"]',
    "deadline": 'write deadline = "10m"',
    "lease": 'write lease = "1h"',
    "rounds": "write rounds = 20",
}
