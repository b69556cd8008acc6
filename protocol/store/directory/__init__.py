"""A host directory as source and as target of snapshots."""
