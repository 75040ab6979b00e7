"""Names that others choose reach no file outside their place, break no log line and no terminal; secrets stay where they are."""

from pathlib import Path

import msgspec
import pytest

from fedpool.errors import IbshellError
from fedpool.identity import tokens
from fedpool.wire.membership import InviteWanted, JoinApproved, SiteNamed
from fedpool.wire.messages import ById, LeaseWanted, Nothing, RunWanted, Upload, UploadState
from ibshell import contexts

pytestmark = pytest.mark.integration

HOSTILE = [
    "../../../../tmp/ibshell-escaped",
    "/tmp/ibshell-escaped",
    "a/../../b",
    "..",
    "a\x00b",
    "a\nagent.hub: lease 00000000 is released",
    "\x1b[31mred",
    "x" * 5000,
    "-rf",
    "",
]


def logs(pool):
    return [path.read_text() for path in pool.directory.rglob("agent.log")]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused_and_leave_nothing(pool, name):
    """Said to the hub with the operator's own signature: even then."""
    asks = [
        ("pool.invite", InviteWanted(name, "operator", "x", 60.0)),
        ("pool.invite", InviteWanted("0" * 16, name, "x", 60.0)),
        ("pool.invite", InviteWanted("0" * 16, "operator", name, 60.0)),
        ("pool.approve", JoinApproved(name, name)),
        ("site.remove", SiteNamed(name)),
        ("lease.release", ById(name or "-")),
    ]
    for method, body in asks:
        with pool.connect() as hub, pytest.raises(IbshellError) as found:
            signed = hub.signer.sign(method, body, "operator")
            hub.call(method, signed, Nothing)
        assert "inside the agent" not in found.value.message, (method, found.value.message)
    with pool.connect() as hub, pytest.raises(IbshellError) as found:
        hub.call("upload", Upload(name, 0, b"x", True), UploadState)
    assert "inside the agent" not in found.value.message
    with pytest.raises(IbshellError) as found:
        pool.ask("lease.request", LeaseWanted("oncology", 1, 60.0, id=name or "-", avoid=[name]), Nothing)
    assert "inside the agent" not in found.value.message
    wanted = RunWanted("plan", "0" * 8, name or "-", LeaseWanted("oncology", 1, 60.0, id="00000001"))
    with pytest.raises(IbshellError) as found:
        pool.ask("fed.run", wanted, Nothing)
    assert "inside the agent" not in found.value.message
    with pytest.raises(IbshellError):
        contexts.joined_directory(name)
    assert not list((pool.directory.parent).glob("**/ibshell-escaped*"))
    for text in logs(pool):
        assert "\x1b" not in text and "\nagent.hub: lease 00000000" not in text


def test_a_token_that_names_a_pool_outside_its_place(pool, tmp_path):
    true = tokens.parse(pool.cli("pool", "invite", "--tenant", "oncology").stdout.strip())
    bent = msgspec.structs.replace(true, pool="../../escaped@0").line()
    variables = {"IBSHELL_CONFIG_DIR": str(tmp_path / "config"), "IBSHELL_STATE_DIR": str(tmp_path / "state")}
    assert "is no name of a pool" in pool.cli("pool", "join", bent, status=2, **variables).stderr
    assert not list(tmp_path.rglob("*escaped*"))


def test_no_secret_reaches_a_log_a_command_line_or_an_error(make_pool):
    pool = make_pool(2)
    line = pool.cli("pool", "invite", "--tenant", "oncology", "--name", "ana").stdout.strip()
    secret = tokens.parse(line).secret
    pool.cli("lease", "request", "-t", "oncology", "-g", "1")
    refused = pool.cli("pool", "approve", "ana", status=3).stderr
    private = [path.read_text().splitlines()[2] for path in pool.directory.rglob("identity") if path.is_file()]
    said = logs(pool)
    for pid in pool.processes().values():
        said += [Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace") for name in ("cmdline", "environ")]
    for text in (*said, refused):
        assert line not in text and secret.hex() not in text
        assert not any(key in text for key in private)
    # What the hub keeps of an invitation is of no use to it.
    database = b"".join(path.read_bytes() for path in (pool.directory / "hub").glob("hub.db*"))
    assert secret not in database and secret.hex().encode() not in database
