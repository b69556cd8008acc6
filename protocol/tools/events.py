"""Events: what a tool has changed, told to whoever subscribed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["DirectoryCreated", "EventHook", "FileDeleted", "FileEdited", "FileEvent", "FileWritten", "Subscriber"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileWritten:
    """A file was made, overwritten or appended to."""

    path: str
    bytes_written: int


@dataclass(frozen=True, slots=True)
class FileEdited:
    """Text in a file was replaced, in `replacements` places; it has `bytes_written` bytes now."""

    path: str
    replacements: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class FileDeleted:
    """A file or directory was deleted, with all below it: `entries` in all."""

    path: str
    entries: int


@dataclass(frozen=True, slots=True)
class DirectoryCreated:
    """A directory was made, for a file that was written in it."""

    path: str


FileEvent: TypeAlias = FileWritten | FileEdited | FileDeleted | DirectoryCreated
Subscriber: TypeAlias = Callable[[FileEvent], object]


class EventHook:
    """Calls its subscribers with each event, in the order in which they came.

    It is itself a subscriber: hooks can be chained.  A subscriber that raises is logged and disturbs neither
    the others nor the tool, whose change is already made.
    """

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Have `subscriber` called from now on; calling what is returned ends that."""
        self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

        return unsubscribe

    def __call__(self, event: FileEvent) -> None:
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(event)
            except Exception:
                _logger.exception("a subscriber failed on %s", event)
