"""brokerless.metrics."""
