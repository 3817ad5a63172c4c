"""The registration endpoint over HTTP."""
