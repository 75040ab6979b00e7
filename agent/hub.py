"""A hub: joins the sites to one pool and answers commands. It is trusted with nothing but availability."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import asyncssh
import msgspec

from agent import clock as real_clock
from agent import hub_views, links
from agent.config import HubConfig, SiteEntry, trust_of
from agent.gangs import Gangs
from agent.ledger.witnessing import Witnessing
from agent.membership import Membership
from agent.ports import Clock, Dialler, Store
from agent.runs import Runs
from fedpool.errors import IbshellError, NotAuthorised, NotFound, PeerProtocolError, Refused, StorageFailed, UsageError
from fedpool.identity import requests
from fedpool.identity.certificates import Certificate
from fedpool.identity.keys import parse_public
from fedpool.identity.principals import persons_role, site_principal
from fedpool.identity.requests import Opened
from fedpool.leasing.demand import nearest
from fedpool.leasing.gate import BODIES, RECORDED_BYTES_MAX
from fedpool.leasing.pool import TenantDropped, TenantSet
from fedpool.leasing.requests import Cordon, Uncordon
from fedpool.leasing.roles import require_role
from fedpool.names import require_id
from fedpool.records import Lease, Signed, Tenant
from fedpool.transport import local, ssh
from fedpool.transport.identity import Identity
from fedpool.transport.peer import Peer
from fedpool.transport.stream import Stream
from fedpool.wire.idempotency import Answers
from fedpool.wire.membership import CertificateGiven, InviteWanted, JoinApproved, RosterGiven, RosterWanted, SiteNamed
from fedpool.wire.messages import (
    ById,
    CordonState,
    CordonWanted,
    EventsWanted,
    LeaseAwaited,
    LeaseEnding,
    LeaseNotice,
    LeaseOffer,
    LeaseRenewal,
    LeaseSize,
    LeaseView,
    LeaseWanted,
    LedgerAsked,
    LedgerHead,
    LedgerProof,
    ModelWanted,
    PolicyText,
    ProofWanted,
    RecordsPage,
    RecordsWanted,
    RunAgain,
    RunWanted,
    SeenCheckpoints,
    TenantNamed,
    Upload,
    UploadState,
)
from fedpool.wire.session import Notice, Request, from_body

log = logging.getLogger(__name__)

UPLOAD_BYTES_MAX = 64 << 30
# What a site is asked through the hub: method -> (type of the body, of the answer).
PASSED_ON: dict[str, tuple[type, type]] = {
    "ledger.head": (LedgerAsked, LedgerHead),
    "ledger.records": (RecordsWanted, RecordsPage),
    "ledger.proof": (ProofWanted, LedgerProof),
    "ledger.seen": (LedgerAsked, SeenCheckpoints),
}
# They change nothing and end when the asker hangs up.
READS = ("fed.events", "lease.foresee", "lease.list", "lease.show", "lease.wait", *PASSED_ON)


class HubViewWanted(msgspec.Struct, frozen=True):
    """fed.hub_view: which run, which site."""

    id: str
    site: str


class Hub:
    """One hub.

    Args:
        config: its configuration.
        directory: where the configuration lies; paths are relative to it.
        store: its durable entries; closed at the end.
        clock: the machine's.
        dialler: reaches the sites; over SSH where none is given.
        chance: makes ids and spreads attempts.
    """

    def __init__(
        self,
        config: HubConfig,
        directory: Path,
        store: Store,
        clock: Clock = real_clock,
        dialler: Dialler | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self.config = config
        self._state = directory / config.state
        self._socket = directory / config.socket
        self.identity = Identity.load(self._state / "identity")
        self._store = store
        self._clock = clock
        self._started = clock.now()
        dialler = dialler or links.SshDialler(self.identity)
        chance = chance or random.SystemRandom()
        self.links: dict[str, links.SiteLink] = {}
        names = [entry.name for entry in config.site]
        self.gangs = Gangs(store, self.links, names, self._lease_changed, clock, chance, config.strict)
        self.runs = Runs(self._store, self.gangs, self.links, self._state / "runs")
        self._witnessing = Witnessing(self.links)
        self._dialler, self._chance = dialler, chance
        # Of sites that dial in: {key: name} and {role: name}.
        self._known: dict[bytes, str] = {}
        self._roles: dict[str, str] = {}
        self._link_tasks: dict[str, asyncio.Task[None]] = {}
        for entry in config.site:
            self._add_link(entry)
        self._answers: Answers[asyncio.Task[object]] = Answers()
        self._tasks: asyncio.TaskGroup | None = None
        self._trust = self.identity.trust = trust_of(config)
        self._members: Membership | None = None
        if self._trust is not None:
            self._members = Membership(
                self._trust,
                store,
                clock,
                self.links,
                config.listen_sites,
                self._site_joined,
                self._site_left,
                self._begin,
                lambda: self.gangs.machine.tenants.signed,
                directory / config.roster if config.roster else None,
            )
        self._methods = self._reads()
        self._signed_methods = self._changes()

    def _reads(self) -> dict[str, tuple[type, Callable[[Any], Any]]]:
        """What is answered to whoever may connect: {method: (type of the body, what answers it)}."""
        return {
            "pool.status": (msgspec.Struct, lambda _: self._status()),
            "site.list": (msgspec.Struct, lambda _: hub_views.sites(self.gangs, self.links)),
            "site.policy": (SiteNamed, lambda body: self._policy(body.name)),
            "node.list": (msgspec.Struct, lambda _: hub_views.nodes(self.gangs, self.links)),
            "gpu.list": (msgspec.Struct, lambda _: hub_views.gpus(self.gangs, self.links)),
            "lease.foresee": (LeaseWanted, self.gangs.foresee),
            "lease.list": (msgspec.Struct, lambda _: hub_views.leases(self.gangs, self.links)),
            "lease.show": (ById, lambda body: self.gangs.view(self.gangs.find(body.id))),
            "lease.wait": (LeaseAwaited, self._lease_wait),
            "tenant.list": (msgspec.Struct, lambda _: hub_views.tenants(self.gangs)),
            "tenant.show": (TenantNamed, lambda body: hub_views.tenant(self.gangs, body.name)),
            **{method: (kind, self._passed_on(method, answer)) for method, (kind, answer) in PASSED_ON.items()},
            "fed.list": (msgspec.Struct, lambda _: hub_views.runs(self.runs)),
            "fed.show": (ById, lambda body: self.runs.view(self.runs.find(body.id))),
            "fed.events": (EventsWanted, lambda b: self.runs.events(self.runs.find(b.id), b.after, b.wait_s)),
            "fed.model": (ModelWanted, lambda b: self.runs.model(self.runs.find(b.id), b.round, b.offset, b.size)),
            "fed.hub_view": (HubViewWanted, lambda b: self.runs.hub_view(self.runs.find(b.id), b.site)),
            "pool.roster": (RosterWanted, lambda body: self._membership().roster(body)),
            "pool.joins": (msgspec.Struct, lambda _: self._membership().waiting()),
            "pool.members": (msgspec.Struct, lambda _: self._membership().members()),
        }

    def _membership(self) -> Membership:
        if self._members is None:
            raise Refused("this pool has no certificate authority", "ibshell pool init makes one that has")
        return self._members

    def _changes(self) -> dict[str, tuple[type, Callable[[Any, Signed | None], Any]]]:
        """What has to be signed: {method: (type of the body, what answers it)}."""
        return {
            "lease.request": (LeaseWanted, self._lease_request),
            "lease.renew": (LeaseRenewal, self._lease_renew),
            "lease.release": (ById, self._lease_release),
            "lease.adopt": (ById, self._lease_adopt),
            "lease.revoke": (LeaseEnding, self._lease_revoke),
            "lease.resize": (LeaseSize, self._lease_resize),
            "lease.offer": (LeaseOffer, self._lease_offer),
            "lease.accept": (LeaseOffer, self._lease_accept),
            "tenant.set": (Tenant, self._tenant_set),
            "tenant.remove": (TenantNamed, self._tenant_remove),
            "site.cordon": (CordonWanted, self._cordon),
            "site.uncordon": (CordonWanted, self._uncordon),
            "fed.run": (RunWanted, self._fed_run),
            "fed.resume": (RunAgain, self._fed_resume),
            "fed.stop": (ById, self._fed_stop),
            "pool.invite": (InviteWanted, lambda body, signed: self._membership().invite(body, signed)),
            "pool.approve": (JoinApproved, lambda body, signed: self._membership().approve(body, signed)),
            "pool.adopt": (RosterGiven, lambda body, signed: self._membership().adopt(body, signed)),
            "pool.certificate": (CertificateGiven, lambda body, signed: self._membership().certificate(body, signed)),
            "site.remove": (SiteNamed, lambda body, signed: self._membership().remove(body, signed)),
        }

    def _add_link(self, entry: SiteEntry) -> links.SiteLink:
        link = self.links[entry.name] = links.SiteLink(
            entry,
            self._dialler,
            self._clock,
            self._chance,
            self.runs.source,
            self.gangs.description_wanted,
            self._site_up,
            self.gangs.site_down,
            self._site_notice,
        )
        if entry.mode == "reverse":
            self._known[link.key] = entry.name
            self._roles[site_principal(entry.name)] = entry.name
        return link

    def _site_joined(self, entry: SiteEntry) -> None:
        self.gangs.machine.capacity.add(entry.name)
        link = self._add_link(entry)
        assert self._tasks is not None
        self._link_tasks[entry.name] = self._tasks.create_task(link.run())

    def _site_left(self, name: str) -> None:
        link = self.links.pop(name, None)
        if link is not None:
            self._known.pop(link.key, None)
            self._roles.pop(site_principal(name), None)
            link.close()
        task = self._link_tasks.pop(name, None)
        if task is not None:
            task.cancel()

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(coroutine)

    async def run(self) -> None:
        """Serve until cancelled."""
        users = {parse_public(key, f"users.{name}"): name for name, key in self.config.users.items()}
        server: asyncio.Server | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                await self.start(tasks)
                if self.config.listen_sites:
                    acceptor = ssh.reverse_acceptor(self.identity, self._known, self._roles, self._site_dialled_in)
                    await self._listen(tasks, self.config.listen_sites, acceptor)
                if self.config.listen:
                    await self._listen(
                        tasks,
                        self.config.listen,
                        ssh.server_acceptor(
                            self.identity, users, self._serve_user, _role_of_user, guests=self._members is not None
                        ),
                    )
                server = await local.listen(self._socket, self.serve)
                log.info("hub %s serves %d sites", self.config.name, len(self.links))
        finally:
            if server is not None:
                server.close()
            await self._store.close()

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Read everything back and begin to reach the sites."""
        self._tasks = tasks
        tasks.create_task(self._store.lost())
        await self.gangs.recover(tasks)
        await self.runs.recover(tasks)
        tasks.create_task(self._witnessing.run())
        for link in self.links.values():
            tasks.create_task(link.run())
        if self._members is not None:
            await self._members.recover()

    async def _listen(self, tasks: asyncio.TaskGroup, address: str, acceptor: Any) -> None:
        listener = ssh.Listener(address, acceptor)
        log.info("listening on %s", listener.bind())
        tasks.create_task(listener.run())

    async def _site_dialled_in(self, connection: asyncssh.SSHClientConnection, name: str) -> None:
        await self.links[name].accept(connection)

    async def _serve_user(self, subsystem: str, stream: Stream, name: str) -> None:
        if subsystem != ssh.CONTROL:
            return
        if name.startswith(f"{ssh.GUEST}/") and self._members is not None:
            public, members = bytes.fromhex(name.partition("/")[2]), self._members
            await self._serve(stream, lambda request: members.answer_guest(public, request))
            return
        log.info("%s connected", name)
        await self.serve(stream)

    async def serve(self, stream: Stream) -> None:
        """Serve one user's control channel."""
        await self._serve(stream, self._answer)

    async def _serve(self, stream: Stream, answer: Callable[[Request], Awaitable[object]]) -> None:
        peer = Peer(stream, "hub", self.config.name, serve=answer)
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(peer.run())
                await peer.start()

    async def _site_up(self, link: links.SiteLink) -> None:
        await self.gangs.site_up(link)
        self._witnessing.grew(link.name)
        if self._members is not None:
            await self._members.site_up(link)

    def _site_notice(self, link: links.SiteLink, notice: Notice) -> None:
        if notice.method == "lease.changed":
            assert self._tasks is not None
            lease = from_body(notice.body, LeaseNotice, notice.method).lease
            self._tasks.create_task(self._take(link, lambda: self.gangs.site_changed(link, lease)))
        elif notice.method == "ledger.grew":
            self._witnessing.grew(link.name)
        elif notice.method == "site.changed":
            assert self._tasks is not None
            self._tasks.create_task(self._take(link, link.describe))

    async def _take(self, link: links.SiteLink, take: Callable[[], Awaitable[None]]) -> None:
        try:
            await take()
        except IbshellError as error:  # the site says everything again when it is back
            log.error("what %s told: %s", link.name, error)

    def _lease_changed(self, lease: Lease) -> None:
        log.info("lease %s is %s%s", lease.id, lease.state, f": {lease.reason}" if lease.reason else "")

    async def _answer(self, request: Request) -> object:
        body, answer = self._understood(request)
        found = self._answers.find(request.key, request.method, body)
        if found is not None:
            return await asyncio.shield(found)
        if request.method.startswith("lease."):
            result: Any = self._durably(answer, body)
        else:
            result = answer(body)
        if not asyncio.iscoroutine(result) or request.method in READS:
            return await result if asyncio.iscoroutine(result) else result
        # A change goes on to its end even if the asker hangs up: half a lease helps nobody. It is remembered while it goes on,
        # so that the same request sent twice at once is carried out once; one that failed may be tried again.
        task = asyncio.get_running_loop().create_task(result)
        self._answers.keep(request.key, request.method, body, task)
        task.add_done_callback(lambda done: self._done(request.key, done))
        return await asyncio.shield(task)

    def _understood(self, request: Request) -> tuple[Any, Callable[[Any], Any]]:
        """The body of a request, and what answers it.

        Raises:
            NotAuthorised: it has to be signed, and is not by somebody who may ask it.
        """
        if request.method in self._methods:
            kind, answer = self._methods[request.method]
            return from_body(request.body or {}, kind, request.method) if kind is not msgspec.Struct else None, answer
        if request.method == "upload":
            return from_body(request.body, Upload, request.method), self._upload
        if request.method not in self._signed_methods:
            raise UsageError(
                f"the hub does not know the method {request.method!r}", "is this command of a newer release?"
            )
        kind, change = self._signed_methods[request.method]
        if self._trust is None:
            return from_body(request.body or {}, kind, request.method), lambda body: change(body, None)
        signed = _signed(request)
        if request.method in BODIES and len(signed.payload) > RECORDED_BYTES_MAX:
            raise UsageError(
                f"a request of {len(signed.payload)} bytes; sites record requests of up to {RECORDED_BYTES_MAX}",
                "make the plan or the lists in it shorter",
            )
        now = self._clock.unix()
        opened: Opened[Any] = requests.open_(signed, self._trust, request.method, kind, now)
        requests.require_fresh(opened.payload, now)
        require_role(request.method, opened.payload.principal, *self._concerned(request.method, opened.body))
        return opened.body, lambda body: change(body, signed)

    def _concerned(self, method: str, body: Any) -> tuple[str, str]:
        """The tenant that a request names, and the one that holds what it is about."""
        named = body.lease if isinstance(body, RunWanted | RunAgain) else body
        tenant = getattr(named, "tenant", "")
        if method.startswith("fed.") and method != "fed.run":
            return tenant, self.runs.find(body.id).run.plan.tenant
        if not method.startswith("lease.") or method in ("lease.request", "lease.accept", "lease.adopt"):
            return tenant, ""
        try:
            return tenant, self.gangs.find(body.id).tenant
        except NotFound:  # sites may hold one that this hub does not know
            held = [lease for link in self.links.values() for lease in self.gangs.orphans(link.name)]
            return tenant, next((lease.tenant for lease in held if lease.id == body.id), "")

    async def _durably(self, answer: Callable[[Any], Any], body: object) -> object:
        """An answer, or a refusal, that rests on nothing but what is durable."""
        try:
            result = answer(body)
            result = await result if asyncio.iscoroutine(result) else result
        except IbshellError:
            await self.gangs.durable()
            raise
        await self.gangs.durable()
        return result

    def _done(self, key: str, task: asyncio.Task[object]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._answers.forget(key)
        elif isinstance(view := task.result(), LeaseView):
            self._answers.weigh(key, 1 + len(view.lease.parts))

    def _status(self) -> hub_views.PoolStatus:
        return hub_views.status(
            self.config.name, os.getpid(), self._clock.now() - self._started, self.links, self.gangs, self.runs
        )

    async def _lease_request(self, wanted: LeaseWanted, signed: Signed | None) -> object:
        return self.gangs.view(await self.gangs.request(wanted, signed))

    async def _lease_wait(self, wanted: LeaseAwaited) -> object:
        return self.gangs.view(await self.gangs.wait(self.gangs.find(wanted.id).id, wanted.state, wanted.wait_s))

    async def _lease_renew(self, wanted: LeaseRenewal, signed: Signed | None) -> object:
        return self.gangs.view(await self.gangs.renew(self.gangs.find(wanted.id), wanted.duration_s, signed))

    async def _lease_release(self, wanted: ById, signed: Signed | None) -> object:
        try:
            lease = self.gangs.find(wanted.id)
        except NotFound:
            lease = await self.gangs.adopt(wanted.id)
        return self.gangs.view(await self.gangs.end(lease, "released", signed))

    async def _lease_adopt(self, wanted: ById, signed: Signed | None) -> object:
        return self.gangs.view(await self.gangs.adopt(wanted.id))

    async def _lease_revoke(self, wanted: LeaseEnding, signed: Signed | None) -> object:
        lease = self.gangs.find(wanted.id)
        return self.gangs.view(await self.gangs.revoke(lease, wanted.reason, wanted.grace_s, signed))

    async def _lease_resize(self, wanted: LeaseSize, signed: Signed | None) -> object:
        return self.gangs.view(await self.gangs.resize(self.gangs.find(wanted.id), wanted.gpus, signed))

    async def _lease_offer(self, wanted: LeaseOffer, signed: Signed | None) -> object:
        return self.gangs.view(await self.gangs.offer(self.gangs.find(wanted.id), wanted.tenant, signed))

    async def _lease_accept(self, wanted: LeaseOffer, signed: Signed | None) -> object:
        return self.gangs.view(await self.gangs.accept(self.gangs.find(wanted.id), wanted.tenant, signed))

    async def _tenant_set(self, tenant: Tenant, signed: Signed | None) -> object:
        await self.gangs.put(TenantSet(tenant, signed))
        self._tenant_changed(signed)
        return hub_views.tenant(self.gangs, tenant.name)

    async def _tenant_remove(self, wanted: TenantNamed, signed: Signed | None) -> object:
        view = hub_views.tenant(self.gangs, wanted.name)
        await self.gangs.put(TenantDropped(wanted.name, signed))
        self._tenant_changed(signed)
        return view

    def _tenant_changed(self, signed: Signed | None) -> None:
        if self._members is not None and signed is not None:
            self._members.tenant_changed(signed)

    def _policy(self, site: str) -> PolicyText:
        described = self._link(site).description
        return PolicyText(described.policy if described is not None else "")

    def _passed_on(self, method: str, answer: type[Any]) -> Callable[[Any], Any]:
        """What a site answers, whatever it is."""
        return lambda body: self._link(body.site).call(method, body, answer)

    def _link(self, site: str) -> links.SiteLink:
        link = self.links.get(site)
        if link is None:
            raise NotFound(f"no site {site!r}", nearest(site, self.links, "ibshell site list shows them"))
        return link

    async def _cordon(self, wanted: CordonWanted, signed: Signed | None) -> CordonState:
        event = Cordon(wanted.what, wanted.reason, self.gangs.term, signed)
        return await self._change_grants(wanted.site, "site.cordon", event)

    async def _uncordon(self, wanted: CordonWanted, signed: Signed | None) -> CordonState:
        return await self._change_grants(wanted.site, "site.uncordon", Uncordon(wanted.what, self.gangs.term, signed))

    async def _change_grants(self, site: str, method: str, event: Cordon | Uncordon) -> CordonState:
        link = self._link(site)
        state = await link.call(method, event, CordonState)
        await link.describe()
        return state

    def _upload_path(self, upload_id: str) -> Path:
        return self._state / "uploads" / require_id(upload_id, "upload")

    async def _upload(self, piece: Upload) -> UploadState:
        path = self._upload_path(piece.id)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        size = path.stat().st_size if path.exists() else 0
        if piece.offset > size or piece.offset + len(piece.data) > UPLOAD_BYTES_MAX:
            raise UsageError(f"a piece at {piece.offset} of an upload of {size} bytes", "send the pieces in order")
        try:
            with path.open("r+b" if size else "wb") as file:
                file.seek(piece.offset)
                file.write(piece.data)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StorageFailed(f"the hub cannot keep an upload: {error.strerror}", "make room on its disk") from None
        return UploadState(path.stat().st_size)

    async def _fed_run(self, wanted: RunWanted, signed: Signed | None) -> object:
        path = self._upload_path(wanted.initial)
        if not path.exists():
            raise NotFound(f"no upload {wanted.initial}", "send the initial parameters first")
        try:
            return await self.runs.create(wanted, path, signed)
        finally:
            path.unlink()

    async def _fed_resume(self, wanted: RunAgain, signed: Signed | None) -> object:
        return await self.runs.resume(self.runs.find(wanted.id), wanted, signed)

    async def _fed_stop(self, wanted: ById, signed: Signed | None) -> object:
        return await self.runs.stop(self.runs.find(wanted.id))


def _role_of_user(certificate: Certificate) -> str:
    return persons_role(certificate.principals)


def _signed(request: Request) -> Signed:
    try:
        return from_body(request.body, Signed, request.method)
    except PeerProtocolError:
        raise NotAuthorised(
            f"{request.method} has to be signed in this pool",
            "join it with this release: ibshell pool join, or ibshell up on this machine",
        ) from None
