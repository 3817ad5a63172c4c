"""brokerless.direct."""
