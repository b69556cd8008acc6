"""Measurements: see `bench.table`."""
