"""Sockets and threads of direct messaging, over ZeroMQ and NNG."""
