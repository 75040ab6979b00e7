"""Deterministic simulation: the real hub and sites in one process, under virtual time, on a faulty network and faulty disks.

One seed gives one history, always. `python -m simulation SEED` replays one; see `__main__`.
"""
