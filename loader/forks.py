"""What forked children of this process may still see of memory that is shared with other processes.

A fork copies every tensor over such memory, and the child may read it as long as it lives: until then the place must
not be used for another batch, whatever becomes of the tensor here. How long that is tells a pipe for each fork, of
which only the child (and what it forks in turn) has the writing end: it is closed when the last of them is gone,
however it ended. Nobody waits for that; it is asked when a place is asked for, a tensor dies or a child is forked.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable


class Use:
    """A place that is in use: by a tensor of this process, and by copies of it in children that are forked meanwhile.

    ``free(number)`` is called once, when the tensor and all its copies are gone. Takes no lock, for the garbage
    collector may end one use in the middle of another's.
    """

    __slots__ = ("__weakref__", "_forks", "_free", "_gone", "_held", "_pid")

    def __init__(self, forks: Forks, free: Callable[[int], None], number: int) -> None:
        self._forks = forks
        self._free = [(free, number)]  # taken out by the one who calls it
        self._gone = False
        self._held: set[_Fork] = set()
        self._pid = os.getpid()
        forks.live.add(self)

    def end(self) -> None:
        """The tensor of this process is gone."""
        self._gone = True
        self._check()
        self._forks.settle()

    def hold(self, fork: _Fork) -> bool:
        """A child is being forked. Returns whether it sees this place."""
        if self._gone:
            return False
        self._held.add(fork)
        return True

    def let_go(self, fork: _Fork) -> None:
        """That child is gone."""
        self._held.discard(fork)
        self._check()

    def forget(self) -> None:
        """In a child: this is a copy, and the place is the parent's to give back."""
        self._free.clear()

    def _check(self) -> None:
        # set before it is looked at on both sides, so of two threads that end the last two holds one gets here
        if not self._gone or self._held:
            return
        try:
            free, number = self._free.pop()
        except IndexError:
            return
        self._forks.live.discard(self)
        if os.getpid() == self._pid:
            free(number)


class _Fork:
    """The children of one fork, as the parent sees them, and what they see."""

    def __init__(self, uses: Iterable[Use]) -> None:
        try:
            self.read, self.write = os.pipe()
        except OSError:  # no descriptor left: nobody will tell, so what the child sees stays as it is
            self.read = self.write = -1
        self.uses = [use for use in uses if use.hold(self)]


def _close(*ends: int) -> None:
    for end in ends:
        if end >= 0:
            os.close(end)


class Forks:
    """The forks of this process whose children are alive and see places in use. For any number of threads."""

    def __init__(self) -> None:
        self.live: set[Use] = set()
        self._begun: dict[int, _Fork] = {}  # by the thread that forks
        self._open: set[_Fork] = set()
        os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    def use(self, free: Callable[[int], None], number: int) -> Use:
        """A place is taken into use by this process."""
        return Use(self, free, number)

    def __len__(self) -> int:
        return len(self._open)

    def settle(self) -> None:
        """Let go what was held only by children that are gone. Cheap where there are none."""
        if not self._open:
            return
        forks = {fork.read: fork for fork in self._open.copy()}
        poll = select.poll()
        for read in forks:
            poll.register(read, 0)  # that there is no writer any more is always told
        for read, _ in poll.poll(0):
            fork = forks[read]
            try:
                self._open.remove(fork)
            except KeyError:
                continue  # another thread was faster; the number may be another file's by now
            _close(read)
            for use in fork.uses:
                use.let_go(fork)

    def _before(self) -> None:
        self.settle()
        if self.live:
            self._begun[threading.get_ident()] = _Fork(self.live.copy())

    def _in_parent(self) -> None:
        fork = self._begun.pop(threading.get_ident(), None)
        if fork is not None and fork.write >= 0:
            _close(fork.write)
            self._open.add(fork)

    def _in_child(self) -> None:
        own = self._begun.pop(threading.get_ident(), None)
        if own is not None:
            _close(own.read)  # and the other end stays open as long as this process lives
        for fork in self._begun.values():
            _close(fork.read, fork.write)  # of another thread's child
        for fork in self._open:
            _close(fork.read)
        for use in self.live:
            use.forget()
        self._begun.clear()
        self._open.clear()
        self.live.clear()


FORKS = Forks()
"""The forks of this process: the system tells of them by functions that cannot be taken back."""
