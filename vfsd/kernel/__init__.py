"""Engines that serve a volume to the kernel, cache invalidation, and inotify events."""
