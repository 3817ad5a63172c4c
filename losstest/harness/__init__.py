"""Runs a transport with real processes: scenarios, supervision, the matrix."""
