"""The fork server: a preloaded process that starts daemons by fork(2)."""
