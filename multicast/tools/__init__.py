"""Capture files and what is in them."""
