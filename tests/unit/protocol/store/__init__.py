"""The snapshot store: without FUSE."""
