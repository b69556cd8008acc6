"""Object stores on the command line: URLs, --store-option, and how a store is opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from protocol.store.object_store import RemoteStore, open_storage
from vfsd.cli.common import output
from vfsd.machine.optional_dependencies import missing_package
from vfsd.wire.messages import ProgressReport


def store_option() -> click.Option:
    """Return the option --store-option, whose values `open_remote` takes."""
    return click.Option(
        ["--store-option", "store_options"],
        metavar="KEY=VALUE",
        multiple=True,
        help="An option of the object store: endpoint, region, path_style, allow_http, ...",
    )


def is_url(text: str) -> bool:
    """Return whether `text` names an object store, and not a directory."""
    return "://" in text


def open_remote(url: str, options: Sequence[str]) -> RemoteStore:
    """Open the store at `url`.  UsageError for an option without a value; OSError."""
    values = {}
    for option in options:
        key, sign, value = option.partition("=")
        if not (key and sign):
            raise click.UsageError(f"--store-option {option}: write KEY=VALUE, for example region=eu-west-1")
        values[key] = value
    try:
        storage = open_storage(url.rstrip("/") if url != "file:///" else url, values)
    except ImportError as error:
        raise missing_package("an object store", error, "remote") from None
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG base directory specification: a relative path is ignored
        cache = os.path.join(os.path.expanduser("~"), ".cache")
    return RemoteStore(storage, cache_directory=os.path.join(cache, "vfsd", "indexes"))


@contextmanager
def bytes_progress(label: str) -> Iterator[Callable[[int, int], Any]]:
    """Yield a callback for (bytes done, bytes in total), which draws a bar with the rate on a terminal."""
    with output.progress(label) as show:

        def report(done: int, total: int) -> None:
            if show is not None:
                show(ProgressReport(id=None, done=done, total=total, unit="bytes"))

        yield report
