"""The inputs that a configuration describes. Transports are imported only when they are used."""

from brokerless.core.discovery import pattern_of
from brokerless.spark_collector.collector.config import (
    AnyInput,
    CollectorConfig,
    DirectIn,
    JournalIn,
    MulticastIn,
)
from brokerless.spark_collector.collector.inputs.base import CollectorInput


def all_inputs(config: CollectorConfig) -> list[CollectorInput]:
    """All inputs of a collector, not started. Raises ConfigError for an address that cannot be one."""
    return [made for each in config.input for made in make_inputs(each)]


def make_inputs(config: AnyInput) -> list[CollectorInput]:
    """One input per publisher, group, multicast session, webhook receiver or journal."""
    if isinstance(config, JournalIn):
        from brokerless.spark_collector.collector.inputs.journal import JournalInput

        return [JournalInput(config)]
    if isinstance(config, DirectIn):
        from brokerless.direct import parse_address

        for address in config.addresses:
            if pattern_of(address) is None:
                parse_address(address)
        if config.group:
            from brokerless.spark_collector.collector.inputs.group import GroupInput

            return [GroupInput(config)]
        from brokerless.spark_collector.collector.inputs.direct import DirectInput

        return [DirectInput(address, config) for address in config.addresses]
    if isinstance(config, MulticastIn):
        from brokerless.spark_collector.collector.inputs.multicast import MulticastInput

        return [MulticastInput(config)]
    from brokerless.spark_collector.collector.inputs.webhooks import WebhooksInput

    return [WebhooksInput(config)]
