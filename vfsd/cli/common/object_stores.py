"""Object stores on the command line: URLs, --store-option, and how a store is opened."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from vfsd.cli.common import output
from vfsd.cli.common.app import Command
from vfsd.machine.directories import cache_directory
from vfsd.machine.interpreter import missing_package
from vfsd.wire.messages import ProgressReport
from vfsd.wire.option_rules import credential_refusal

if TYPE_CHECKING:
    from protocol.store import Store
    from protocol.store.object_store import RemoteStore


def store_option() -> click.Option:
    """Return the option --store-option, whose values `open_remote` takes."""
    return click.Option(
        ["--store-option", "store_options"],
        metavar="KEY=VALUE",
        multiple=True,
        help="An option of the object store: endpoint, region, path_style, allow_http, ...  Credentials come from the"
        " environment.",
    )


class RemoteCommand(Command):
    """A command that takes --store-option."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.insert(-2, store_option())  # before -w and --json


def is_url(text: str) -> bool:
    """Return whether `text` names an object store, and not a directory."""
    return "://" in text


def check_no_options(options: Sequence[str]) -> None:
    """Raise UsageError if there are options for an object store; call it for a command that uses none."""
    if options:
        raise click.UsageError("--store-option is for an object store: add --store URL")


def option_values(options: Sequence[str]) -> dict[str, str]:
    """Return the values of --store-option.  UsageError for one without a value, or with a credential."""
    values = {}
    for option in options:
        key, sign, value = option.partition("=")
        if not (key and sign):
            raise click.UsageError(f"--store-option {option}: write KEY=VALUE, for example region=eu-west-1")
        refusal = credential_refusal(option)
        if refusal is not None:
            raise click.UsageError(f"--store-option {refusal}")
        values[key] = value
    return values


def open_remote(url: str, options: Sequence[str], *, makes_directory: bool = False) -> RemoteStore:
    """Open the store at `url`.  `makes_directory`: make the directory of file:///, if there is none.

    UsageError as `option_values`; OSError.
    """
    values = option_values(options)
    # Start-up: a push asks the daemon first, and imports this while the daemon saves.
    from protocol.store.object_store import RemoteStore, open_storage  # noqa: PLC0415

    try:
        place = url.rstrip("/") if url != "file:///" else url
        storage = open_storage(
            place, values, silence_s=output.silence_s(), waiting=_note_waiting, makes_directory=makes_directory
        )
    except ImportError as error:
        raise missing_package("an object store", error, "remote") from None
    return RemoteStore(storage, cache_directory=os.path.join(cache_directory(), "indexes"))


def _note_waiting(cause: str, left_s: float) -> None:
    output.note(f"waiting for the object store ({cause}); the command gives up after {max(1.0, left_s):.0f} s")


def selecting(store: Store | RemoteStore) -> str:
    """Return the options that select `store`, with a space before each, for a command that a message gives.

    Empty for the default store.
    """
    from protocol.store import default_directory  # noqa: PLC0415 (as in `open_remote`)

    if store.directory == os.path.abspath(default_directory()):
        return ""
    options = click.get_current_context().params.get("store_options", ())
    words = ["--store", store.directory, *(word for option in options for word in ("--store-option", option))]
    return f" {shlex.join(words)}"


@contextmanager
def bytes_progress(label: str) -> Iterator[Callable[[int, int], Any]]:
    """Yield a callback for (bytes done, bytes in total), which draws a bar with the rate on a terminal."""
    with output.progress(label) as show:

        def report(done: int, total: int) -> None:
            if show is not None:
                show(ProgressReport(id=None, done=done, total=total, unit="bytes"))

        yield report
