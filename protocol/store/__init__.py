"""The snapshot store: states of host directories and other trees, each content kept once."""

from protocol.store.layout import STORE_VARIABLE, default_directory
from protocol.store.packs import DamagedError
from protocol.store.records import StoredSnapshot
from protocol.store.source import DirectorySource, Source, TreeSource
from protocol.store.store import Store

__all__ = [
    "STORE_VARIABLE",
    "DamagedError",
    "DirectorySource",
    "Source",
    "Store",
    "StoredSnapshot",
    "TreeSource",
    "default_directory",
]
