"""The collector daemon: transports in, spool out. Needs no Spark."""
