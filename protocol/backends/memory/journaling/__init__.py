"""The journal of a memory volume: recording its effects, and replaying them."""
