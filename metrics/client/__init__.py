"""The StatsD client."""
