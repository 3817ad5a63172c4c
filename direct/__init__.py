"""Events straight from producers to consumers over ZeroMQ or NNG: fan-out, groups, replay, with no broker."""

from brokerless.direct.address import parse_address
from brokerless.direct.admin import AdminClient
from brokerless.direct.batch import Batch
from brokerless.direct.groups.dead_letters import DeadLetter, read_dead_letters
from brokerless.direct.keys import ClientKeys, KeyPair, ServerKeys, load_public
from brokerless.direct.mirror import Mirror
from brokerless.direct.outbox import OutboxFault, OutboxRelay, create_outbox, publish_in
from brokerless.direct.protocol.loss_accounting import Snapshot
from brokerless.direct.protocol.messages import Chunk as ReplayChunk
from brokerless.direct.publisher import GroupStatus, Publisher
from brokerless.direct.publisher_lease import FileLease, KubernetesLease, PostgresLease
from brokerless.direct.replay import ReplayClient
from brokerless.direct.request import NoReply, RequestClient
from brokerless.direct.subscriber import Subscriber
from brokerless.direct.worker import Delivery, Worker

__all__ = [
    "AdminClient",
    "Batch",
    "ClientKeys",
    "DeadLetter",
    "Delivery",
    "FileLease",
    "GroupStatus",
    "KeyPair",
    "KubernetesLease",
    "Mirror",
    "NoReply",
    "OutboxFault",
    "OutboxRelay",
    "PostgresLease",
    "Publisher",
    "ReplayChunk",
    "ReplayClient",
    "RequestClient",
    "ServerKeys",
    "Snapshot",
    "Subscriber",
    "Worker",
    "create_outbox",
    "load_public",
    "parse_address",
    "publish_in",
    "read_dead_letters",
]
