"""The backends: what holds the state of a volume."""
