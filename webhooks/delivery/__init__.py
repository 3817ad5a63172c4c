"""Delivering: lanes, retries, the HTTP client, address checks, ownership."""
