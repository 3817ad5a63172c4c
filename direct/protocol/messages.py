"""The messages of the control socket: small and versioned, msgpack, bounded before they are decoded.

Every message is one part: a msgpack array that begins with its tag. Frames travel inside as binary, so the
same bytes that the journal holds go out again. The live socket carries bare frames, and `Beat` between them.

    client                         publisher
    Hello              ─────────▶
                       ◀─────────  Welcome | Refused
    Ready (live seen)  ─────────▶
    Replay             ─────────▶
                       ◀─────────  Chunk | KeyState
    SentRequest        ─────────▶
                       ◀─────────  Sent
    Advance, Bye       ─────────▶
    Admin              ─────────▶
                       ◀─────────  Report
    Credit, Settle     ─────────▶  (workers)
                       ◀─────────  Deliver, Gone, Ping
    StateRequest       ─────────▶  (mirrors)
                       ◀─────────  State
    Fence              ─────────▶  (a mirror that is being promoted, to the others, and they to it)
                       ◀─────────  Fenced
    Challenge          ─────────▶  (a publisher to the address of a mirror)
    Superseded         ─────────▶
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from brokerless.core.errors import ConfigError, InvalidEvent, PeerError
from brokerless.core.event import MAX_TIME, check_source

VERSION = 2
# Largest message a client may send. A Settle with its 1,000 ranges has 20 kB, a Hello with 256 topics 66 kB.
MAX_REQUEST_BYTES = 128 * 1024
# One 16 MiB event in a frame with its header must pass; chunks stop at `max_bytes` after the first frame.
MAX_REPLY_BYTES = 24 * 1024 * 1024
# What a worker may reply to a request: MAX_REQUEST_BYTES with the rest of the message.
MAX_REPLY_DATA_BYTES = MAX_REQUEST_BYTES - 1024
MAX_TOPICS = 256
# Characters of a source, a group or a durable subscriber, and bytes: journals take 255 with what we put before it.
MAX_NAME = 128
MAX_NAME_BYTES = 240
MAX_RANGES = 1000
# What one Sent may carry; a subscriber of more topics asks for the next page.
MAX_SENT_TOPICS = 4096
# Frames, ranges or holes in one reply: a worker has room for so many events, and a chunk of 1 MiB has fewer frames.
MAX_PARTS = 65_536

# A frame starts with core's magic; a Beat is told apart by this first byte (msgpack array of 5).
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Topic = Annotated[str, Meta(max_length=255)]
Offset = Annotated[int, Meta(ge=0, lt=1 << 62)]
Seconds = Annotated[float, Meta(ge=0, le=86400 * 30)]
Range = tuple[Offset, Offset]
# An address of a publisher or a mirror.
MirrorAddress = Annotated[str, Meta(max_length=512)]
MAX_MIRRORS = 16
# The last epochs of a source that WELCOME tells.
MAX_EPOCHS = 256


class Policy(Struct, array_like=True, frozen=True):
    """How a group treats deliveries."""

    lease_s: Annotated[float, Meta(gt=0, le=86400)] = 30.0
    max_deliver: Annotated[int, Meta(ge=1, le=10_000)] = 5
    affinity: bool = False
    topics: Annotated[tuple[Topic, ...], Meta(max_length=MAX_TOPICS)] = ()


class Message(Struct, array_like=True, frozen=True, gc=False):
    """Base of all messages."""


class Hello(Message, frozen=True, tag=1):
    """First word of a client: who, and what it wants. `client` is chosen at random by the client."""

    version: int
    client: Name
    group: Name = ""
    durable: Name = ""
    start: Annotated[str, Meta(max_length=24)] = ""  # live, oldest, cursor, or @ and a time in µs
    policy: Policy = Policy()
    # The address at which consumers reach this mirror.
    mirror: MirrorAddress = ""


class Ready(Message, frozen=True, tag=2):
    """The client receives the live stream, and has had everything before `position`."""

    epoch: Offset = 0
    position: Offset = 0


class Replay(Message, frozen=True, tag=3):
    """Send frames from `offset` on, about `max_bytes` of them. `time` is that of the event before, if we had it."""

    request: Offset
    epoch: Offset
    offset: Offset
    max_bytes: Annotated[int, Meta(ge=1, le=1 << 30)]
    time: Annotated[int, Meta(ge=-1, le=MAX_TIME)] = -1
    # Not from the journal, but from the newest events of all keys as of this offset: answered by KeyState.
    state: Annotated[int, Meta(ge=-1, lt=1 << 62)] = -1


class SentRequest(Message, frozen=True, tag=4):
    """How many events of each topic were sent? `after` is the last topic of the page before."""

    topics: Annotated[tuple[Topic, ...], Meta(max_length=MAX_TOPICS)] = ()
    after: Topic = ""


class Advance(Message, frozen=True, tag=5):
    """The durable subscriber has committed everything below `offset`, or the mirror has appended it. `proof` is the
    number of the last Challenge at the mirror's address."""

    epoch: Offset
    offset: Offset
    proof: Offset = 0


