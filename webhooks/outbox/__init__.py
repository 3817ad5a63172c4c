"""The outbox: accepting, routing, storing, in SQLite or PostgreSQL."""
