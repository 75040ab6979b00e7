"""Run worlds until stopped, or replay one.

python -m simulation                  from a random seed on, until Ctrl-C; exit status 1 at the first that fails
python -m simulation --from 0 --count 500
python -m simulation 4711             replay one and print its whole trace
python -m simulation 4711 --bug missing-fsync
"""

import argparse
import contextlib
import random
import sys
import time

from simulation.bugs import BUGS
from simulation.shrink import shrink
from simulation.world import World


def main():
    parser = argparse.ArgumentParser(prog="simulation", description="worlds of one hub, three sites and their clients")
    parser.add_argument("seed", type=int, nargs="?", help="replay this one")
    parser.add_argument("--from", dest="first", type=int, default=None, help="first seed")
    parser.add_argument("--count", type=int, default=None, help="how many, for ever where not given")
    parser.add_argument("--bug", choices=BUGS, help="plant a bug")
    arguments = parser.parse_args()
    with BUGS[arguments.bug]() if arguments.bug else contextlib.nullcontext():
        try:
            return replay(arguments.seed) if arguments.seed is not None else soak(arguments.first, arguments.count)
        except KeyboardInterrupt:
            print("\nstopped")
            return 0


def replay(seed):
    world = World(seed)
    failure = world.run()
    print("\n".join(world.lines()))
    print(f"seed {seed}: {failure or 'every promise kept'}; history {world.digest()[:16]}")
    return 1 if failure else 0


def soak(first, count):
    first = random.randrange(10**9) if first is None else first
    started = time.monotonic()
    number = 0
    while count is None or number < count:
        if World(first + number).run() is not None:
            return report(first + number)
        number += 1
        if number % 100 == 0:
            rate = number / (time.monotonic() - started)
            print(f"{number} worlds from seed {first} on, every promise kept; {rate:.0f} a second", flush=True)
    return 0


def report(seed):
    print(f"seed {seed} breaks a promise; looking for the smallest world that does")
    world, faults, clients = shrink(seed, lambda text: print(f"  {text}", flush=True))
    print("\n".join(world.lines()))
    print(f"\n{world.failure}\nseed {seed}, {clients} clients, {len(faults)} faults:")
    print("\n".join(f"  {fault}" for fault in faults))
    print(f"replay: make replay SEED={seed}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
