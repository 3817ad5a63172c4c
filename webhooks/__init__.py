"""brokerless.webhooks."""
