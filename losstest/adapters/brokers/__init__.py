"""Reference transports that go through a broker."""
