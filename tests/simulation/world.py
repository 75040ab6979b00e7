"""A world of one hub, its sites and its clients, what goes wrong in it, and what must hold all the same."""

import asyncio
import functools
import hashlib
import logging
import random
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent import journal
from agent.config import HubConfig, SiteConfig, SiteEntry
from fedpool.errors import IbshellError
from fedpool.identity import certificates, requests
from fedpool.identity.keys import key_blob, public_line
from fedpool.identity.trust import Trust
from fedpool.records import Quota, Tenant
from fedpool.sim.scenario import SimulatedSite
from fedpool.transport.identity import Identity
from fedpool.wire.messages import TenantView
from simulation.audit import (
    Broken,
    HubAudit,
    hub_restarts_to_the_same,
    site_ledger_says_the_same,
    site_restarts_to_the_same,
)
from simulation.clients import FINAL, Client
from simulation.loop import Loop
from simulation.machines import HubMachine, SiteMachine
from simulation.network import KEEPALIVE_S, Network, Weather

FAULTS_S = 60.0
SIGNED_EVERY = 2  # every second world: requests are signed and sites believe no hub
HEALED_S = 400
LOOK_S = 10  # once all is well: how often it is asked whether the hub knows what the sites have
TRIES_MAX = 60
TOLD_S = 5.0  # after so long it does
SITES = (SimulatedSite("north", 1, 1, 2), SimulatedSite("south", 1, 2, 2), SimulatedSite("west", 1, 1, 3))


@functools.cache
def parties():
    """A directory with the keys of everybody; real ones, made once."""
    directory = Path(tempfile.mkdtemp(prefix="ibshell-simulation-"))
    for name in ("hub", *(site.name for site in SITES)):
        (directory / name).mkdir()
        Identity.create(directory / name / "identity")
    return directory


@functools.cache
def configurations():
    directory = parties()
    keys = {name: public_line(Identity.load(directory / name / "identity").public) for name in names()}
    entries = [SiteEntry(name, keys[name], address="simulated:1") for name in names() if name != "hub"]
    hub = HubConfig("simulated", "hub.sock", site=entries)
    return hub, {entry.name: SiteConfig(entry.name, "site.sock", SITES[0], keys["hub"]) for entry in entries}


class Signatures:
    """Keys and certificates of everybody who asks; real ones, made once."""

    POOL = "simulated@0123456789ab"

    def __init__(self):
        self.authority, self.key = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
        roles = ["operator", *(f"tenant/tenant-{number}" for number in range(3))]
        public = self.key.public_key().public_bytes_raw()
        self.certificate = certificates.issue(
            self.authority, certificates.USER, public, roles, "everybody", 1, (0, 1 << 40)
        )

    def trusted(self, config):
        line = public_line(self.authority.public_key().public_bytes_raw())
        return msgspec.structs.replace(config, pool=self.POOL, authorities=[line])

    def trust(self):
        return Trust(self.POOL, (key_blob(self.authority.public_key().public_bytes_raw()),))

    def sign(self, method, body, principal, unix, nonce):
        payload = requests.compose(self.POOL, method, body, principal, (), int(unix * 1000), nonce)
        return requests.sign(self.key, self.certificate, payload)


@functools.cache
def signatures():
    return Signatures()


