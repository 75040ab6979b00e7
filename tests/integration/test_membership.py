"""Pools that sites and people join with a token; revoked keys, certificates that end and are renewed, another authority."""

import json
import os
import shutil
import subprocess
import sys
import time

import msgspec
import pytest

from fedpool.client.joining import accept
from fedpool.errors import IbshellError, NotAuthorised
from fedpool.identity import certificates, requests, roster, tokens
from fedpool.identity.authorities import parse_authority
from fedpool.identity.keys import key_blob, public_line
from fedpool.identity.principals import site_principal
from fedpool.records import Signed
from fedpool.transport.identity import Identity
from fedpool.wire.membership import JoinState
from fedpool.wire.messages import LeaseView, LeaseWanted
from ibshell import contexts
from ibshell.authority import Authority
from ibshell.operator import Operator
from ibshell.pool import free_ports

pytestmark = pytest.mark.integration


@pytest.fixture
def running():
    """Agents that end with the test."""
    processes = []
    yield processes
    for process in processes:
        process.terminate()
        process.communicate(timeout=20)


def up(pool):
    try:
        return pool.sites_up()
    except IbshellError:  # the hub is starting
        return set()


def test_sites_join_with_two_lines_and_take_part(make_pool, running):
    """One dials out, the other is dialled."""
    pool = make_pool(2, sites_a_process=2)
    token = pool.joined("zurich-7")
    pool.joined("basel-8", "--listen", f"127.0.0.1:{free_ports(1)[0]}")
    for name in ("zurich-7", "basel-8"):
        running.append(pool.agent("site", "--config", str(pool.work / name / "site.toml")))
    pool.until(lambda: {"zurich-7", "basel-8"} <= pool.sites_up())
    lease = pool.json("lease", "request", "-t", "a", "-g", "8", "--sites", "4")
    assert {part["site"] for part in lease["parts"]} == {"site-01", "site-02", "basel-8", "zurich-7"}
    pool.cli("lease", "release", lease["id"])
    modes = {row["name"]: row["mode"] for row in pool.rows("site")}
    assert (modes["basel-8"], modes["zurich-7"]) == ("dial", "reverse")
    pool.cli("fed", "run", str(pool.plan(rounds=1, sites=4)), "--out", "result")
    [entry] = json.loads((pool.work / "result" / "history.json").read_text())["rounds"]
    assert len(entry["survivors"]) == 4, "all know each other's keys by the roster"
    pool.until(lambda: {row["witnesses"] for row in pool.json("ledger", "verify")["items"]} == {"3 of 3"})
    # The hub starts anew and has not forgotten them; a token is worth nothing any more.
    pool.stop("hub")
    pool.start("hub")
    pool.until(lambda: len(up(pool)) == 4)
    again = pool.agent("join", token, "--state", "other")
    _, err = again.communicate(timeout=30)
    assert again.returncode == 4 and "no such invitation: it was used" in err
    pool.cli("site", "remove", "zurich-7", "--yes")
    pool.until(lambda: pool.sites_up() == {"site-01", "site-02", "basel-8"})
    assert "zurich-7" not in {row["name"] for row in pool.rows("site")}


@pytest.mark.waits
def test_a_site_that_lost_its_database_joins_again_and_begins_a_new_ledger(make_pool, running):
    pool = make_pool(2, sites_a_process=2)

    def whole():
        rows = {row["site"]: row for row in pool.json("ledger", "verify")["items"]}
        assert {row["result"] for row in rows.values()} == {"whole"}
        witnessed = {row["witnesses"] for row in rows.values()} == {"2 of 2"}
        return rows["zurich-7"]["key"] if witnessed else None

    def begin():
        pool.joined("zurich-7")
        running.append(pool.agent("site", "--config", str(pool.work / "zurich-7" / "site.toml")))
        pool.until(lambda: "zurich-7" in pool.sites_up())
        pool.cli("lease", "request", "-t", "a", "-g", "2", "--site", "zurich-7")
        return pool.until(whole)

    former = begin()
    running[0].terminate()
    running.pop().communicate(timeout=20)
    shutil.rmtree(pool.work / "zurich-7")
    pool.cli("site", "remove", "zurich-7", "--yes")
    assert begin() != former
    assert sorted(path.name for path in (pool.directory / "ledgers").glob("zurich-7*")) == [
        f"zurich-7.{former.split('+')[0].rpartition('/')[2]}.json",
        "zurich-7.json",
    ]


