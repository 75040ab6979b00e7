"""A site agent: the one authority over its site's devices. It answers the hub, however the hub reaches it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent import clock as real_clock
from agent import files
from agent.backoff import LAST_S, delay
from agent.config import SiteConfig, trust_of
from agent.house_rules import HouseRules
from agent.launchers.launcher import LocalLauncher
from agent.leases import SiteLeases
from agent.ledger.retention import Retention
from agent.ledger.site_ledger import SiteLedger
from agent.ledger.witness import Witness
from agent.ports import Clock, Launcher, Store
from agent.probes import DeviceProbe
from agent.programs import Task
from agent.rosters import Rosters
from agent.site_rounds import SiteRounds
from agent.tenancy import Tenancy
from fedpool import __version__
from fedpool.errors import IbshellError, NotAuthorised, NotFound, Refused, StorageFailed, Unreachable, UsageError
from fedpool.federation import plan as plans
from fedpool.federation.messages import Phase, RoundOver, RoundWanted
from fedpool.federation.plan import Plan
from fedpool.identity import certificates
from fedpool.identity.authorities import authority_fingerprint
from fedpool.identity.certificates import Certificate
from fedpool.identity.keys import parse_public
from fedpool.identity.principals import HUB, site_principal
from fedpool.identity.roster import Roster
from fedpool.leasing import policy as policies
from fedpool.leasing.gate import Gate
from fedpool.leasing.policy import Policy
from fedpool.leasing.recorded import devices_said
from fedpool.leasing.requests import (
    Abort,
    Commit,
    Cordon,
    Hold,
    LeaseEvent,
    Notify,
    Release,
    Renew,
    Resize,
    Transfer,
    Uncordon,
)
from fedpool.ledger.records import TEXT_MAX, LoggedIn, PolicyObeyed, ProgramSaid, Record, RosterObeyed, encode
from fedpool.names import require_id
from fedpool.records import SiteLease
from fedpool.secagg.manifest import SitePolicy
from fedpool.transport import local, ssh
from fedpool.transport.bulk import BulkChannel
from fedpool.transport.identity import Identity
from fedpool.transport.peer import Peer
from fedpool.transport.stream import AsyncioStream, Stream
from fedpool.units import parse_duration
from fedpool.wire.membership import CertificateGiven, RosterGiven, TenantsGiven
from fedpool.wire.messages import (
    CordonState,
    DescriptionWanted,
    LeaseNotice,
    LedgerGrew,
    Nothing,
    ProofWanted,
    RecordsWanted,
    SiteDescription,
    TaskEnded,
    TaskWanted,
    WitnessedCheckpoint,
    WitnessWanted,
)
from fedpool.wire.session import Request, from_body

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 600.0
DEVICES_STREAM = "devices"
_LEASE_METHODS: dict[str, type[LeaseEvent]] = {
    "lease.hold": Hold,
    "lease.commit": Commit,
    "lease.abort": Abort,
    "lease.renew": Renew,
    "lease.resize": Resize,
    "lease.notify": Notify,
    "lease.transfer": Transfer,
    "lease.release": Release,
}


class DevicesRecorded(msgspec.Struct, frozen=True, tag="devices.recorded"):
    """The ledger has said what there is here; SHA-256 of it."""

    digest: bytes


class SiteAgent:
    """One site.

    Args:
        config: its configuration.
        directory: where the configuration lies; paths are relative to it.
        probe: finds the site's devices.
        store: its durable entries; closed at the end.
        clock: the machine's.
        launcher: ends and warns processes; those on this machine where none is given.
    """

    def __init__(
        self,
        config: SiteConfig,
        directory: Path,
        probe: DeviceProbe,
        store: Store,
        clock: Clock = real_clock,
        launcher: Launcher | None = None,
    ) -> None:
        self.config = config
        self._state = directory / config.state
        self._runtime = (directory / config.socket).parent
        self._socket = directory / config.socket
        self._data = str((directory / config.data).resolve()) if config.data else ""
        self.identity = Identity.load(self._state / "identity")
        self._hub_keys = {parse_public(config.hub_key, "hub_key"): "hub"} if config.hub_key else {}
        self._store = store
        self._clock = clock
        self._chance = random.SystemRandom()  # spreads attempts to dial
        self._inventory = probe.snapshot()
        trust = self.identity.trust = trust_of(config)
        pinned = {name: parse_public(key, f"peers.{name}") for name, key in config.peers.items()}
        peers = trust.sites if trust is not None and not pinned else pinned
        self.ledger = SiteLedger(config.name, self.identity, store, clock, peers, self._grew)
        self._witness = Witness(peers, self.identity, self.ledger, store, clock)
        launcher = launcher or LocalLauncher()
        self._rosters = None if trust is None else Rosters(trust, store, self._roster_adopted)
        path = directory / config.policy_file if config.policy_file else None
        self._gate = None if trust is None else Gate(config.name, trust, self._inventory.devices())
        self._tenancy = None if self._gate is None else Tenancy(self._gate, store, self.ledger, clock)
        witnessed = None if trust is None else self.ledger
        self._rules = HouseRules(config.name, path, self._policy_changed, witnessed, self._tenancy)
        self.leases = SiteLeases(
            config.name,
            self._inventory,
            config.policy,
            store,
            self._changed,
            clock,
            launcher,
            self.ledger,
            self._gate,
            self._rules,
        )
        self._rounds = SiteRounds(
            SitePolicy(config.name, self.identity.public, peers, self._cohort(self._rules.policy)),
            self.identity,
            self._store,
            self._state / "rounds",
            self._fetch,
            self._task,
            self.ledger,
        )
        self._tasks: dict[str, Task] = {}
        self._hubs: dict[Peer, None] = {}
        self._bulk: BulkChannel | None = None
        self._bulk_up = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until cancelled; programs end with the agent."""
        server: asyncio.Server | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                await self.start(tasks)
                server = await local.listen(self._socket, self._stdio)
                if self.config.listen:
                    acceptor = ssh.server_acceptor(self.identity, self._hub_keys, self.serve, _role_of_hub)
                    listener = ssh.Listener(self.config.listen, acceptor)
                    log.info("site %s listens on %s", self.config.name, listener.bind())
                    tasks.create_task(listener.run())
                if self.config.hub:
                    for subsystem in ssh.SUBSYSTEMS:
                        tasks.create_task(self._dial_out(subsystem))
        finally:
            if server is not None:
                server.close()
            for task in self._tasks.values():
                with contextlib.suppress(IbshellError):
                    await task.kill()
            with contextlib.suppress(StorageFailed):  # then the last checkpoint stands
                await self.ledger.advance()
            await self._store.close()

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Read everything back, end what a dead run of this agent left, and let time pass."""
        tasks.create_task(self._store.lost())
        if self._rosters is not None:
            await self._rosters.recover()
        if self._tenancy is not None:
            await self._tenancy.recover()
        await self._rounds.recover()
        await self._witness.recover()
        await self.leases.recover()
        await self._record_devices()
        if self.config.policy_file:
            await self._record_policy(self._rules.text)
            tasks.create_task(self._rules.run())
        tasks.create_task(self.leases.run())
        tasks.create_task(self.ledger.run())
        if self.config.keep_records:
            keep_s = parse_duration(self.config.keep_records)
            retention = Retention(self.ledger, self._store, self._clock, self._record_all, keep_s)
            tasks.create_task(retention.run())

    async def _dial_out(self, subsystem: str) -> None:
        attempt = 0
        while True:
            started = self._clock.now()
            try:
                await ssh.dial_reverse(
                    self.config.hub, self.identity, self._hub_keys, self.serve, _role_of_hub, (subsystem,)
                )
                log.info("the %s connection to the hub ended", subsystem)
            except IbshellError as error:
                log.info("%s", error)
            attempt = 0 if self._clock.now() - started > 2 * LAST_S else attempt + 1
            await asyncio.sleep(delay(attempt, self._chance))

    async def _stdio(self, stream: AsyncioStream) -> None:
        """A bridge from a stock sshd: its first line names the subsystem."""
        subsystem = (await stream.read_line()).decode(errors="replace").strip()
        if subsystem in ssh.SUBSYSTEMS:
            await self.serve(subsystem, stream, "hub")

    async def serve(self, subsystem: str, stream: Stream, name: str) -> None:
        """Serve one channel that the hub opened, until it ends."""
        try:
            if subsystem == ssh.BULK:
                await self._serve_bulk(BulkChannel(stream, self._rounds.source))
            else:
                await self._serve_control(Peer(stream, "site", self.config.name, serve=self._answer), name)
        except* IbshellError as group:
            log.info("a %s channel ended: %s", subsystem, group.exceptions[0])

    async def _serve_control(self, peer: Peer, name: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(peer.run())
            hello = await peer.start()
            self._hubs[peer] = None
            self.ledger.unwitnessed.hub_came()
            try:
                await self.leases.record(LoggedIn(who=name[:TEXT_MAX], software=hello.software[:TEXT_MAX]))
                await running
            finally:
                del self._hubs[peer]
                self.ledger.unwitnessed.hub_left()

    async def _serve_bulk(self, channel: BulkChannel) -> None:
        self._bulk = channel
        self._bulk_up.set()
        try:
            await channel.run()
        finally:
            if self._bulk is channel:
                self._bulk = None
                self._bulk_up.clear()

    async def _fetch(self, object_id: bytes, path: Path) -> None:
        """Get an object from the hub into a file, over as many connections as it takes."""
        sink = files.FileSink(path)
        try:
            while True:
                async with asyncio.timeout(FETCH_TIMEOUT_S):
                    await self._bulk_up.wait()
                channel = self._bulk
                if channel is not None:
                    try:
                        await channel.fetch(object_id, sink)
                        return
                    except Unreachable as error:
                        log.info("the model's transfer goes on after %d bytes: %s", sink.received, error)
                await asyncio.sleep(0.05)
        except TimeoutError:
            raise Unreachable(f"the hub's bulk connection was away for {FETCH_TIMEOUT_S:.0f} s") from None
        finally:
            sink.close()

    def _changed(self, lease: SiteLease | None, answered: bool) -> None:
        if lease is None:
            for peer in self._hubs:
                self._spawn(peer.notify("site.changed", Nothing()))
            return
        for run, task in list(self._tasks.items()):
            if task.wanted.lease == lease.id and lease.state != "active":
                del self._tasks[run]
        # Who asked has its answer. While another hub is connected too, it may be the one that no longer matters.
        for peer in () if answered and len(self._hubs) == 1 else self._hubs:
            self._spawn(peer.notify("lease.changed", LeaseNotice(lease)))

    def _grew(self, size: int) -> None:
        for peer in self._hubs:
            self._spawn(peer.notify("ledger.grew", LedgerGrew(size)))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        async def quietly() -> None:
            with contextlib.suppress(Unreachable, StorageFailed):  # the hub reads the state when it is back
                await coroutine

        task = asyncio.get_running_loop().create_task(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _task(self, run: str) -> Task:
        task = self._tasks.get(run)
        if task is None:
            raise NotFound(f"{self.config.name} runs no program of run {run}")
        return task

    async def _answer(self, request: Request) -> object:
        body, method = request.body, request.method
        match method:
            case "site.describe":
                wanted = from_body(body, DescriptionWanted, method)
                await self.leases.obey(wanted.term)
                description = self._describe(wanted.known)
                await self.leases.durable()  # the hub builds on it
                return description
            case "site.cordon":
                await self.leases.cordon(from_body(body, Cordon, method))
                return CordonState(self.config.name, self.leases.machine.cordons)
            case "site.uncordon":
                await self.leases.cordon(from_body(body, Uncordon, method))
                return CordonState(self.config.name, self.leases.machine.cordons)
            case _ if method in _LEASE_METHODS:
                event = from_body(body, _LEASE_METHODS[method], method)
                require_id(event.lease, "lease")
                return await self.leases.step(event)
            case "ledger.head":
                await self.leases.durable()
                return await self.ledger.head()
            case "ledger.records":
                return await self.ledger.page(from_body(body, RecordsWanted, method))
            case "ledger.proof":
                return await self.ledger.proof(from_body(body, ProofWanted, method))
            case "ledger.witness":
                return await self._witness.cosign(from_body(body, WitnessWanted, method))
            case "ledger.witnessed":
                await self.ledger.witnessed(from_body(body, WitnessedCheckpoint, method).note)
                return Nothing()
            case "ledger.seen":
                return self._witness.seen()
            case "roster.adopt":
                await self._adopt(from_body(body, RosterGiven, method))
                return Nothing()
            case "tenants.adopt":
                if self._tenancy is not None:
                    async with self.leases.refusing(method, ""):
                        await self._tenancy.adopt(from_body(body, TenantsGiven, method).signed)
                return Nothing()
            case "identity.install":
                self._install(from_body(body, CertificateGiven, method))
                return Nothing()
            case "task.start":
                return await self._start_task(from_body(body, TaskWanted, method))
            case "task.stop":
                return await self._stop_task(from_body(body, TaskEnded, method))
            case "round.open":
                wanted_round = from_body(body, RoundWanted, method)
                async with self.leases.refusing(method, ""):
                    self._rules.require_witnessed()
                    return await self._rounds.open(wanted_round)
            case "round.step":
                return await self._rounds.step(from_body(body, Phase, method))
            case "round.close":
                self._rounds.close(from_body(body, RoundOver, method))
                return Nothing()
            case _:
                raise UsageError(f"a site does not know the method {method!r}", "is the hub of a newer release?")

    async def _adopt(self, given: RosterGiven) -> None:
        """Go by a new roster; one that no authority has signed is refused, and that is recorded."""
        if self._rosters is None:
            raise Refused(f"{self.config.name} goes by keys that its own configuration names")
        async with self.leases.refusing("roster", ""):
            await self._rosters.take(given.roster)

    async def _roster_adopted(self, roster: Roster, digest: str) -> None:
        await self.leases.record(
            RosterObeyed(
                number=roster.number,
                digest=digest,
                authorities=tuple(authority_fingerprint(authority) for authority in roster.authority_keys()),
                denied_serials=roster.denied_serials,
                denied_keys=roster.denied_keys,
            )
        )

    def _install(self, given: CertificateGiven) -> None:
        """Take a new certificate of this site's own key; whoever connects from now on sees it.

        Raises:
            NotAuthorised: it is not this site's, or from nobody who is believed.
        """
        trust = self.identity.trust
        if trust is None:
            raise Refused(f"{self.config.name} goes by keys that its own configuration names")
        found = certificates.parse(given.certificate, "the new certificate")
        trust.require(found, certificates.HOST, site_principal(self.config.name), self._clock.unix())
        if found.public != self.identity.public:
            raise NotAuthorised(f"a certificate of another key than that of {self.config.name}")
        known = self.identity.certificate(certificates.HOST)
        if known is not None and known.valid_before >= found.valid_before and known.authority == found.authority:
            raise Refused(
                f"a certificate until {found.valid_before}; {self.config.name} has one until {known.valid_before}"
            )
        self.identity.install(found)

    def _describe(self, known: dict[str, int]) -> SiteDescription:
        machine = self.leases.machine
        certificate = self.identity.certificate(certificates.HOST)
        return SiteDescription(
            name=self.config.name,
            identity=self.identity.public,
            software=__version__,
            inventory=self._inventory,
            leases=[lease for lease in machine.leases.values() if lease.occupies or lease.id in known],
            tasks={task.wanted.lease: run for run, task in self._tasks.items() if not task.failure},
            recovering=machine.recovering,
            epoch=machine.epoch,
            boottime=self._clock.now(),
            cordons=dict(machine.cordons),
            known=known,
            certificate_until=certificate.valid_before if certificate is not None else 0,
            certificate_authority=authority_fingerprint(certificate.authority) if certificate is not None else "",
            policy=self._rules.text,
            roster=self.identity.trust.number if self.identity.trust is not None else 0,
            tenants=self._tenancy.digest if self._tenancy is not None else "",
        )

    async def _start_task(self, wanted: TaskWanted) -> Nothing:
        require_id(wanted.run, "run")
        async with self.leases.binding(wanted.lease, wanted.token) as lease:
            async with self.leases.refusing("task.start", wanted.lease):
                tags = self._signed_plan(self._gate, wanted, lease).data_tags if self._gate is not None else ()
                policies.require(self.config.name, self._rules.policy.program_problems(wanted.program, tags))
            current = self._tasks.get(wanted.run)
            if current is not None and not current.failure:
                return Nothing()
            if current is not None:
                await current.kill()
            socket = self._runtime / f"t-{hashlib.sha256(f'{self.config.name}/{wanted.run}'.encode()).hexdigest()[:12]}"
            directory = self._state / "tasks" / wanted.run
            devices = [grant.uuid for grant in lease.grants if grant.uuid not in lease.leaving]
            task = Task(
                self.config.name,
                wanted,
                self.leases.mark(wanted.lease),
                devices,
                directory,
                socket,
                self._data,
                self._rounds.check_update,
                lambda how: self._program(wanted, "ended", how),
            )
            await task.start()
            self._tasks[wanted.run] = task
            log.info("run %s: program %s started under lease %s", wanted.run, task.pid, wanted.lease)
            self._program(wanted, "started")
            return Nothing()

    def _cohort(self, policy: Policy) -> int:
        return max(self.config.minimum_cohort, policy.minimum_cohort)

    async def _policy_changed(self, text: str, policy: Policy) -> None:
        await self._record_policy(text)
        self._rounds.demand(self._cohort(policy))
        self._changed(None, False)

    async def _record_all(self, records: Sequence[Record]) -> None:
        await self.leases.record(*records)

    async def _record_devices(self) -> None:
        """Say what there is here, where that is not what was said last."""
        found = devices_said(self._inventory.devices())
        digest = hashlib.sha256(b"".join(map(encode, found))).digest()
        said = await self._store.read(DEVICES_STREAM, DevicesRecorded)
        if not said or said[-1].digest != digest:
            entry = DevicesRecorded(digest)
            await self._store.append(DEVICES_STREAM, [entry], snapshot=True, records=self.ledger.at(found))
            self.ledger.wrote()

    async def _record_policy(self, text: str) -> None:
        await self.leases.record(PolicyObeyed(digest=policies.digest(text), text=text))

    def _signed_plan(self, gate: Gate, wanted: TaskWanted, lease: SiteLease) -> Plan:
        """A program is started only as the request says that its lease rests on; returns the plan that was signed."""
        text = gate.plan(wanted.request, lease, wanted.run)
        plan = plans.parse(text)
        if (plan.program, plan.config, plans.digest(text)) != (wanted.program, wanted.config, wanted.plan):
            raise NotAuthorised(f"run {wanted.run} with another plan or program than was signed")
        return plan

    def _program(self, wanted: TaskWanted, event: str, reason: str = "") -> None:
        record = ProgramSaid(
            run=wanted.run, lease=wanted.lease, event=event, plan=wanted.plan.hex(), reason=reason[:TEXT_MAX]
        )
        self._spawn(self.leases.record(record))

    async def _stop_task(self, ended: TaskEnded) -> Nothing:
        require_id(ended.run, "run")
        task = self._tasks.pop(ended.run, None)
        if task is not None:
            await task.finish(ended.reason)
        self._rounds.end_run(ended.run)
        return Nothing()


def _role_of_hub(certificate: Certificate) -> str:
    return HUB