def names():
    return ["hub", *(site.name for site in SITES)]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a time."""

    at: float
    kind: str
    who: str
    for_s: float = 0.0
    other: str = ""

    def __str__(self):
        return f"{self.at:.2f} s: {self.kind} {self.who} {self.other} {f'for {self.for_s:.1f} s' if self.for_s else ''}"


KINDS = (
    "kill",
    "step-kill",
    "power",
    "stop",
    "part",
    "part-one-way",
    "full",
    "slow-disk",
    "lying-disk",
    "jump",
    "zombie",
)


def forecast(chance):
    """What goes wrong in one world: not everything in each, so that rare things meet each other often enough."""
    kinds = chance.sample(KINDS, chance.randint(0, 5))
    faults = []
    for kind in kinds:
        for _ in range(chance.randint(1, 4)):
            who = chance.choice(names())
            other = chance.choice([name for name in names() if name != who])
            if kind.startswith("part") and chance.random() < 0.7:
                who, other = chance.sample(["hub", other if other != "hub" else who], 2)
            faults.append(Fault(chance.uniform(0.0, FAULTS_S), kind, who, chance.expovariate(1 / 8.0), other))
    if {"lying-disk", "power"} & set(kinds):
        # What was lost with the power, and how long it was away, only the time of day can tell: one or the other is wrong.
        faults = [fault for fault in faults if fault.kind != "jump"]
    return sorted(faults, key=lambda fault: fault.at)


class World:
    """One history.

    Args:
        seed: gives it.
        faults: what goes wrong, or None for the seed's own forecast.
        clients: how many, or None for the seed's own number.
    """

    def __init__(self, seed, faults=None, clients=None):
        self.seed = seed
        self.loop = Loop()
        self.trace = []
        self.failure = None
        self.over = False
        chance = self.chance("world")
        self.directory = parties()
        self.hub_config, self.site_configs = configurations()
        self.hub_config = msgspec.structs.replace(self.hub_config, strict=self.chance("strict").random() < 0.3)
        self.signatures = signatures() if seed % SIGNED_EVERY == 0 else None
        if self.signatures is not None:
            self.hub_config = self.signatures.trusted(self.hub_config)
            self.site_configs = {name: self.signatures.trusted(one) for name, one in self.site_configs.items()}
        self.network = Network(self.loop, self.chance)
        self.network.weather = Weather(
            delay_s=chance.choice([0.002, 0.02, 0.2]),
            late=chance.choice([0.0, 0.02, 0.2]),
            late_s=chance.choice([1.0, 12.0]),
            lost=chance.choice([0.0, 0.0, 0.005, 0.03]),
            twice=chance.choice([0.0, 0.0, 0.1]),
        )
        self.repeats = self.network.weather.twice > 0
        own = forecast(chance)
        self.faults = own if faults is None else faults
        self.hub = HubMachine(self, "hub")
        self.sites = {site.name: SiteMachine(self, site) for site in SITES}
        self.gpus = sum(len(site.inventory.devices()) for site in self.sites.values())
        number = chance.randint(1, 5)
        self.clients = [Client(self, n, 4) for n in range(number if clients is None else clients)]
        self.limits = {"tenant-0": 4} if chance.random() < 0.5 else {}
        self.hub_audit = HubAudit(self, self.limits)
        self.snapshot_every = chance.choice([10, 100, 20_000])

    # --- what parts of the world ask of it

    def chance(self, name):
        """Random numbers of one thing alone, so that leaving another thing out does not change them."""
        return random.Random(f"{self.seed}/{name}")

    def say(self, who, text):
        self.trace.append((self.loop.time(), who, text))

    def fail(self, error):
        """The world has broken a promise: it ends here."""
        if self.failure is None:
            self.failure = error
            self.say("world", f"BROKEN: {error}")
            self.loop.stop()

    def checked(self, check, *arguments):
        try:
            check(*arguments)
        except Broken as error:
            self.fail(error)

    def machines(self):
        return [self.hub, *self.sites.values()]

    def machine(self, name):
        return self.hub if name == "hub" else self.sites[name]

    # --- the history

    def run(self):
        """Let it happen; returns what broke, or None."""
        watcher = _Log(self)
        logging.getLogger("fedpool.transport.peer").addHandler(watcher)
        quiet = logging.getLogger("agent")
        level, quiet.level = quiet.level, logging.CRITICAL
        try:
            self.loop.outside(0.0, self.begin)
            with patch.object(journal, "SNAPSHOT_EVERY", self.snapshot_every):
                self.loop.run_forever()
        finally:
            logging.getLogger("fedpool.transport.peer").removeHandler(watcher)
            quiet.level = level
            self.over = True
            self.loop.end()
        return self.failure

    def begin(self):
        for machine in self.machines():
            machine.start()
        self.loop.outside(1.0, self.introduce)
        for fault in self.faults:
            self.loop.outside(1.0 + fault.at, self.strike, fault)
        self.loop.outside(FAULTS_S + 1.0, self.heal)

    def introduce(self):
        """Tenants; then the clients begin."""

        async def tenants():
            for number in range(3):
                name = f"tenant-{number}"
                quotas = (Quota("*", "*", 2, self.limits.get(name)),) if self.limits else ()
                while True:
                    try:
                        await self.clients[0].call("tenant.set", Tenant(name, quotas=quotas), TenantView)
                        break
                    except IbshellError:  # a disk may be full already
                        await asyncio.sleep(1.0)
            for client in self.clients:
                client.start()

        self.clients[0].process.spawn(tenants())

    def strike(self, fault):
        self.say("nemesis", str(fault))
        machine = self.machine(fault.who)
        process = machine.process
        match fault.kind:
            case "kill":
                process.kill()
            case "step-kill":
                process.killed_at_step = process.steps + 1 + machine.chance.randint(0, 200)
            case "power":
                machine.power_lost()
            case "stop":
                process.stop()
                self.loop.outside(fault.for_s, process.go_on)
            case "part" | "part-one-way":
                self.network.part(fault.who, fault.other, fault.kind == "part-one-way")
                self.loop.outside(fault.for_s, self.network.join)
            case "full":
                machine.disk.full = True
                self.loop.outside(fault.for_s, self.mend_disk, machine)
            case "slow-disk":
                machine.disk.slow_s = 2.0
                self.loop.outside(fault.for_s, self.mend_disk, machine)
            case "lying-disk":
                machine.disk.lies = True
                self.loop.outside(fault.for_s, self.mend_disk, machine)
            case "jump":
                machine.clock.offset_s += machine.chance.choice([-3600, -60, -15, 15, 60, 3600])
            case "zombie":
                # A second one is started while the first still runs: it takes the disk, the first goes on with what it has.
                machine.start()

    def mend_disk(self, machine):
        machine.disk.full = machine.disk.lies = False
        machine.disk.slow_s = 0.005
        machine.disk.volatile = 0

    def heal(self):
        """Nothing goes wrong any more."""
        self.say("nemesis", "everything is well from now on")
        self.network.weather = Weather()
        self.network.join()
        for machine in self.machines():
            self.mend_disk(machine)
            machine.process.go_on()
            machine.process.killed_at_step = 0
        # What was lost on the way before is noticed within the keepalive.
        for after_s in range(int(KEEPALIVE_S) + LOOK_S, HEALED_S, LOOK_S):
            self.loop.outside(after_s, self.look)
        self.loop.outside(HEALED_S, self.finish)

    def look(self):
        """What sites have now, the hub knows a moment later."""
        seen = {}
        for site in self.sites.values():
            if site.service is not None:
                leases = site.service.leases.machine.leases.values()
                seen |= {(site, lease.id): lease for lease in leases if lease.occupies}
        self.loop.outside(TOLD_S, self.checked, self.check_told, seen)

    def check_told(self, seen):
        if self.hub.service is None or not all(link.is_up for link in self.hub.service.links.values()):
            return
        for (site, lease_id), lease in seen.items():
            now = site.service.leases.machine.leases.get(lease_id)
            known = self.hub.service.gangs.machine.capacity.sites[site.name].leases.get(lease_id)
            told = known is not None and known.version >= lease.version
            told = told or (self.repeats and known is not None and in_essence(known) == in_essence(lease))
            if not told and now is not None and now.occupies:
                raise Broken(f"{site.name} has {lease}; {TOLD_S} s later the hub knows {known}")

    def finish(self):
        try:
            self.check_the_end()
        except Exception as error:  # whatever it is, this world is over
            self.fail(error)
        self.loop.stop()

    def check_the_end(self):
        """Everything has come to its end and nothing is left behind."""
        for client in self.clients:
            if not client.finished:
                raise Broken(f"{client.name} still waits for an answer")
        for lease in self.hub_audit.leases.values():
            if lease.state not in FINAL:
                raise Broken(f"{lease.id} is still {lease.state} at the hub: {lease.reason}")
            if lease.attempt & 0xFFFFF > TRIES_MAX:
                raise Broken(
                    f"{lease.id} was tried {lease.attempt & 0xFFFFF} times: a site that refuses is asked ever more seldom"
                )
        for site in self.sites.values():
            for lease in site.audit.leases.values():
                if lease.occupies:
                    raise Broken(f"{lease.id} is still {lease.state} at {site.name}")
            if site.jobs:
                raise Broken(f"jobs are left at {site.name}: {site.jobs}")
        hub_restarts_to_the_same(self)
        for site in self.sites.values():
            site_restarts_to_the_same(site)
            site_ledger_says_the_same(site)
        machine = self.hub.service.gangs.machine
        machine.check()
        if machine.tenants.held:
            raise Broken(f"tenants hold {machine.tenants.held} and there is no lease")
        free = int(machine.capacity.free.sum())
        cordoned = sum(len(site.cordoned()) for site in self.sites.values())
        if free != self.gpus - cordoned:
            raise Broken(f"the hub sees {free} of {self.gpus} devices free and nobody holds any")
        asked = {lease for client in self.clients for lease in client.asked}
        for lease_id in self.hub_audit.leases:
            if lease_id not in asked:
                raise Broken(f"there was a lease {lease_id} that nobody asked for")

    def digest(self):
        """A hash of everything that happened."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def lines(self):
        return [f"{time:10.4f}  {who:9} {text}" for time, who, text in self.trace]


def in_essence(lease):
    """A site's lease but for how it came to be so: an answer that was repeated and came twice is heard once."""
    return msgspec.structs.replace(lease, version=0, deadline=0.0)


class _Log(logging.Handler):
    """An exception inside an agent is a broken promise."""

    def __init__(self, world):
        super().__init__(logging.ERROR)
        self.world = world

    def emit(self, record):
        if record.exc_info and not self.world.over:
            error = record.exc_info[1]
            if not isinstance(error, Broken):
                lines = traceback.format_exception(error)
                error = Broken(f"{record.getMessage()}: {''.join(lines[-6:])}")
            self.world.fail(error)
