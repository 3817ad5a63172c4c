"""What operators and tenants do with endpoints and deliveries."""
