"""Consumer groups, seen from the publisher: leases, redelivery, key affinity, dead letters."""
