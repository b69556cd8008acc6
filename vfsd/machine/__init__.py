"""This machine: mounts, the runtime directory, logs, and whether everything vfsd needs is installed."""
