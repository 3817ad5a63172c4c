"""The inputs that a configuration describes. Transports are imported only when they are used."""

from brokerless.spark_collector.collector.config import AnyInput, DirectIn, JournalIn, MulticastIn
from brokerless.spark_collector.collector.inputs.base import CollectorInput


def make_inputs(config: AnyInput) -> list[CollectorInput]:
    """One input per publisher, group, multicast session, webhook receiver or journal."""
    if isinstance(config, JournalIn):
        from brokerless.spark_collector.collector.inputs.journal import JournalInput

        return [JournalInput(config)]
    if isinstance(config, DirectIn):
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
