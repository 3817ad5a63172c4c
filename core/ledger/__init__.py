"""The ledger: what a consumer received, what is missing, and why."""
