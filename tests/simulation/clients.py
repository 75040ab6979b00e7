"""Clients that lease, use, renew, resize, hand over and give back, and ask again when an answer is lost."""

import asyncio

from fedpool.errors import IbshellError, Unreachable
from fedpool.leasing.roles import MAY
from fedpool.transport.peer import Peer
from fedpool.wire.messages import (
    ById,
    CordonState,
    CordonWanted,
    LeaseAwaited,
    LeaseEnding,
    LeaseOffer,
    LeaseRenewal,
    LeaseSize,
    LeaseView,
    LeaseWanted,
)
from simulation.loop import Process
from simulation.machines import EPOCH

FINAL = ("released", "expired", "revoked", "failed", "aborted")


class Client:
    """One tenant's client."""

    def __init__(self, world, number, requests):
        self.world = world
        self.tenant = f"tenant-{number % 3}"
        self.name = f"client-{number}"
        self.chance = world.chance(self.name)
        self.requests = requests
        self.process = Process(world.loop, self.name, lambda _: None)
        self.peer = None
        self.calls = 0
        self.holders = {}
        self.finished = False
        self.asked = []

    def start(self):
        self.process.spawn(self.run())

    def say(self, text):
        self.world.say(self.name, text)

    # --- talking to the hub

    async def connected(self):
        """A channel to the hub, the one there is or a new one."""
        if self.peer is not None and not self.peer._closed.is_set():
            return self.peer
        hub = self.world.hub
        if hub.service is None or not self.world.network.reaches(self.process, hub.process):
            raise Unreachable("the hub does not answer")
        mine, theirs = self.world.network.connect(self.process, hub.process)
        hub.process.spawn(hub.service.serve(theirs))
        peer = Peer(mine, "client", self.name)
        self.process.spawn(self.keep(peer))
        await peer.start()
        self.peer = peer
        return peer

    async def keep(self, peer):
        try:
            await peer.run()
        except IbshellError as error:
            self.say(f"lost the hub: {error.message}")

    async def call(self, method, body, expect, timeout_s=90.0):
        """Ask until there is an answer, however often the connection breaks.

        Raises:
            IbshellError: what the hub answered.
        """
        self.calls += 1
        key = f"{self.name}-{self.calls}"
        asked = body
        if self.world.signatures is not None and method in MAY:
            principal = "operator" if MAY[method][0] == "operator" else f"tenant/{self.holder(method, body)}"
            unix = EPOCH.timestamp() + self.world.loop.time()
            asked = self.world.signatures.sign(method, body, principal, unix, f"{self.calls:04x}")
        while True:
            try:
                peer = await self.connected()
                answer = await peer.call(method, asked, expect, timeout_s, key)
            except Unreachable as error:
                self.say(f"{method}: {error.message}")
                reached = self.peer is not None and not self.peer._closed.is_set()
                if reached and not error.message.startswith(f"no answer to {method} "):
                    raise  # the hub itself says so
                await asyncio.sleep(self.chance.uniform(0.2, 2.0))
                continue
            except IbshellError as error:
                self.say(f"{method} refused: {error.message}")
                raise
            if isinstance(answer, LeaseView):
                self.say(f"{method} {answer.lease.id}: {answer.lease.state}")
                self.holders[answer.lease.id] = answer.lease.tenant
                self.world.checked(self.world.hub_audit.answered, answer)
            return answer

    def holder(self, method, body):
        """As which tenant it asks."""
        return body.tenant if MAY[method] == ("named",) else self.holders.get(body.id, self.tenant)

    # --- what it does

    async def run(self):
        for _ in range(self.requests):
            await asyncio.sleep(self.chance.uniform(0.0, 6.0))
            try:
                await self.one()
            except IbshellError as error:
                self.say(f"gave up: {error.message}")
        self.finished = True

    def wish(self):
        chance, world = self.chance, self.world
        total = world.gpus
        gpus = chance.choice([1, 1, 2, chance.randint(1, total), total])
        elastic = chance.random() < 0.25
        lease_id = f"{chance.getrandbits(32):08x}"
        return LeaseWanted(
            tenant=self.tenant,
            gpus=gpus,
            duration_s=chance.uniform(8.0, 40.0),
            gpus_max=min(total, gpus + chance.randint(1, 3)) if elastic else 0,
            sites=chance.choice([0, 0, 2]) if gpus > 1 else 0,
            milli=chance.choice([1000, 1000, 1000, 500, 300]),
            priority=chance.choice(["normal", "normal", "high", "scavenger"]),
            max_wait_s=chance.choice([0.0, 10.0, 60.0]),
            starts_in_s=chance.choice([0.0, 0.0, 0.0, 0.0, 12.0]),
            id=lease_id,
        )

    async def one(self):
        wanted = self.wish()
        self.asked.append(wanted.id)
        self.say(f"asks for {wanted.gpus}..{wanted.gpus_max} of {wanted.milli} as {wanted.id}")
        lease = (await self.call("lease.request", wanted, LeaseView)).lease
        patience = self.chance.randint(1, 8)
        while lease.state in ("requested", "queued", "held"):
            patience -= 1
            if patience == 0:
                await self.call("lease.release", ById(lease.id), LeaseView)
                return
            lease = (await self.call("lease.wait", LeaseAwaited(lease.id, lease.state, 10.0), LeaseView)).lease
        if lease.state == "active":
            self.use(lease)
            for _ in range(self.chance.randint(0, 3)):
                await asyncio.sleep(self.chance.uniform(0.0, 8.0))
                await self.change(lease.id)
        if self.chance.random() < 0.6:
            await asyncio.sleep(self.chance.uniform(0.0, 5.0))
            await self.call("lease.release", ById(lease.id), LeaseView)

    def use(self, lease):
        """Start jobs, some of them late: the message was slow, and by then the devices may be another's."""
        for part in lease.parts:
            delay = self.chance.choice([0.05, self.chance.uniform(0, 3), self.chance.uniform(0, 40)])
            site = self.world.sites[part.site]
            if part.grants:
                self.world.loop.outside(delay, self.deliver_job, site, lease.id, part.grants)

    @staticmethod
    def deliver_job(site, lease_id, grants):
        if site.process.alive and site.service is not None:
            site.process.spawn(site.start_job(site.service, lease_id, grants))

    async def change(self, lease_id):
        chance = self.chance
        what = chance.choice(["renew", "renew", "resize", "revoke", "offer", "cordon"])
        try:
            match what:
                case "renew":
                    await self.call("lease.renew", LeaseRenewal(lease_id, chance.uniform(8.0, 40.0)), LeaseView)
                case "resize":
                    gpus = chance.randint(1, self.world.gpus)
                    await self.call("lease.resize", LeaseSize(lease_id, gpus), LeaseView)
                case "revoke":
                    grace = chance.choice([0.0, 3.0])
                    await self.call("lease.revoke", LeaseEnding(lease_id, "needed elsewhere", grace), LeaseView)
                case "offer":
                    tenant = f"tenant-{chance.randint(0, 2)}"
                    await self.call("lease.offer", LeaseOffer(lease_id, tenant), LeaseView)
                    view = await self.call("lease.accept", LeaseOffer(lease_id, tenant), LeaseView)
                    self.use(view.lease)
                case "cordon":
                    await self.cordon()
        except IbshellError as error:
            self.say(f"cannot {what} {lease_id}: {error.message}")

    async def cordon(self):
        site = self.chance.choice(list(self.world.sites.values()))
        device = self.chance.choice(site.inventory.devices()).uuid
        wanted = CordonWanted(site.name, self.chance.choice(["", device]), "maintenance")
        await self.call("site.cordon", wanted, CordonState)
        await asyncio.sleep(self.chance.uniform(0.0, 5.0))
        await self.call("site.uncordon", wanted, CordonState)
