"""Opens a snapshot in an object store as the lower layer of an overlay."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import TYPE_CHECKING

from protocol.backends.overlay.lazy_lower import LazyLower
from protocol.store.mounted import fingerprint_of, root_of
from protocol.store.object_store.layout import decode_named
from protocol.store.object_store.lazy.blob_cache import BlobCache
from protocol.store.object_store.lazy.client import FetchClient
from protocol.store.object_store.lazy.contents import RemoteContents
from protocol.store.object_store.lazy.messages import Start
from vfsd.daemon.backends.persistence import recorded_below
from vfsd.machine.caches import cache_directory
from vfsd.machine.optional_dependencies import missing_package

if TYPE_CHECKING:
    from vfsd.wire.options import MountOptions

_logger = logging.getLogger(__name__)


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
    start = Start(
        url=url,
        options=dict(option.split("=", 1) for option in remote.store_options),
        name=name or None,
        root=root_of(recorded_below(options)),
        record=None,
        created_s=0.0,
        timeout_s=remote.remote_timeout_s,
        cache_directory=cache,
        index_directory=os.path.join(cache_directory(), "indexes"),
        cache_bytes=remote.cache_bytes,
        prefetch=remote.prefetch,
    )
    client = FetchClient(start)
    opened = client.open()
    try:
        record = decode_named(opened.record, url)
        source = f"{url}#{opened.name}"
        _logger.info("the workspace is over the snapshot %s", source)
        return LazyLower(
            RemoteContents(client, BlobCache(cache, remote.cache_bytes)),
            record.root,
            source,
            fingerprint_of(record.root),
        )
    except BaseException:
        client.close()
        raise
