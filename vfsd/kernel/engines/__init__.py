"""The engines, which serve a volume to the kernel."""
