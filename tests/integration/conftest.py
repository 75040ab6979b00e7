"""Real pools of real processes, in directories of their own, gone at the end of each test."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from integration.etcd_cluster import Cluster
from safetensors.numpy import save_file

from fedpool.client.acting import act
from fedpool.client.connection import Connection
from fedpool.errors import IbshellError
from fedpool.identity.keys import fingerprint
from fedpool.leasing.roles import MAY
from fedpool.sim.scenario import SimulatedSite
from fedpool.transport.identity import Identity
from fedpool.wire.messages import Listing, Nothing
from ibshell.pool import LocalPool

PROGRAM = """
import sys, time
import numpy as np
import fedpool.client as fed

with fed.join() as federation:
    for round in federation:
        c = round.config
        params = {name: np.array(value) for name, value in round.params.items()}
        if round.kind == "evaluate":
            round.report(weight=1 + int(federation.site[-1]), metrics={"distance": abs(float(params["w"][0]) - 0.6)})
            continue
        params["w"] = params["w"] + np.float32(c.get("step", 0.25))
        time.sleep(c.get("sleep", 0))
        mine = federation.site == c.get("victim", "")
        if mine and round.number == c.get("in_round", 1):
            match c.get("does", ""):
                case "crash": sys.exit("I give up")
                case "hang":
                    open(__file__ + ".hangs", "w").close()
                    time.sleep(600)
                case "slow": time.sleep(2)
                case "nan": params["w"][3] = np.nan
                case "shape": params["w"] = params["w"][:2]
                case "drop": del params["w"]
                case "weight": round.submit(params, weight=10**9, metrics={"loss": 1.0})
                case "metric": round.submit(params, weight=1)
        weight = 1 + int(federation.site[-1])
        round.submit(params, weight=weight, metrics={"loss": float(weight)})
