"""The protocol of direct messaging without I/O: messages, both ends, flow control, loss accounting."""
