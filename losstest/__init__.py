"""brokerless.losstest."""