def test_a_wrong_authority_or_another_s_token_stops_the_join(pool):
    line = pool.cli("site", "invite", "basel").stdout.strip()
    token = tokens.parse(line)
    wrong = msgspec.structs.replace(token, authority=key_blob(bytes(range(32))))
    stopped = pool.agent("join", wrong.line(), "--state", "basel")
    _, err = stopped.communicate(timeout=30)
    assert stopped.returncode == 4 and "is of an authority that is not this pool's" in err
    # Somebody who has seen the number of the invitation, but not its secret.
    thief = msgspec.structs.replace(token, secret=bytes(16))
    stealing = pool.agent("join", thief.line(), "--state", "thief")
    [row] = pool.asks("basel")
    assert row["token"] == "WRONG"
    refused = pool.cli("site", "approve", "basel", status=4)
    assert "does not have the token" in refused.stderr
    stealing.kill()
    stealing.communicate()
    # Two who both have it: the operator learns that it has leaked.
    both = [pool.agent("join", line, "--state", name) for name in ("one", "two")]
    pool.until(lambda: len(pool.json("pool", "joins")["items"]) == 3)
    refused = pool.cli("site", "approve", "basel", status=4)
    assert "2 keys ask to join as 'basel' with one token" in refused.stderr
    for joining in both:
        joining.kill()
        joining.communicate()


@pytest.mark.parametrize("token", ["", "ibshell1.", "ibshell1.AAAA", "ibshell1." + "A" * 4000, "../../etc/passwd"])
def test_what_is_no_token_is_refused(pool, token):
    assert "no token" in pool.cli("pool", "join", token or " ", status=2).stderr


def test_guests_may_do_nothing_but_ask(pool):
    import asyncio

    from fedpool.errors import Refused, UsageError
    from fedpool.identity.trust import Trust
    from fedpool.transport import ssh
    from fedpool.transport.peer import Peer
    from fedpool.wire.membership import JoinWanted
    from fedpool.wire.messages import Listing, Nothing

    context = contexts.load(pool.client)
    hub = (pool.directory / "hub" / "hub.toml").read_text()
    address = next(line.split('"')[1] for line in hub.splitlines() if line.startswith("listen ="))
    identity = Identity.create(pool.work / "guest")
    identity.trust = Trust(context.pool, tuple(parse_authority(line, "it") for line in context.authorities))

    async def guest():
        connection = await ssh.dial(address, None, identity, "the hub", ssh.GUEST, "hub")
        peer = Peer(await ssh.open_channel(connection, ssh.CONTROL), "client", "guest")
        task = asyncio.create_task(peer.run())
        await peer.start()
        with pytest.raises(UsageError, match="nothing for a guest"):
            await peer.call("gpu.list", Nothing(), Listing)
        refusals = []
        for number in range(40):  # a guesser is slowed down
            try:
                await peer.call("join.ask", JoinWanted(f"{number:016x}", "x"), JoinState)
            except (NotAuthorised, Refused) as error:
                refusals.append(error.message)
        assert "too many ask to join" in refusals[-1] and "no such invitation" in refusals[0]
        connection.abort()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(guest())


def test_a_hub_that_shows_another_key_or_roster_is_found_out(pool, tmp_path):
    """The joiner's side: what a hub may answer, and what comes of it."""
    authority = Authority(pool.authority)
    token = tokens.parse(pool.cli("site", "invite", "bern").stdout.strip())
    identity, other = Identity.create(tmp_path / "identity"), Identity.create(tmp_path / "other")
    stranger = Identity.create(tmp_path / "stranger" / "identity")
    good = authority.issue(certificates.HOST, identity.public, ("site/bern",), "bern", 60.0)
    wrong = [
        authority.issue(certificates.HOST, other.public, ("site/bern",), "bern", 60.0),
        authority.issue(certificates.HOST, identity.public, ("site/basel",), "bern", 60.0),
        authority.issue(certificates.USER, identity.public, ("site/bern",), "bern", 60.0),
        Authority(tmp_path / "stranger").issue(certificates.HOST, identity.public, ("site/bern",), "bern", 60.0),
    ]
    for found in wrong:
        with pytest.raises(NotAuthorised):
            accept(token, identity, JoinState("approved", [found.line]))
    assert identity.certificate(certificates.HOST) is None
    theirs = Authority(tmp_path / "stranger").sign(
        roster.Roster(1, token.pool, 9, 0, (public_line(stranger.public),), {"bern": public_line(identity.public)})
    )
    with pytest.raises(NotAuthorised, match="names the authority of the token"):
        accept(token, identity, JoinState("approved", [good.line], [theirs]))
    accept(token, identity, JoinState("approved", [good.line]))
    assert identity.certificate(certificates.HOST) == good


