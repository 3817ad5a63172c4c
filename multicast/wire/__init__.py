"""The wire format: MoldUDP64, messages, packing, authentication. Pure."""
