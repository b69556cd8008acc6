"""Snapshots in an object store such as S3, Google Cloud Storage or Azure, with the content-addressed format of a store.

The scheme that makes collections safe while others push is argued in docs/store.md.
"""

from protocol.store.object_store.remote import RemoteSnapshot, RemoteStore
from protocol.store.object_store.storage import Storage, open_storage

__all__ = ["RemoteSnapshot", "RemoteStore", "Storage", "open_storage"]
