"""adapters: a Filesystem over any Volume or host directory, and a Volume over any Filesystem.

Imported by name, for a quick start: `protocol.adapters.volume` and `host` (paths, text and streams over a
`Store`).
"""
