"""Transaction: undoes what a block did to a workspace, if the block raises.

    with ws.transaction(tag="tool-call-7") as t:
        run_tool()
    # or, after an exception: t.undone.counts, t.undone.changes

The entry takes a snapshot.  If the block ends normally the changes are kept; if it raises anything (KeyboardInterrupt
and SystemExit included) the workspace is restored.  Then the snapshot is dropped, and the exception continues.  The
restore is a step of the undo history: `ws.undo()` brings the changes back.

A transaction covers the workspace, not the thread: a restore also undoes what other threads and programs changed since
the entry.  Snapshots that they took stay.  So a second transaction must be nested in the first one.  A thread or a task
that begins one while another has one open gets RuntimeError; transactions of another process, or of another `Workspace`
object, are not noticed.  A nested transaction that was restored leaves the outer one open; if the outer one is restored
as well, its `undone` has what was left to undo.

Failures:

- The restore fails, or the daemon is gone: the block's exception continues, with a note that says so and names the
  snapshot, which is not dropped.  `state` is "failed".
- Ctrl-C during the restore: the KeyboardInterrupt continues, with the block's exception as its context; `state` is
  "failed", because the daemon may have restored the workspace.
- The daemon is gone and the block did not raise: ConnectionError, because changes that only the daemon held are lost.
- The snapshot cannot be dropped: RuntimeWarning after a normal end, a note after an exception.
- This process is killed: the changes and the snapshot ("transaction-...", with the tag) stay.

Invariants, which `OpenTransactions.check_invariants` verifies:

1. a transaction is in the list of its workspace exactly while its state is "open" (or "new", during the entry), so
   until its restore is complete;
2. the list has no transaction twice;
3. `undone` is None unless the state is "restored".

Threading: any thread; one thread or task for each transaction.  The lock of `OpenTransactions` is held only for changes
of its list, never during a call to the daemon.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
import warnings
from collections.abc import Callable, Generator
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

from vfsd.client.requests import RemoteCall, Requests
from vfsd.client.results import Restored

State: TypeAlias = Literal["new", "open", "kept", "restored", "failed"]
# Requests to send, one by one; the driver sends their answers back, or throws their errors in.
Steps: TypeAlias = Generator[RemoteCall[Any], Any, None]
_PATHS_NOTED: Final = 5
# The open transactions that the running thread or task is in.  A task inherits them from the task that started it.
_entered: Final[ContextVar[tuple[BaseTransaction, ...]]] = ContextVar("vfsd transactions", default=())


class OpenTransactions:
    """The open transactions of a workspace, outermost first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[BaseTransaction] = []

    def add(self, transaction: BaseTransaction) -> None:
        """Add a transaction.  RuntimeError unless the caller is in the innermost one."""
        with self._lock:
            if self._open and self._open[-1] not in _entered.get():
                raise RuntimeError(
                    f"another thread or task has {self._open[-1]} open in this workspace, and its restore would undo"
                    " the changes of a second one: use a workspace for each of them"
                )
            self._open.append(transaction)
        _entered.set((*_entered.get(), transaction))

    def inside(self, transaction: BaseTransaction) -> list[BaseTransaction]:
        """Return the transactions that were opened inside another one and are still open."""
        with self._lock:
            return self._open[self._open.index(transaction) + 1 :]

    def remove(self, transaction: BaseTransaction) -> None:
        """Remove a transaction that has ended."""
        _entered.set(tuple(each for each in _entered.get() if each is not transaction))
        with self._lock:
            self._open.remove(transaction)

    def check_invariants(self) -> None:
        """AssertionError if an invariant of the module's docstring does not hold."""
        with self._lock:
            assert all(each.state in {"new", "open"} for each in self._open), self._open
            assert len(set(map(id, self._open))) == len(self._open), self._open
            assert all(each.undone is None for each in self._open), self._open


