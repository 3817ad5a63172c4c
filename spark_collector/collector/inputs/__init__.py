"""What feeds a collector: one module per transport, each with one thread of its own."""
