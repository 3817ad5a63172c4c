"""Transports that the loss test can measure: one module per kind, none imported before it is used."""