class BaseTransaction:
    """Base of `Transaction` and `AsyncTransaction`.  No I/O.

    `snapshot` is the name of the snapshot that the entry takes.  `state` is "open" in the block; after it, "kept",
    "restored", or "failed" if the workspace may be in neither of these states.  `undone`: what the restore changed,
    with counts and the first 10,000 paths; a file that the block created is listed as removed.  It is None if the block
    did not raise, and in a read-only workspace.
    """

    def __init__(self, requests: Requests, others: OpenTransactions, tag: str | None) -> None:
        """Use `Workspace.transaction`."""
        self._requests = requests
        self._others = others
        self._is_overtaken = False
        self._outcome: tuple[State, Restored | None] = ("failed", None)
        self.tag: Final = tag
        self.snapshot: Final = f"transaction-{secrets.token_hex(6)}"
        self.state: State = "new"
        self.undone: Restored | None = None

    def __str__(self) -> str:
        return self.snapshot if self.tag is None else f"{self.snapshot} ({self.tag!r})"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}, {self.state}>"

    def _begin(self) -> Steps:
        if self.state != "new":
            raise RuntimeError(f"{self} was entered before: make another transaction")
        self._others.add(self)
        try:
            yield self._requests.snapshot(self.snapshot, tag=self.tag)
        except BaseException as error:
            self._others.remove(self)
            self.state = "failed"
            if not isinstance(error, OSError):  # interrupted: the daemon may have taken the snapshot
                with contextlib.suppress(OSError):
                    yield self._requests.drop(self.snapshot)
            raise
        self.state = "open"

    def _end(self, error: BaseException | None) -> Steps:
        assert self.state == "open", self
        try:
            if error is None:
                yield from self._keep()
            else:
                for each in self._others.inside(self):
                    each._is_overtaken = True  # noqa: SLF001 its restore would bring back what this one undoes
                yield from self._restore(error)
        finally:
            # Not before the restore: another thread's transaction could begin, and its changes would be undone.
            self._others.remove(self)
            self.state, self.undone = self._outcome

    def _keep(self) -> Steps:
        try:
            yield self._requests.drop(self.snapshot)
            self._outcome = ("kept", None)
        except ConnectionError as error:
            raise ConnectionError(
                f"the daemon ended during {self}: changes that only it held are lost ({error})"
            ) from error
        except FileNotFoundError:
            self._outcome = ("kept", None)
            self._warn("its snapshot is gone: another program dropped it, or the daemon was restarted")
        except OSError as error:
            self._outcome = ("kept", None)
            self._warn(f"its snapshot could not be dropped: {error}")
        if self._is_overtaken:
            self._outcome = ("failed", None)
            raise RuntimeError(f"an outer transaction was restored during {self}: the changes until then were undone")

    def _restore(self, error: BaseException) -> Steps:
        try:
            if self._is_overtaken:
                note = f"an outer transaction was restored during {self}: only the changes until then were undone"
                error.add_note(note)
            else:
                undone = yield self._requests.restore(self.snapshot)
                self._outcome = ("restored", undone)
                self._note_problems(error, undone)
        except OSError as failure:
            if failure.errno != errno.EROFS:  # in a read-only workspace there is nothing to undo
                self._note_failure(error, failure)
                return
            self._outcome = ("restored", None)
        except BaseException as failure:
            self._note_failure(error, failure)
            raise
        try:
            yield self._requests.drop(self.snapshot)
        except OSError as failure:
            error.add_note(f"{self} was undone; its snapshot could not be dropped: {failure}")

    def _note_failure(self, error: BaseException, failure: BaseException) -> None:
        reason = str(failure) or type(failure).__name__
        error.add_note(
            f"{self} may not be undone ({reason}): `restore({self.snapshot!r})` of the workspace, or `vfsd restore"
            f" {self.snapshot}`, restores the state before it"
        )

    def _note_problems(self, error: BaseException, undone: Restored) -> None:
        if undone.problems:
            count = len(undone.problems)
            shown = [f"{path} ({reason})" for path, reason in list(undone.problems.items())[:_PATHS_NOTED]]
            error.add_note(f"{count} path{'s'[: count > 1]} could not be restored by {self}: {', '.join(shown)}")

    def _warn(self, what: str) -> None:
        warnings.warn(f"the changes of {self} were kept, and {what}", RuntimeWarning, stacklevel=5)


class Transaction(BaseTransaction):
    """A context manager; see the module's docstring."""

    def __init__(
        self, requests: Requests, others: OpenTransactions, tag: str | None, run: Callable[[RemoteCall[Any]], Any]
    ) -> None:
        """Use `Workspace.transaction`.  `run` sends a request and returns its answer."""
        super().__init__(requests, others, tag)
        self._run = run

    def __enter__(self) -> Self:
        self._drive(self._begin())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._drive(self._end(error))

    def _drive(self, steps: Steps) -> None:
        with contextlib.suppress(StopIteration):
            call = next(steps)
            while True:
                try:
                    answer = self._run(call)
                except BaseException as error:  # noqa: BLE001 the steps handle it, or raise it again
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
