"""The on-disk format of the store: objects, packs, listings, records."""
