"""Sixteen real clients at once over three sites: what they were told is what they would have been told one after the other."""

import itertools
import os
import random
import threading
import time
from dataclasses import dataclass, field

import pytest

from fedpool.client.acting import act
from fedpool.errors import Insufficient
from fedpool.wire.messages import ById, LeaseView, LeaseWanted

pytestmark = pytest.mark.integration

CLIENTS = 16
SECONDS = 6.0


@dataclass
class Operation:
    """What a client asked between two moments, and what it was told: {device: token} of a request (none: refused).

    The release of a gang is one operation a site: its devices come free site by site, all of them before the answer.
    """

    invoked: float
    kind: str
    lease: str
    gpus: int
    completed: float = 0.0
    tokens: dict = field(default_factory=dict)
    why: str = ""


def exclusive(history):
    """Whether every device had one holder at a time, in the order of its tokens."""
    ends = {(op.lease, device): op.invoked for op in history if op.kind == "release" for device in op.tokens}
    held = {}
    for op in history:
        if op.kind == "request":
            for device, token in op.tokens.items():
                held.setdefault(device, []).append((token, op.completed, ends.get((op.lease, device), float("inf"))))
    for turns in held.values():
        turns.sort()
        for (token, _, until), (later, since, _) in itertools.pairwise(turns):
            if token == later or until > since:
                return False
    return True


def consistent(history, devices):
    """Whether some serial order that keeps the order of what did not overlap explains every answer (Wing and Gong 1993).

    The order is of how many devices were had: which of those that are free a lease gets, its site chooses a moment later. What has
    been put in order determines how many are had, so a set that led nowhere once is not tried again. A refusal changes nothing,
    so it is put in order as soon as it is explained.
    """
    history = sorted(history, key=lambda op: op.invoked)
    numbers = {op.lease: number for number, op in enumerate(history) if op.kind == "request"}
    before = {number: numbers[op.lease] for number, op in enumerate(history) if op.kind == "release"}

    def legal(op, held):
        if op.kind == "release":
            return True
        return (held + op.gpus <= devices) if op.tokens else (held + op.gpus > devices)

    def window(base, done):
        """What may come next: invoked before anything that is left was completed."""
        left, ends, at = [], float("inf"), base
        while at < len(history) and history[at].invoked <= ends:
            if at not in done:
                left.append(at)
                ends = min(ends, history[at].completed)
            at += 1
        return [number for number in left if history[number].invoked <= ends]

    def settled(base, done, held):
        """With every refusal in order that is explained now."""
        while True:
            while base in done:
                done = done - {base}
                base += 1
            found = {n for n in window(base, done) if not history[n].tokens and history[n].kind == "request"}
            explained = {n for n in found if legal(history[n], held)}
            if not explained:
                return base, done, held
            done = done | explained

    stack, tried = [settled(0, frozenset(), 0)], set()
    while stack:
        base, done, held = stack.pop()
        if base == len(history):
            return True
        if (base, done) in tried:
            continue
        tried.add((base, done))
        ready = [n for n in window(base, done) if legal(history[n], held)]
        ready = [n for n in ready if n not in before or before[n] < base or before[n] in done]
        for number in sorted(ready, key=lambda n: -history[n].completed):
            op = history[number]
            after = held + len(op.tokens) * (-1 if op.kind == "release" else 1)
            stack.append(settled(base, done | {number}, after))
    return False


def test_the_checker_sees_what_is_wrong():
    def op(invoked, completed, kind, lease, gpus, **tokens):
        return Operation(invoked, kind, lease, gpus, completed, tokens)

    one = op(0, 1, "request", "a", 1, x=1)
    assert consistent([one, op(2, 3, "release", "a", 1, x=1), op(4, 5, "request", "b", 1, x=2)], 1)
    assert consistent([one, op(0.5, 3, "request", "b", 1)], 1), "refused while the other had it"
    assert not consistent([one, op(2, 3, "request", "b", 1, x=2)], 1), "given twice"
    assert not exclusive([one, op(2, 3, "request", "b", 1, x=2)]), "given twice"
    assert not exclusive([one, op(2, 3, "release", "a", 1, x=1), op(4, 5, "request", "b", 1, x=1)]), "an old token"
    assert exclusive([one, op(2, 3, "release", "a", 1, x=1), op(4, 5, "request", "b", 1, x=2)])
    assert not consistent([op(2, 3, "request", "b", 1)], 1), "refused and nobody had it"


def test_every_answer_is_explained_by_some_serial_order(make_pool):
    pool = make_pool(3, nodes=1, gpus_per_node=4)
    history, lock = [], threading.Lock()
    until = time.monotonic() + SECONDS

    def client(number):
        chance = random.Random(number)
        with pool.connect() as hub:
            while time.monotonic() < until:
                gpus, lease = chance.choice([1, 1, 2, 3, 6, 12]), os.urandom(4).hex()
                asked = Operation(time.monotonic(), "request", lease, gpus)
                try:
                    view = act(hub, "lease.request", LeaseWanted(f"t{number}", gpus, 600.0, id=lease), LeaseView)
                    asked.tokens = {g.uuid: g.token for part in view.lease.parts for g in part.grants}
                    assert view.lease.state == "active" and len(asked.tokens) == gpus
                except Insufficient as error:
                    asked.why = error.message
                asked.completed = time.monotonic()
                with lock:
                    history.append(asked)
                if asked.tokens:
                    time.sleep(chance.uniform(0, 0.05))
                    began = time.monotonic()
                    act(hub, "lease.release", ById(lease), LeaseView)
                    ended = time.monotonic()
                    with lock:
                        for part in view.lease.parts:
                            tokens = {grant.uuid: grant.token for grant in part.grants}
                            history.append(Operation(began, "release", lease, gpus, ended, tokens))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    granted = sum(op.kind == "request" and bool(op.tokens) for op in history)
    refused = sum(op.kind == "request" and not op.tokens for op in history)
    assert granted > 50 and refused > 50, f"{granted} granted, {refused} refused: not much of a contest"
    assert exclusive(history), "a device had two holders at once"
    assert consistent(history, 12), f"no serial order explains {len(history)} answers"
