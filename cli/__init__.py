"""The `brokerless` command: parses, calls the packages, prints."""
