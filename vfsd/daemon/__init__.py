"""The daemon: one process for each mounted workspace."""
