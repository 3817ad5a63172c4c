"""The receiver kit: verify, drop duplicates, store."""
