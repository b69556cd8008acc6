"""Opens a snapshot in an object store as the lower layer of an overlay.

With `--persist` the snapshot's record is kept with the journal.  The next daemon opens the snapshot with that, so it
needs no answer of the store: only reads of what is not in the cache do.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import logging
import os
from typing import TYPE_CHECKING, Final

import msgspec

from protocol.backends.overlay.lazy_lower import LazyLower
from protocol.store.format.digests import DIGEST_BYTES
from protocol.store.format.packs import DamagedError
from protocol.store.object_store.lazy.client import FetchClient, Start
from protocol.store.object_store.lazy.contents import BlobCache, RemoteContents
from protocol.store.object_store.packs import decode_named
from protocol.store.trees import fingerprint_of, root_of
from vfsd.daemon.backends.persistence import recorded_below
from vfsd.machine.directories import cache_directory
from vfsd.machine.interpreter import missing_package

if TYPE_CHECKING:
    from protocol.store.object_store.lazy.client import Opened
    from vfsd.wire.options import MountOptions

_logger = logging.getLogger(__name__)


class _Kept(msgspec.Struct, array_like=True, frozen=True):
    """A snapshot as it was opened: its name, its record as the store has it, and the store's time of that."""

    name: str
    record: bytes
    created_s: float


_kept: Final = msgspec.msgpack.Decoder(_Kept)


def open_remote(options: MountOptions) -> LazyLower:
    """Open the snapshot that "overlay:URL#NAME" names; without a name, the newest one.  OSError."""
    named = options.workspace.backend.remote
    assert named is not None
    url, name = named
    if importlib.util.find_spec("obstore") is None:
        raise missing_package("an object store", ImportError("No module named 'obstore'"), "remote")
    if options.journal.persist and not name:
        raise ValueError(f"--persist needs the snapshot's name, because the newest one may change: write {url}#NAME")
    remote = options.remote
    cache = os.path.join(cache_directory(), "blobs") if remote.cache_bytes else None
    recorded = recorded_below(options)
    # Another argument may name another place of the same snapshot: that is asked.
    is_same = recorded.argument == options.workspace.backend.argument
    kept = _decoded(recorded.reopening, recorded.fingerprint) if is_same and recorded.reopening else None
    start = Start(
        url=url,
        options=dict(option.split("=", 1) for option in remote.store_options),
        name=(kept.name if kept is not None else name) or None,
        root=root_of(recorded.fingerprint),
        record=None if kept is None else kept.record,
        created_s=0.0 if kept is None else kept.created_s,
        timeout_s=remote.remote_timeout_s,
        cache_directory=cache,
        index_directory=os.path.join(cache_directory(), "indexes"),
        cache_bytes=remote.cache_bytes,
        prefetch=remote.prefetch,
    )
    client = FetchClient(start)
    try:
        opened = client.open()
    except DamagedError as error:  # not EIO, after which the log of the daemon is shown
        raise OSError(errno.EBADMSG, error.strerror, error.filename) from None
    except TimeoutError as error:  # not ETIMEDOUT, as above
        raise OSError(errno.EHOSTUNREACH, error.strerror, error.filename) from None
    try:
        return _layer(client, opened, BlobCache(cache, remote.cache_bytes), url)
    except BaseException:
        client.close()
        raise


def _layer(client: FetchClient, opened: Opened, cache: BlobCache, url: str) -> LazyLower:
    """The layer of the snapshot that the client has opened.  DamagedError."""
    record = decode_named(opened.record, url)
    source = f"{url}#{opened.name}"
    _logger.info("the workspace is over the snapshot %s", source)
    lower = LazyLower(
        RemoteContents(client, cache),
        record.root,
        source,
        fingerprint_of(record.root),
        inodes=record.inodes,
        reopening=_encoded(_Kept(opened.name, opened.record, opened.created_s)),
    )
    cache.check()
    if cache.failure is not None:
        lower.notice = client.report_cache(cache.failure)
    return lower


def _encoded(kept: _Kept) -> bytes:
    data = msgspec.msgpack.encode(kept)
    return data + hashlib.sha256(data).digest()


def _decoded(data: bytes, fingerprint: str) -> _Kept | None:
    """The snapshot that a journal has; None, which is logged, if it is damaged or not the one with `fingerprint`."""
    encoded, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    try:
        kept = _kept.decode(encoded)
        if hashlib.sha256(encoded).digest() == digest and (
            fingerprint_of(decode_named(kept.record, kept.name).root) == fingerprint
        ):
            return kept
    except (ValueError, DamagedError):
        pass
    _logger.warning("the journal's record of the snapshot below is damaged: the object store is asked for it")
    return None
