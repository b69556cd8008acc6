"""Differences between two trees, and between two texts; patches that git applies."""
