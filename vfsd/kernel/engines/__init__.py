"""The engines: what serves a volume to the kernel."""
