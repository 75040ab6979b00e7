"""An event loop under virtual time, with processes that can be killed, stopped and continued between any two steps.

A step is what runs between two awaits. Which process a step belongs to travels with its context, so that everything a service
starts belongs to it. A killed process simply takes no further step: no `finally` runs, as after kill -9.
"""

import asyncio
import contextvars
import warnings
from asyncio import base_events, events

PROCESS = contextvars.ContextVar("process", default=None)


class Deadlock(AssertionError):
    """Nothing will ever happen again."""


class Process:
    """One simulated process.

    Attributes:
        steps: how many it has taken.
        killed_at_step: it is killed instead of taking this step, 0 for never.
    """

    def __init__(self, loop, name, on_kill):
        self.loop = loop
        self.name = name
        self.alive = True
        self.stopped = False
        self.steps = 0
        self.killed_at_step = 0
        self.on_kill = on_kill
        self.backlog = []
        self.tasks = []  # strong references: nothing of a killed process is collected before the world ends
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)
        loop.processes.append(self)

    def spawn(self, coroutine):
        """Run a coroutine in this process."""
        return self.loop.create_task(coroutine, context=self.context.copy())

    def kill(self):
        """Kill it: what it was about to do is not done."""
        if self.alive:
            self.alive = False
            self.backlog.clear()
            self.on_kill(self)

    def stop(self):
        """SIGSTOP."""
        self.stopped = True

    def go_on(self):
        """SIGCONT."""
        self.stopped = False
        self.loop._ready.extend(self.backlog)
        self.backlog.clear()


def _may_run(handle):
    process = handle._context.get(PROCESS)
    if process is None:
        return True
    if not process.alive:
        return False
    if process.stopped:
        process.backlog.append(handle)
        return False
    process.steps += 1
    if process.steps == process.killed_at_step:
        process.kill()
        return False
    return True


class _Handle(events.Handle):
    __slots__ = ()

    def _run(self):
        if _may_run(self):
            super()._run()


class _TimerHandle(events.TimerHandle):
    __slots__ = ()

    def _run(self):
        if _may_run(self):
            super()._run()


def _close(coroutine):
    """Drop a suspended coroutine, however often it awaits again in its `finally`."""
    for _ in range(100):
        try:
            coroutine.close()
        except RuntimeError:  # it awaits again
            continue
        except (Exception, BaseExceptionGroup):  # what it says on its way out, nobody hears
            return
        return
    raise AssertionError(f"{coroutine} does not end")


class Loop(base_events.BaseEventLoop):
    """See the module."""

    def __init__(self):
        super().__init__()
        self._now = 0.0
        self._selector = self
        self._over = False
        self.processes = []
        self.unexpected = []
        self.set_exception_handler(lambda _, context: self.unexpected.append(context))
        self.set_task_factory(self._make_task)

    def __del__(self):
        """There is nothing to release."""

    def time(self):
        return self._now

    def select(self, timeout):
        """The selector's part: nothing is ever ready, so time passes to when something is due."""
        if timeout is None:
            raise Deadlock("no process will ever do anything again")
        self._now += timeout
        return []

    def _process_events(self, event_list):
        pass

    def _write_to_self(self):
        pass

    def _call_soon(self, callback, args, context):
        handle = _Handle(callback, args, self, context)
        if not self._over:
            self._ready.append(handle)
        return handle

    def call_at(self, when, callback, *args, context=None):
        timer = _TimerHandle(when, callback, args, self, context)
        if not self._over:
            base_events.heapq.heappush(self._scheduled, timer)
            timer._scheduled = True
        return timer

    @staticmethod
    def _make_task(loop, coroutine, context=None):
        task = asyncio.Task(coroutine, loop=loop, context=context)
        process = (context or contextvars.copy_context()).get(PROCESS)
        if process is not None:
            process.tasks.append(task)
            if len(process.tasks) > 2000:
                process.tasks = [kept for kept in process.tasks if not kept.done()]
        return task

    def outside(self, delay_s, callback, *args):
        """Call something that belongs to no process: the network, a disk, the nemesis."""
        return self.call_at(self._now + delay_s, callback, *args, context=contextvars.Context())

    def end(self):
        """End the world: what is still suspended is dropped without taking another step."""
        self._over = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what had not even begun is dropped too
            for task in [task for process in self.processes for task in process.tasks if not task.done()]:
                task._log_destroy_pending = False
                _close(task.get_coro())
        self._ready.clear()
        self._scheduled.clear()
        self.close()
