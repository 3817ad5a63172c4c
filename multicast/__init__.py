"""brokerless.multicast."""