class Credit(Message, frozen=True, tag=6):
    """The worker can take this many events in all: held ones included."""

    window: Annotated[int, Meta(ge=0, le=1 << 31)]


class Settle(Message, frozen=True, tag=7):
    """Acknowledged ranges, returned events with their delay, ranges whose lease is to be prolonged, and ranges that are
    given back before any handler had them. `number` rises with each."""

    epoch: Offset
    acks: Annotated[list[Range], Meta(max_length=MAX_RANGES)] = []
    nacks: Annotated[list[tuple[Offset, Offset, Seconds]], Meta(max_length=MAX_RANGES)] = []
    extends: Annotated[list[Range], Meta(max_length=MAX_RANGES)] = []
    unbegun: Annotated[list[Range], Meta(max_length=MAX_RANGES)] = []
    number: Offset = 0


class Bye(Message, frozen=True, tag=8):
    """The client leaves; what a worker holds goes back at once. `forget` also drops its durable name. A worker says how
    many Settles it has sent since WELCOME: if all of them were read, no handler has had what it still holds."""

    forget: bool = False
    settles: int = -1


class Pong(Message, frozen=True, tag=9):
    """Answer to Ping, with its number: the client has read all that was sent before it. Without a number: a worker
    without leases has read a Deliver."""

    number: Offset = 0


class StateRequest(Message, frozen=True, tag=30):
    """A mirror asks for what belongs to the journal and is not in it. `echo` is the number of the last answer, which
    shows that the mirror followed this publisher when that was sent; dead letters are wanted from `offset` on."""

    echo: Offset = 0
    offset: Offset = 0
    proof: Offset = 0


class Fence(Message, frozen=True, tag=31):
    """`candidate` is about to become the publisher in `epoch`: do not follow an older epoch any more. The receiver asks
    the candidate at its own address whether that is so, and believes only that answer."""

    epoch: Offset
    candidate: MirrorAddress


class Superseded(Message, frozen=True, tag=32):
    """A consumer has seen this epoch, which a promotion began: look whether you are still the publisher."""

    epoch: Offset


class Challenge(Message, frozen=True, tag=33):
    """A publisher says this to the address of a mirror: only who is there can name the number."""

    number: Offset


class Admin(Message, frozen=True, tag=10):
    """A command of an administrator, who need not have said hello. See protocol/administration.py."""

    number: Offset
    command: Annotated[str, Meta(max_length=32)]
    name: Name = ""
    after: Offset = 0
    numbers: Annotated[list[Offset], Meta(max_length=MAX_RANGES)] = []


class Answer(Message, frozen=True, tag=11):
    """A worker's reply to the request whose header `requestid` that is."""

    request: Name
    data: Annotated[bytes, Meta(max_length=MAX_REPLY_DATA_BYTES)] = b""


class Welcome(Message, frozen=True, tag=65):
    """The journal holds offsets `[oldest, next)`; live frames come at `live` (see address.live_connect).

    The present epoch began at offset `begin`; below it are events of older ones. `at` is the position the
    publisher keeps for the durable name, or -1. `instance` changes with every start of the publisher. Without
    `replay` there is no journal to ask.
    """

    version: int
    source: Name
    instance: int
    epoch: Offset
    begin: Offset
    oldest: Offset
    next: Offset
    live: Annotated[str, Meta(max_length=512)]
    beat_s: float
    replay: bool = True
    at: Annotated[int, Meta(ge=-1, lt=1 << 62)] = -1
    # (epoch, first offset) of the last epochs, oldest first.
    epochs: Annotated[list[Range], Meta(max_length=MAX_EPOCHS)] = []
    # Where else this source can be read, and how many of these must have an event before it counts as mirrored.
    mirrors: Annotated[list[MirrorAddress], Meta(max_length=MAX_MIRRORS)] = []
    mirrored: Annotated[int, Meta(ge=0, le=MAX_MIRRORS)] = 0
    # This is a mirror: its journal may end before the publisher's, and it does not dispatch.
    copy: bool = False
    # For how long the publisher may dispatch after it heard of enough mirrors.
    lease_s: Seconds = 0.0
    # The offset as of which the newest event of every key is kept, or -1: the journal does not compact.
    state: Annotated[int, Meta(ge=-1, lt=1 << 62)] = -1


class Refused(Message, frozen=True, tag=66):
    """No, and why. `again`: the client is unknown (the publisher restarted): say Hello again."""

    text: str
    again: bool = False


class Chunk(Message, frozen=True, tag=67):
    """Answer to Replay: frames that cover `[offset, next)` except `gone` (first, after, reason); `tail` is the end."""

    request: Offset
    epoch: Offset
    next: Offset
    tail: Offset
    gone: Annotated[list[tuple[Offset, Offset, str]], Meta(max_length=MAX_PARTS)]
    frames: Annotated[list[bytes], Meta(max_length=MAX_PARTS)]


class Sent(Message, frozen=True, tag=68):
    """When the journal's end was `at`, `seqs` events of each topic had been sent. `more`: ask for another page."""

    epoch: Offset
    at: Offset
    seqs: Annotated[dict[Topic, Offset], Meta(max_length=MAX_SENT_TOPICS)]
    more: bool = False


