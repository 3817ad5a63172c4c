"""What breaks a transport: relay, impairments, packet filter, seeded drops, clock jumps."""
