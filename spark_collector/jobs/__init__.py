"""Spark jobs: land, count, loss, metrics."""