def test_people_have_the_roles_they_were_invited_for(make_pool):
    pool = make_pool(2, sites_a_process=2)
    assert f"joined pool {pool.name} as tenant/oncology" in pool.person_joins("ana", "--tenant", "oncology")
    assert "as auditor" in pool.person_joins("ben", "--role", "auditor")
    ana, ben = pool.person("ana"), pool.person("ben")
    lease = pool.json("lease", "request", "-t", "oncology", "-g", "1", **ana)
    other = pool.json("lease", "request", "-t", "physics", "-g", "1")
    for words in (
        ("lease", "request", "-t", "physics", "-g", "1"),
        ("lease", "release", other["id"]),
        ("lease", "revoke", other["id"], "--reason", "mine"),
        ("site", "drain", "site-01"),
        ("tenant", "add", "chemistry"),
    ):
        assert "is needed" in pool.cli(*words, status=4, **ana).stderr
    assert "is needed" in pool.cli("site", "drain", "site-01", status=4, **ben).stderr
    assert {row["result"] for row in pool.json("ledger", "verify", **ben)["items"]} == {"whole"}
    shown = pool.json("pool", "show", **ana)
    assert shown["roles"] == ["tenant/oncology"] and shown["sites"] == ["site-01", "site-02"]
    # Revoked: no new lease, and what it has stays as it is until the operator ends it.
    pool.json("ledger", "verify", **ana)  # what is remembered of it makes the pool none of ana's machine
    pool.cli("pool", "revoke", "ana")
    refused = pool.cli("lease", "request", "-t", "oncology", "-g", "1", status=4, **ana)
    assert "expired or was revoked" in refused.stderr
    assert pool.json("lease", "show", lease["id"])["state"] == "active"
    states = {row["name"]: row["state"] for row in pool.json("pool", "members")["items"]}
    assert states == {"ana": "revoked", "ben": "in"}
    # A stolen key: its holder has a channel to the hub and signs all the same.
    stolen = contexts.PoolSigner(
        shown["pool"], contexts.load(pool.client).authorities, pool.work / "config-ana" / "pools" / pool.name
    )
    wanted = LeaseWanted("oncology", 1, 60.0, id="00000001")
    with pool.connect() as hub, pytest.raises(NotAuthorised, match="has been revoked"):
        hub.call("lease.request", stolen.sign("lease.request", wanted, "tenant/oncology"), LeaseView)
    assert {row["result"] for row in pool.json("ledger", "verify")["items"]} == {"whole"}, (
        "what was done before stays true"
    )


def test_a_certificate_that_has_ended_is_no_use_until_it_is_renewed(make_pool):
    pool = make_pool(1)
    pool.person_joins("ana", "--tenant", "oncology")
    ana = pool.person("ana")
    own = pool.work / "config-ana" / "pools" / pool.name
    identity = Identity.load(own / "identity")
    operator = Operator(pool.authority, contexts.load(pool.client).pool)
    ended = certificates.issue(
        Identity.load(pool.authority / "identity").signing,
        certificates.USER,
        identity.public,
        ("tenant/oncology",),
        "ana",
        5,
        (0, int(time.time()) - 1),
    )
    identity.install(ended)
    assert "expired" in pool.cli("gpu", "list", status=4, **ana).stderr
    renewing = subprocess.Popen(
        [sys.executable, "-m", "ibshell", "pool", "renew"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**pool.environment, **ana},
    )
    pool.until(lambda: [row for row in pool.json("pool", "joins")["items"] if row["token"] == "renewal"])
    assert "renewed: ana" in pool.cli("pool", "renew").stdout
    out, err = renewing.communicate(timeout=30)
    assert renewing.returncode == 0 and "the certificate holds for" in out, err
    assert len(pool.json("gpu", "list", **ana)["items"]) == 2
    assert operator.members()[public_line(identity.public)].name == "ana"


