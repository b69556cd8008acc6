"""The commands of a workspace: `commands` runs them, and `sandbox` owns the container of a workspace with --sandbox.

The code that starts and ends processes is `protocol.execution` (on this host) and `protocol.backends.container.exec`.
"""
