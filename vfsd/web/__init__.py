"""The page: a timeline of snapshots, the files of every state, and restores, in a browser on this machine."""
