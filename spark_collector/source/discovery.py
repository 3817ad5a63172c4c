"""The locations that the options of the data source name."""

import glob
import os
from collections.abc import Mapping
from types import MappingProxyType

from brokerless.core.journal.meta import META
from brokerless.spark_collector.source.locations import JournalLocation, Location
from brokerless.spark_collector.tier.object_store import SCHEMES
from brokerless.spark_collector.tier.parts import NEWEST


def find_locations(
    paths: list[str],
    endpoints: list[str],
    storage_options: dict[str, str] | None = None,
    before: Mapping[str, Location] = MappingProxyType({}),
) -> list[Location]:
    """All locations that the options name now; a glob is looked up each time, so new spools are found.

    Tiers among `before`, those that were found the last time, are taken again with their connections.
    A plain path is taken as it is: listing nothing keeps planning independent of what lies there.
    """
    found: list[Location] = []
    for path in paths:
        if "://" in path:
            from brokerless.spark_collector.source.remote import RemoteLocation, find_tiers

            if path.endswith("/*"):
                found += find_tiers(path, storage_options, before)
            else:
                tier = RemoteLocation(path, storage_options)
                found.append(before.get(tier.key, tier))
        elif glob.has_magic(path):
            names = {os.path.dirname(p) for n in (META, NEWEST) for p in glob.glob(os.path.join(path, n))}
            found += [_in_directory(name) for name in sorted(names)]
        else:
            found.append(_in_directory(path))
    if endpoints:
        # Only here: a spool is read without any transport.
        from brokerless.spark_collector.source.replay import EndpointLocation

        found += [EndpointLocation(address) for address in endpoints]
    return found


def _in_directory(path: str) -> Location:
    """A spool or journal, or a tier on a mounted file system."""
    if not os.path.isfile(os.path.join(path, NEWEST)) or os.path.isfile(os.path.join(path, META)):
        return JournalLocation(path)
    from brokerless.spark_collector.source.remote import RemoteLocation

    return RemoteLocation(os.path.abspath(path))


def location_of(key: str, storage_options: dict[str, str] | None = None) -> Location:
    """The location that has this key."""
    endpoint = "://" in key and not key.startswith(SCHEMES)
    return find_locations([] if endpoint else [key], [key] if endpoint else [], storage_options)[0]