class Deliver(Message, frozen=True, tag=69):
    """Events for a worker: of those in `frames`, the ones in `ranges` (first, last, attempt). `after` is the number of
    the worker's last Settle that the publisher had read."""

    epoch: Offset
    frames: Annotated[list[bytes], Meta(max_length=MAX_PARTS)]
    ranges: Annotated[list[tuple[Offset, Offset, int]], Meta(max_length=MAX_PARTS)]
    after: int = 0


class Gone(Message, frozen=True, tag=70):
    """The group has lost these ranges of offsets (both ends included)."""

    epoch: int
    ranges: Annotated[list[Range], Meta(max_length=MAX_RANGES)]
    reason: str


class Ping(Message, frozen=True, tag=71):
    """Are you there, and have you read all this? To be answered with the number."""

    number: Offset = 0


class State(Message, frozen=True, tag=90):
    """Answer to StateRequest: groups as they are stored, positions of durable subscribers, dead letters from the wanted
    offset on with the epochs of their journal. `awaited`: somebody waits for acknowledgements."""

    number: Offset
    groups: Annotated[dict[Name, bytes], Meta(max_length=1024)] = {}
    cursors: Annotated[dict[str, Offset], Meta(max_length=4096)] = {}
    dead_epochs: Annotated[list[Range], Meta(max_length=MAX_EPOCHS)] = []
    dead: Annotated[list[bytes], Meta(max_length=MAX_PARTS)] = []
    awaited: bool = True


class Fenced(Message, frozen=True, tag=91):
    """Answer to Fence: a mirror that has everything of `epoch` before `next` follows nobody below the wanted epoch, or
    `refused` says why not. It follows nobody below `promised`."""

    epoch: Offset
    next: Offset
    refused: str = ""
    promised: Offset = 0


class KeyState(Message, frozen=True, tag=73):
    """Answer to Replay with `state`: of the newest events of all keys as of `state`, those from the wanted offset up to
    `next`, in blocks (see core/journal/key_state.py). With another `state` than was asked for: what follows on that one
    is gone, and this is the beginning of the one as of `state`. `gone`: (first, after), damaged."""

    request: Offset
    epoch: Offset
    state: Offset
    next: Offset
    blocks: Annotated[list[bytes], Meta(max_length=MAX_PARTS)]
    gone: Annotated[list[Range], Meta(max_length=MAX_PARTS)] = []


class Report(Message, frozen=True, tag=72):
    """Answer to Admin: JSON, what was asked for, or the text of the problem."""

    number: Offset
    done: bool
    body: bytes


class Beat(Message, frozen=True, tag=96):
    """On the live socket: everything below `next` has been sent before this."""

    instance: int
    epoch: Offset
    next: Offset


Request = (
    Hello
    | Ready
    | Replay
    | SentRequest
    | Advance
    | Credit
    | Settle
    | Bye
    | Pong
    | StateRequest
    | Fence
    | Superseded
    | Challenge
    | Admin
    | Answer
)
Reply = Welcome | Refused | Chunk | KeyState | Sent | Deliver | Gone | Ping | State | Fenced | Report

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_beats = msgspec.msgpack.Decoder(Beat)
encode = _encoder.encode


def check_name(field: str, name: str) -> None:
    """Raise ConfigError if it is not a name, or the other side would not read it."""
    try:
        check_source(name)
    except InvalidEvent as error:
        raise ConfigError(field, error.problem) from None
    if len(name) > MAX_NAME:
        raise ConfigError(field, f"has {len(name)} characters, the limit is {MAX_NAME}")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ConfigError(field, f"has {len(name.encode())} bytes in UTF-8, the limit is {MAX_NAME_BYTES}")


def start_at(time: int) -> str:
    """A time in µs as the `start` of a Hello."""
    return f"@{time}"


def start_time(start: str) -> int | None:
    """The time in µs that a Hello wants to start at; None if it is not a time. Raises PeerError."""
    if not start.startswith("@"):
        return None
    digits = start[1:].removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or int(digits) > MAX_TIME:
        raise PeerError(f"{start!r} is not a time to start at")
    return int(start[1:])


def decode_request(data: bytes) -> Request:
    """Decode what a client said. Raises PeerError for anything else, whatever the bytes are."""
    if len(data) > MAX_REQUEST_BYTES:
        raise PeerError(f"request of {len(data)} bytes, the limit is {MAX_REQUEST_BYTES}")
    try:
        return _requests.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PeerError(f"not a request: {error}") from None


def decode_reply(data: bytes) -> Reply:
    """Decode what a publisher said. Raises PeerError for anything else."""
    try:
        return _replies.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PeerError(f"not a reply: {error}") from None


def decode_beat(data: bytes) -> Beat:
    """Decode a heartbeat of the live socket. Raises PeerError for anything else."""
    try:
        return _beats.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PeerError(f"not a heartbeat: {error}") from None
