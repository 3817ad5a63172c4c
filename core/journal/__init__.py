"""Journals: what a producer remembers so that it can send again."""
