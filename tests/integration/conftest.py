"""Shared by all tests of a worker process: a Spark session, and a PostgreSQL server."""

from tests.postgres import server
from tests.spark_fixture import spark

__all__ = ["server", "spark"]
