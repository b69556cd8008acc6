"""Serve a volume to the kernel, and keep the kernel's caches true."""
