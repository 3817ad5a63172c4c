"""Tests of the Spark jobs share one session per worker process."""

from tests.spark_fixture import spark

__all__ = ["spark"]
