"""Real processes under leases: found by their mark, and ended by the devices they see."""

import asyncio
import sys

import pytest

from agent import clock
from agent.launchers import local
from agent.launchers.launcher import LocalLauncher

MARK = "zurich/0123abcd"


async def started(count):
    async with asyncio.timeout(10):
        while len(local.scan().get(MARK, {})) < count:  # noqa: ASYNC110 (nobody tells when a child's child is there)
            await asyncio.sleep(0.02)


def test_what_uses_other_devices_stays_when_a_lease_gives_some_back(tmp_path):
    """A process that does not say what it uses may use anything, so it ends too; a child is as its parent."""

    async def scene():
        async def start(name, *devices):
            directory = tmp_path / name
            directory.mkdir()
            sleeps = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'])"]
            return await local.start(MARK, devices, sleeps, {"PATH": "/usr/bin:/bin"}, directory)

        one, both, any_ = await start("one", "GPU-1"), await start("both", "GPU-1", "GPU-2"), await start("any", "0")
        await started(6)
        launcher = LocalLauncher()
        await launcher.end(MARK, ["GPU-2"])
        left = local.scan()[MARK]
        assert one.pid in left and len(left) == 2 and set(left.values()) == {frozenset({"GPU-1"})}
        assert "SIGKILL" in await both.wait() and "SIGKILL" in await any_.wait()
        await launcher.end(MARK)
        assert MARK not in local.scan() and "SIGKILL" in await one.wait()

    asyncio.run(scene())


def test_a_warning_reaches_only_what_uses_the_devices(tmp_path):
    async def scene():
        programs = []
        for device in ("GPU-1", "GPU-2"):
            directory = tmp_path / device
            directory.mkdir()
            programs.append(await local.start(MARK, [device], ["sleep", "60"], {"PATH": "/usr/bin:/bin"}, directory))
        launcher = LocalLauncher()
        await launcher.warn(MARK, ["GPU-2"])
        assert "SIGTERM" in await programs[1].wait()
        assert programs[0].pid in local.scan()[MARK]
        await launcher.end(MARK)
        await programs[0].wait()

    asyncio.run(scene())


@pytest.mark.parametrize("seen", ["", "0,1", "GPU-1,0", "all", "GPU-1"])
def test_positions_are_no_names(seen, tmp_path):
    async def scene():
        program = await local.start(MARK, seen.split(","), ["sleep", "60"], {"PATH": "/usr/bin:/bin"}, tmp_path)
        [found] = local.scan()[MARK].values()
        assert found == (frozenset({"GPU-1"}) if seen == "GPU-1" else None)
        await local.end(MARK, local.Scanner())
        await program.wait()

    asyncio.run(scene())


@pytest.mark.waits
def test_a_watchdog_outlives_its_agent_only_as_long_as_there_is_something_to_watch(tmp_path):
    async def scene():
        program = await local.start(MARK, ["GPU-1"], ["sleep", "60"], {"PATH": "/usr/bin:/bin"}, tmp_path)
        assert await LocalLauncher().uses(MARK, ["GPU-1"]) and not await LocalLauncher().uses(MARK, ["GPU-2"])
        watchdog = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "agent.launchers.watchdog", stdin=asyncio.subprocess.PIPE
        )
        watchdog.stdin.write(f"{MARK} {clock.now() + 3600}\nzurich/other {clock.now() + 3600}\n".encode())
        watchdog.stdin.close()  # the agent is gone
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watchdog.wait(), 1)
        await LocalLauncher().end(MARK)
        await program.wait()
        assert await asyncio.wait_for(watchdog.wait(), 20) == 0

    asyncio.run(scene())
