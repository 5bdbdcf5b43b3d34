"""A save that is under way: the handle that the user holds, and the thread that carries it out."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import thread as _pools  # noqa: F401 - see _before_pools_shut_down

from cachefs.errors import DeadlineExceeded

from .layout import StepRef

logger = logging.getLogger(__name__)


class Flag:
    """Something that happens once. True when it has."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` s (``None``: until it happens, or never will); whether it has happened."""
        return self._event.wait(timeout)

    def __bool__(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()


class Save:
    """One save, from :meth:`.store.CheckpointStore.save_async`.

    ``staged``: the state has been copied, so the save no longer depends on GPU memory (on the CPU that is so when
    ``save_async`` returns). Only when :meth:`result` returns, the step is durable and acknowledged. Safe to use from
    any thread.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.staged = Flag()
        self._ended = Flag()
        self._ref: StepRef | None = None
        self._error: BaseException | None = None
        self._reported = False

    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return bool(self._ended)

    def result(self, timeout: float | None = None) -> StepRef:
        """Wait until the step is durable on the store; its step and generation.

        Raises what made it fail, here or on another rank, and :class:`DeadlineExceeded` after ``timeout`` s (then the
        save goes on). Without ``timeout`` the save's own deadlines bound the wait.
        """
        if not self._ended.wait(timeout):
            raise DeadlineExceeded(f"the save of step {self.step} is not done after {timeout:g} s")
        if self._error is not None:
            self._reported = True
            raise self._error
        assert self._ref is not None
        return self._ref

    def __repr__(self) -> str:
        state = "failed" if self._error else "durable" if self._ref else "staged" if self.staged else "copying"
        return f"<Save of step {self.step}: {state}>"

    def take_error(self) -> BaseException | None:
        """The error that nobody has been told yet; from now on it counts as told."""
        error = None if self._reported else self._error
        self._reported = self._reported or error is not None
        return error

    def _end(self, ref: StepRef | None, error: BaseException | None) -> None:
        self._ref, self._error = ref, error
        self.staged.set()  # whoever waits for it must not wait for ever; result() tells what happened
        self._ended.set()


class Background:
    """Runs one save at a time on a thread of its own, which ends with the save.

    An interpreter that exits waits for it: up to ``exit_timeout`` s before it shuts its thread pools down, which a save
    to an object store needs, and, as the thread is not a daemon, until it ends.
    """

    def __init__(self, exit_timeout: float) -> None:
        self._current: Save | None = None
        self._thread: threading.Thread | None = None
        self._exit_timeout = exit_timeout
        self._registered = False

    def start(self, save: Save, work: Callable[[], StepRef], *, reported: bool = False) -> None:
        """Begin ``work``. The caller has waited for the one before. ``reported``: its error is known already."""
        if not self._registered:
            _before_pools_shut_down(weakref.ref(self))
            self._registered = True
        self._current = save
        save._reported = reported
        self._thread = threading.Thread(target=self._run, args=(save, work), name=f"ckptstore-save-{save.step}")
        self._thread.start()

    def wait(self, timeout: float) -> None:
        """Until nothing is under way. Raises :class:`DeadlineExceeded`; never what a save failed with."""
        save, thread = self._current, self._thread
        if save is None or thread is None:
            return
        thread.join(timeout)
        if thread.is_alive():
            raise DeadlineExceeded(
                f"the save of step {save.step} is not done after {timeout:g} s", hint="save less often, or wait longer"
            )
        self._thread = None

    def take_error(self) -> BaseException | None:
        """The error of the last save, if nobody was told."""
        return self._current.take_error() if self._current is not None else None

    def finish(self) -> None:
        """Wait for what is under way, at the interpreter's exit."""
        try:
            self.wait(self._exit_timeout)
        except DeadlineExceeded as e:  # nobody is left to raise it to
            logger.error("%s", e)

    def _run(self, save: Save, work: Callable[[], StepRef]) -> None:
        ref: StepRef | None = None
        error: BaseException | None = None
        try:
            ref = work()
        except BaseException as e:  # noqa: BLE001 - kept, and raised by result(), the next call, wait() or close()
            error = e
            logger.error("the save of step %d failed: %s", save.step, e)  # for a program that ends without asking
        save._end(ref, error)


def _before_pools_shut_down(background: weakref.ref[Background]) -> None:
    """Have a save finished before ``concurrent.futures`` refuses new work at exit.

    That module does so in a callback of ``threading._register_atexit``, and callbacks run in reverse order. ``atexit``
    would be too late: it comes after them. Without this function (it is not public) such a save fails, and says so.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is None:
        return

    def finish() -> None:
        alive = background()
        if alive is not None:
            alive.finish()

    register(finish)