def test_a_site_s_certificate_is_renewed_without_a_restart(make_pool):
    pool = make_pool(1)
    path = pool.site_directory("site") / "identity"
    site, pid = Identity.load(path), pool.processes()["site"]
    short = Authority(pool.authority).issue(certificates.HOST, site.public, ("site/site",), "site", 600.0)
    site.install(short)
    pool.stop("hub")
    pool.start("hub")
    pool.until(pool.all_up)
    assert "renewed: site" in pool.cli("pool", "renew").stdout
    renewed = Identity.load(path).certificate(certificates.HOST)
    assert renewed.valid_before > short.valid_before + 3600
    assert pool.processes()["site"] == pid
    assert pool.cli("pool", "renew").stdout == ""


def test_a_pool_that_was_switched_off_for_longer_than_certificates_hold_comes_back(make_pool):
    pool = make_pool(2, start=False)  # the hub dials one, the other dials out
    paths = {site_principal(name): pool.site_directory(name) / "identity" for name in pool.site_names()}
    hub = pool.directory / "hub" / "identity"
    signing, now = Identity.load(pool.authority / "identity").signing, int(time.time())

    def end(kind, path, role):
        key = Identity.load(path)
        key.install(certificates.issue(signing, kind, key.public, (role,), role, 5, (now - 90_000, now - 10)))

    for role, path in paths.items():
        end(certificates.HOST, path, role)
    for kind in (certificates.HOST, certificates.USER):
        end(kind, hub, "hub")
    pool.start("hub")
    for name in pool.site_names():
        pool.start(name)
    pool.until(
        lambda: "expired at" in pool.log("site-01").read_text() and "expired at" in pool.log("site-02").read_text()
    )
    assert not pool.sites_up(), "sites do not obey a hub whose certificate has ended"
    pool.cli("pool", "renew")
    pool.until(pool.all_up)
    assert "renewed: site-01" in pool.cli("pool", "renew").stdout
    assert all(Identity.load(path).certificate(certificates.HOST).valid_before > now + 3600 for path in paths.values())
    found = Identity.load(hub).certificate(certificates.USER)
    assert found.valid_before - found.valid_after < 25 * 3600


def test_the_authority_changes_with_an_overlap(make_pool, running):
    pool = make_pool(2, sites_a_process=2)
    pool.person_joins("ana", "--tenant", "oncology")
    ana = pool.person("ana")
    before = pool.json("lease", "request", "-t", "oncology", "-g", "1", **ana)
    assert "the new authority: SHA256:" in pool.cli("pool", "rotate").stdout
    assert "being changed already" in pool.cli("pool", "rotate", status=5).stderr
    # In the overlap both are believed: ana's certificate is of the old, the operator's of the new.
    pool.cli("lease", "renew", before["id"], "--for", "2h", **ana)
    pool.cli("site", "drain", "site-02")
    pool.cli("site", "resume", "site-02")
    refused = pool.cli("pool", "rotate", "--finish", status=5).stderr
    assert "without a certificate of the new authority: site-01, site-02" in refused
    assert pool.cli("pool", "renew").stdout == "renewed: site-01\nrenewed: site-02\n"
    pool.cli("pool", "rotate", "--finish")
    pool.stop("hub")
    pool.start("hub")
    pool.until(pool.all_up)
    pool.cli("lease", "request", "-t", "physics", "-g", "1")
    assert "certificate" in pool.cli("lease", "renew", before["id"], "--for", "2h", status=4, **ana).stderr
    assert {row["result"] for row in pool.json("ledger", "verify", "--full")["items"]} == {"whole"}
    # Who joins now never believed the old one, whose rosters the hub keeps for those who were away.
    pool.person_joins("ben", "--tenant", "oncology")
    ben = pool.person("ben")
    pool.cli("lease", "request", "-t", "oncology", "-g", "1", **ben)
    assert pool.json("ledger", "verify", **ben)["items"]
    pool.joined("zurich")
    running.append(pool.agent("site", "--config", str(pool.work / "zurich" / "site.toml")))
    pool.until(lambda: "zurich" in pool.sites_up())
    pool.until(
        lambda: [row for row in pool.json("ledger", "log", "--kind", "roster")["items"] if row["site"] == "zurich"]
    )
    assert not pool.json("ledger", "log", "--kind", "refusal", "--site", "zurich")["items"]


