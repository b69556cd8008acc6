"""The journal: a log on disk from which the state of a workspace in memory is rebuilt after a crash.

`records` frames and reads records, `log` appends and syncs them, `directory` keeps the files of one workspace, and
`effects` encodes what a record says.
"""
