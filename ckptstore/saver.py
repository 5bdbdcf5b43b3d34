"""Saving on one rank: the staging memory, the thread behind it, and the names under which ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .ranks import Meeting
from .saving import Background, Save
from .staging import Arena, Device, stage
from .tree import flatten
from .upload import Content, SaveJob, Uploader


class Saver:
    """Starts saves, one at a time. Owns the staging memory until :meth:`close`."""

    def __init__(
        self, uploader: Uploader, meeting: Meeting, background: Background, device: Device, *, allow_pickle: bool
    ) -> None:
        self._uploader = uploader
        self._meeting = meeting
        self._background = background
        self._device = device
        self._allow_pickle = allow_pickle
        self._arena = Arena(device)
        self._tries: dict[int, int] = {}

    def start(self, step: int, state: dict[str, Any], may_differ: Callable[[str], bool]) -> Save:
        """Copy the state and start its save. Nothing may be under way: the memory is used again."""
        # The step is in the conversation's name, so that ranks that are out of step (one was told of a failure that
        # another was not) meet again at the next step that they both save.
        tries = self._tries[step] = self._tries.get(step, 0) + 1
        save = Save(step)

        def job(content: Content | BaseException) -> SaveJob:
            return SaveJob(step, f"save/{step}/{tries}", content, may_differ, save.staged.set)

        try:
            flat = flatten(state, allow_pickle=self._allow_pickle)
            content = Content(flat.structure, flat.own, stage(flat.leaves, self._arena, self._device))
        except BaseException as e:
            if self._meeting.world > 1:  # the others have begun this save: they must hear that it cannot succeed
                failed = job(e)
                self._background.start(save, lambda: self._uploader.run(failed), reported=True)
            raise
        self._background.start(save, lambda: self._uploader.run(job(content)))
        return save

    def close(self) -> None:
        """Give the memory back."""
        self._arena.release()