def test_the_authority_may_live_in_ssh_agent(make_pool, need):
    need("ssh-agent", "openssh-client")
    pool = make_pool(1, start=False)
    started = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True).stdout
    variables = dict(
        line.split(";")[0].split("=", 1)
        for line in started.splitlines()
        if line.startswith(("SSH_AUTH_SOCK", "SSH_AGENT_PID"))
    )
    try:
        pool.environment.update(variables)
        private = pool.authority / "identity"
        subprocess.run(["ssh-add", "-q", str(private)], env={**os.environ, **variables}, check=True)
        private.unlink()
        pool.start_all()
        pool.person_joins("ana", "--tenant", "oncology")
        assert len(pool.json("gpu", "list", **pool.person("ana"))["items"]) == 2
        pool.cli("pool", "revoke", "ana")
        subprocess.run(["ssh-add", "-q", "-D"], env={**os.environ, **variables}, check=True)
        assert "ssh-add -l" in pool.cli("pool", "revoke", "12345", status=1).stderr
    finally:
        os.kill(int(variables["SSH_AGENT_PID"]), 15)


def test_a_member_s_key_may_live_in_ssh_agent(make_pool, need, tmp_path):
    need("ssh-agent", "openssh-client")
    pool = make_pool(1)
    started = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True).stdout
    variables = dict(
        line.split(";")[0].split("=", 1)
        for line in started.splitlines()
        if line.startswith(("SSH_AUTH_SOCK", "SSH_AGENT_PID"))
    )
    try:
        private = tmp_path / "key"
        Identity.create(private)
        subprocess.run(["ssh-add", "-q", str(private)], env={**os.environ, **variables}, check=True)
        private.unlink()
        ana = {**pool.person("ana"), **variables}
        token = pool.cli("pool", "invite", "--tenant", "oncology", "--name", "ana").stdout.strip()
        joining = subprocess.Popen(
            [sys.executable, "-m", "ibshell", "pool", "join", token, "--key", str(tmp_path / "key.pub")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**pool.environment, **ana},
        )
        pool.until(lambda: pool.json("pool", "joins")["items"])
        pool.cli("pool", "approve", "ana")
        _, err = joining.communicate(timeout=30)
        assert joining.returncode == 0, err
        lease = pool.json("lease", "request", "-t", "oncology", "-g", "1", **ana)
        pool.cli("lease", "release", lease["id"], **ana)
        assert not list((pool.work / "config-ana").rglob("identity")), "the private key is nowhere on the disk"
        subprocess.run(["ssh-add", "-q", "-D"], env={**os.environ, **variables}, check=True)
        assert "ssh-add -l" in pool.cli("gpu", "list", status=4, **ana).stderr
    finally:
        os.kill(int(variables["SSH_AGENT_PID"]), 15)


def test_a_stock_sshd_believes_the_authority_and_the_revocation_list(make_pool, need, tmp_path):
    sshd = need("sshd", "openssh-server")
    pool = make_pool(1)
    pool.person_joins("ana", "--tenant", "oncology")
    own = pool.work / "config-ana" / "pools" / pool.name
    krl, [port] = tmp_path / "krl", free_ports(1)
    pool.cli("pool", "krl", str(krl))
    Identity.create(tmp_path / "host_key")
    (tmp_path / "principals").write_text("tenant/oncology\n")
    (tmp_path / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host_key\nStrictModes no\nUsePAM no\nPidFile none\n"
        f"TrustedUserCAKeys {pool.authority}/identity.pub\nAuthorizedPrincipalsFile {tmp_path}/principals\n"
        f"RevokedKeys {krl}\nPasswordAuthentication no\n"
    )
    server = subprocess.Popen([sshd, "-D", "-E", str(tmp_path / "log"), "-f", str(tmp_path / "config")])
    ssh = ["ssh", "-F", "none", "-p", str(port), "-i", str(own / "identity"), "-o", "BatchMode=yes"]
    ssh += ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={tmp_path}/known", "127.0.0.1", "true"]
    try:
        pool.until(lambda: subprocess.run(ssh, capture_output=True).returncode == 0)
        pool.cli("pool", "revoke", "ana")
        pool.cli("pool", "krl", str(krl))
        done = subprocess.run(ssh, capture_output=True, text=True)
        assert done.returncode == 255 and "Permission denied" in done.stderr
    finally:
        server.terminate()
        server.wait()