"""


def _toml(value):
    """A value as TOML writes it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return "[" + ", ".join(map(_toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


class Pool(LocalPool):
    """A pool for one test, with shortcuts."""

    def ask(self, method, body=None, expect=Listing):
        with self.connect() as hub:
            if method in MAY:
                return act(hub, method, body, expect)
            return hub.call(method, Nothing() if body is None else body, expect)

    def rows(self, noun):
        return self.ask(f"{noun}.list").items

    def until(self, condition, timeout_s=30.0):
        """Wait until a condition holds; returns what it returned."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = condition()
            if found:
                return found
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.05)

    def sites_up(self):
        return {row["name"] for row in self.rows("site") if row["state"] == "up"}

    def all_up(self):
        """Whether the hub answers and has all its sites."""
        try:
            return len(self.sites_up()) == len(self.site_names())
        except IbshellError:
            return False

    def cli(self, *words, status=0, timeout_s=120, **variables):
        """Run a command against this pool; checks its exit status, if one is expected, and returns the finished process."""
        done = subprocess.run(
            [sys.executable, "-m", "ibshell", *words],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.work,
            env={**self.environment, **variables},
        )
        assert status in (None, done.returncode), f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *words, **more):
        return json.loads(self.cli(*words, "-o", "json", **more).stdout)

    def background(self, *words):
        return subprocess.Popen(
            [sys.executable, "-m", "ibshell", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.work,
            env=self.environment,
        )

    def agent(self, *words):
        """A process of ibshell-agent's, where no pool is made in advance."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "agent.main", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.work,
            env=self.environment,
        )

    def asks(self, name):
        """Wait until somebody asks to join; how the operator sees them."""
        return self.until(lambda: [row for row in self.json("pool", "joins")["items"] if row["name"] == name])

    def joined(self, name, *words):
        """Let a new site join; returns its token, which is worth nothing any more."""
        token = self.cli("site", "invite", name).stdout.strip()
        joining = self.agent("join", token, "--state", name, *words)
        [row] = self.asks(name)
        assert row["token"] == "right"
        self.cli("site", "approve", name)
        out, err = joining.communicate(timeout=30)
        assert joining.returncode == 0, err
        assert "joined; start the agent: ibshell-agent site --config" in out
        assert fingerprint(Identity.load(self.work / name / "identity").public) in err, "people compare fingerprints"
        return token

    def person(self, name):
        """The environment of another user."""
        return {
            "IBSHELL_CONFIG_DIR": str(self.work / f"config-{name}"),
            "IBSHELL_STATE_DIR": str(self.work / f"state-{name}"),
            "IBSHELL_POOL": self.name,
        }

    def person_joins(self, name, *words):
        """Let another user join; returns what they were told."""
        token = self.cli("pool", "invite", "--name", name, *words).stdout.strip()
        joining = subprocess.Popen(
            [sys.executable, "-m", "ibshell", "pool", "join", token],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment, **self.person(name)},
        )
        self.until(lambda: self.json("pool", "joins")["items"])
        self.cli("pool", "approve", name)
        out, err = joining.communicate(timeout=30)
        assert joining.returncode == 0, err
        return out

    def bridge(self, site):
        """A control channel to a site, as the hub has it where `ibshell-agent stdio` opens it."""
        sock = socket.socket(socket.AF_UNIX)
        self.until(lambda: sock.connect_ex(str(self.sockets / f"{site}.sock")) == 0)
        sock.sendall(b"fedpool\n")
        return Connection(sock, "hub", "hub", "the site")

    def plan(self, config=None, **changes):
        """Write a plan, its program and its initial parameters; returns the plan's path."""
        program = self.work / "train.py"
        program.write_text(PROGRAM)
        save_file({"w": np.zeros(4, np.float32), "steps": np.array(7, np.int64)}, self.work / "initial.safetensors")
        values = {
            "name": "test",
            "tenant": "oncology",
            "sites": len(self.site_names()),
            "program": ["{python}", str(program)],
            "initial": "initial.safetensors",
            "rounds": 3,
            "minimum_cohort": 3,
            "max_weight": 10,
            "metrics": ["loss"],
            "deadline": "20s",
            **changes,
        }
        lines = [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        lines += ["[config]", *(f"{key} = {_toml(value)}" for key, value in (config or {}).items())]
        path = self.work / "plan.toml"
        path.write_text("\n".join(lines) + "\n")
        return path


_LIVING = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """What the agents wrote last stands beside a failure: they and their logs are gone when it is read."""
    report = yield
    if report.failed:
        for pool in _LIVING:
            for name in ("hub", *pool.site_names()):
                log = pool.log(name)
                written = log.read_text(errors="replace").splitlines() if log.exists() else []
                report.sections.append((f"log of {name} in {pool.name}", "\n".join(written[-30:])))
    return report


@contextmanager
def pools():
    """Makes pools in a directory of their own and ends them."""
    with (
        tempfile.TemporaryDirectory(prefix="ibt-", ignore_cleanup_errors=True) as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        base = Path(directory)
        for name, part in (("STATE", "state"), ("RUNTIME", "run"), ("CONFIG", "config")):
            patch.setenv(f"IBSHELL_{name}_DIR", str(base / part))
        made = []

        def make(
            sites,
            start=True,
            sites_a_process=1,
            reverse=lambda position: position % 2 == 1,
            authority=None,
            **described,
        ):
            name = f"p{len(made)}"
            pool = Pool(name, tied=True)
            pool.work = base / "work"
            pool.work.mkdir(exist_ok=True)
            pool.environment = {**os.environ, "IBSHELL_POOL": name, "NO_COLOR": "1"}
            made.append(pool)
            _LIVING.append(pool)
            pool.create(SimulatedSite("site", sites, **described).named(), reverse, authority=authority)
            if start:
                pool.start_all(sites_a_process=sites_a_process)
            return pool

        try:
            yield make
        finally:
            for pool in made:
                _LIVING.remove(pool)
                pool.stop_all()


@pytest.fixture
def make_etcd(need, tmp_path):
    """Make a real etcd: `make_etcd(3)` has three members."""
    made = []

    def make(members=1):
        directory = tmp_path / f"etcd-{len(made)}"
        directory.mkdir()
        made.append(Cluster(directory, need("etcd", "etcd-server"), members))
        return made[-1]

    try:
        yield make
    finally:
        for cluster in made:
            cluster.stop()


@pytest.fixture
def make_pool():
    """Make a pool: `make_pool(4)` has four sites of one node with two GPUs."""
    with pools() as make:
        yield make


@pytest.fixture
def pool(make_pool):
    """Four sites, for one test; they share a process."""
    return make_pool(4, sites_a_process=4)


@pytest.fixture(scope="module")
def shared_pool():
    """Four sites, for tests that change nothing."""
    with pools() as make:
        yield make(4, sites_a_process=4)
