"""The metrics daemon: sockets, processes, HTTP, management port."""