def test_a_roster_that_no_authority_signed_is_refused_and_recorded(pool, tmp_path):
    """A hub that makes up a roster, shows an old one, or one of another pool."""
    from fedpool.identity.trust import Trust

    known: Signed = msgspec.json.decode((pool.authority / "roster.json").read_bytes(), type=Signed)
    true = roster.read(known)
    trust = Trust(true.pool, true.authority_keys())
    Identity.create(tmp_path / "identity")
    stranger = Authority(tmp_path)
    forged = stranger.sign(msgspec.structs.replace(true, number=true.number + 1))
    with pytest.raises(NotAuthorised, match="no authority of this pool has signed"):
        trust.adopt(forged)
    other = Authority(pool.authority).sign(msgspec.structs.replace(true, pool="other@000000000000", number=99))
    with pytest.raises(NotAuthorised, match="a roster of the pool 'other@"):
        trust.adopt(other)
    assert trust.adopt(known).number == true.number
    from fedpool.errors import Refused

    with pytest.raises(Refused, match="is known already"):
        trust.adopt(known)
    bent = Signed(known.payload.replace(b'"number":', b'"number":1'), known.signature)
    with pytest.raises(NotAuthorised):
        trust.adopt(bent)


def test_a_roster_that_the_hub_withholds_is_missed(pool):
    """Somebody has it from the operator; the sites have recorded that they go by an earlier one."""
    assert {row["result"] for row in pool.json("ledger", "verify")["items"]} == {"whole"}
    known = roster.read(msgspec.json.decode((pool.client / "roster.json").read_bytes(), type=Signed))
    later = msgspec.structs.replace(known, number=known.number + 1, time_ms=known.time_ms - 3_600_000)
    (pool.client / "roster.json").write_bytes(msgspec.json.encode(Authority(pool.authority).sign(later)))
    found = json.loads(pool.cli("ledger", "verify", "-o", "json", status=9).stdout)["findings"]
    assert {finding["site"] for finding in found} == set(pool.site_names())
    assert all(
        f"goes by roster {known.number}; the pool's authority has signed roster {later.number}" in finding["problem"]
        for finding in found
    )


def test_a_forged_request_is_refused_by_the_site_and_stands_in_its_ledger(make_pool):
    """What a malicious hub could put to a site: the site's own socket, as the hub's bridge has it."""
    from fedpool.leasing.requests import Hold
    from fedpool.records import Shape, SiteLease

    pool = make_pool(1, start=False)
    pool.start("site")
    path = pool.sockets / "site.sock"
    pool.until(path.exists)
    stranger = Identity.create(pool.work / "stranger" / "identity")
    own = contexts.load(pool.client).pool
    wanted = LeaseWanted("oncology", 1, 60.0, id="00000001")
    payload = requests.compose(own, "lease.request", wanted, "tenant/oncology", (), time.time_ns() // 1_000_000, "00")
    made_up = certificates.issue(
        stranger.signing, certificates.USER, stranger.public, ("tenant/oncology",), "x", 1, (0, 1 << 40)
    )
    shape = Shape(kinds=("h100",))
    with pool.bridge("site") as hub:
        for signed in (None, requests.sign(stranger.signing, made_up, payload)):
            with pytest.raises(NotAuthorised):
                hub.call("lease.hold", Hold("00000001", "oncology", 1, 10.0, 1, shape, 60.0, 1, signed), SiteLease)
    pool.start("hub")
    pool.until(pool.all_up)
    refusals = pool.json("ledger", "log", "--kind", "refusal")["items"]
    assert [row["said"]["lease"] for row in refusals] == ["00000001", "00000001"]
    assert "without a signed request" in refusals[0]["what"] and "not this pool's" in refusals[1]["what"]
    assert pool.json("status")["gpus_free"] == 2
