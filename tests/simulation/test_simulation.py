"""Hundreds of worlds in which everything goes wrong, and the proof that what goes wrong would be seen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.bugs import BUGS
from simulation.shrink import shrink
from simulation.world import World

BLOCK = 50


@pytest.mark.parametrize("block", range(10))
def test_every_promise_is_kept(block):
    """500 seeds: crashes at any await and any write, a network and disks that fail, clocks that jump, machines that stall."""
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        world = World(seed)
        assert world.run() is None, f"seed {seed}: {world.failure}; make replay SEED={seed}"


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug):
    """Within 200 seeds, each; and not by the worlds being broken without it."""
    with BUGS[bug]():
        found = next((seed for seed in range(200) if World(seed).run() is not None), None)
    assert found is not None, f"{bug} was planted and nobody noticed"
    assert World(found).run() is None


def test_a_failing_world_is_made_small():
    with BUGS["missing-fsync"]():
        seed = next(seed for seed in range(200) if len(World(seed).faults) > 3 and World(seed).run() is not None)
        world, faults, clients = shrink(seed)
        assert world.failure is not None and len(faults) < len(World(seed).faults)
        assert 1 <= clients <= len(World(seed).clients)


def test_one_seed_is_one_history():
    """Whatever the process and its hashes: the whole trace is the same."""
    code = "from simulation.world import World; w = World(31); w.run(); print(w.digest())"
    tests = Path(__file__).parents[1]
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": str(tests)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hashes in ("0", "1", "2")
    }
    assert len(digests) == 1
