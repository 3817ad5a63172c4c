"""What every part of brokerless stands on: Event, Frame, Journal, Ledger, Cursor, errors and counters."""
