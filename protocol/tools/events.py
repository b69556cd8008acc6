"""Events: the changes that tools make, passed to subscribers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "DirectoryCreated",
    "EventHook",
    "FileDeleted",
    "FileEdited",
    "FileEvent",
    "FileWritten",
    "Subscriber",
    "deliver",
]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileWritten:
    """A file was created, overwritten or appended to."""

    path: str
    bytes_written: int


@dataclass(frozen=True, slots=True)
class FileEdited:
    """Text in a file was replaced in `replacements` places; the file now has `bytes_written` bytes."""

    path: str
    replacements: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class FileDeleted:
    """A file or directory was deleted with everything below it: `entries` in total."""

    path: str
    entries: int


@dataclass(frozen=True, slots=True)
class DirectoryCreated:
    """A directory was created for a file that was written in it."""

    path: str


FileEvent: TypeAlias = FileWritten | FileEdited | FileDeleted | DirectoryCreated
Subscriber: TypeAlias = Callable[[FileEvent], object]


def deliver(event: FileEvent, subscriber: Subscriber) -> None:
    """Call `subscriber`.  Its error is only logged, because the change is already made."""
    try:
        subscriber(event)
    except Exception:
        _logger.exception("a subscriber failed on %s", event)


class EventHook:
    """Calls its subscribers with each event, in order.

    Hooks can be chained, because a hook is itself a subscriber.  An exception of a subscriber is logged and affects
    neither the other subscribers nor the tool.
    """

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Add `subscriber`; calling the returned function removes it."""
        self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

        return unsubscribe

    def __call__(self, event: FileEvent) -> None:
        for subscriber in tuple(self._subscribers):
            deliver(event, subscriber)
