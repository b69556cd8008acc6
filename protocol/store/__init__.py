"""The snapshot store: states of host directories and other trees, each content kept once."""

from protocol.store.directory.source import DirectorySource, Source, TreeSource
from protocol.store.directory.target import ChangedMeanwhileError, DirectoryTarget
from protocol.store.format.layout import STORE_VARIABLE, default_directory
from protocol.store.format.packs import DamagedError
from protocol.store.restore import InterruptedRestore, Problem, RestoredChanges, RestoreRequest
from protocol.store.store import Store
from protocol.store.trees import MountedSnapshot
from protocol.store.upkeep import CheckReport, Damage, GarbageReport

__all__ = [
    "STORE_VARIABLE",
    "ChangedMeanwhileError",
    "CheckReport",
    "Damage",
    "DamagedError",
    "DirectorySource",
    "DirectoryTarget",
    "GarbageReport",
    "InterruptedRestore",
    "MountedSnapshot",
    "Problem",
    "RestoreRequest",
    "RestoredChanges",
    "Source",
    "Store",
    "TreeSource",
    "default_directory",
]
