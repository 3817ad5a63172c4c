"""The version of brokerless; pyproject.toml has the same, and a test compares the two."""

__version__ = "0.1.0"
