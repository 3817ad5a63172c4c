"""What mirrors and their publisher decide, without I/O: who has what, who may dispatch, when a promotion is safe.

`direct/mirror.py` (`Mirror.promote`) carries it out.

A publisher with `mirrored=K` of N mirrors dispatches its groups only while K of them follow it: each shows, by echoing
the number of an answer, that it followed when that answer was sent, and that counts for `lease_s` from the sending.
A mirror that is being promoted first has others promise to follow no older epoch (`Fence`). When so many have promised
that fewer than K are left, and `lease_s` has passed since, the old publisher neither dispatches nor gets an event
mirrored, whether it is gone, stopped or cut off. The clocks need not agree; they must run equally fast.
"""

import secrets
from collections.abc import Mapping, Sequence

from brokerless.direct.protocol import messages

# How long a publisher dispatches without hearing of its mirrors. They show themselves ten times a second, so a pause
# of two seconds passes; a promotion takes this long, and a quarter more for clocks that run differently.
LEASE_S = 2.0
LEASE_MARGIN = 1.25
Epochs = Sequence[tuple[int, int]]


def quorum(mirrors: int, mirrored: int) -> int:
    """How many of so many mirrors must promise, the promoted one included.

    Any `mirrored` of them must include one that promised, and so must any other promotion at the same time.
    """
    return max(mirrors - mirrored + 1, mirrors // 2 + 1)


def divergence(own: Epochs, end: int, theirs: Epochs) -> int:
    """The first offset at which a copy with these epochs, ending at `end`, is not what the writer's journal has.

    `end` if it is a prefix of it. -1 if they have no epoch in common, so that they cannot be compared.
    """
    if not own or not end:
        return end
    known = dict(theirs)
    if not any(known.get(epoch) == first for epoch, first in own):
        return -1
    last_common = max(i for i, (epoch, first) in enumerate(own) if known.get(epoch) == first)
    names = [epoch for epoch, _ in theirs]
    ours = [first for _, first in own[last_common + 1 :]]
    writers = [first for _, first in theirs[names.index(own[last_common][0]) + 1 :]]
    return min([end, *ours[:1], *writers[:1]])


def first_after(epochs: Epochs, epoch: int, otherwise: int) -> int:
    """Where the epoch after `epoch` began: from there on a consumer of `epoch` has had nothing of this journal."""
    names = [number for number, _ in epochs]
    if epoch in names:
        later = [first for _, first in epochs[names.index(epoch) + 1 :]]
    else:
        later = [first for number, first in epochs if number > epoch]
    return min([otherwise, *later])


def objection(
    own: tuple[int, int], answers: Mapping[str, tuple[int, int] | str], mirrors: int, mirrored: int
) -> str:
    """Why a mirror that has `own` (epoch, next) must not become the publisher; empty if it may.

    `answers` has what the other mirrors have, or why one did not promise.
    """
    promised = {address: has for address, has in answers.items() if not isinstance(has, str)}
    ahead = [address for address, has in promised.items() if has > own]
    if ahead:
        address = max(ahead, key=lambda name: promised[name])
        return f"{address} has more: up to offset {promised[address][1]}, this mirror up to {own[1]}"
    needed = quorum(mirrors, mirrored)
    if mirrored < 1:
        return "the publisher waits for no mirror (mirrored=0), so only you can know that it is stopped"
    if len(promised) + 1 < needed:
        silent = "; ".join(f"{address}: {has}" for address, has in answers.items() if isinstance(has, str))
        return f"{needed} of {mirrors} mirrors must take part, {len(promised) + 1} do ({silent})"
    return ""


class MirrorPositions:
    """What a publisher knows of its mirrors: how far each has its events, and since when it follows."""

    def __init__(self, addresses: Sequence[str], mirrored: int, lease_s: float = LEASE_S) -> None:
        self.addresses = list(addresses)
        self.mirrored = mirrored
        self.lease_s = lease_s
        self.reached = 0  # everything below is with `mirrored` mirrors
        self._have: dict[str, int] = {}
        self._followed: dict[str, float] = {}
        self._asked: dict[str, tuple[int, float]] = {}
        self.challenges = {address: 1 + secrets.randbits(61) for address in addresses}

    def proven(self, address: str, proof: int) -> bool:
        """Whether the sender received our challenge, and so is reached at that address."""
        return self.challenges.get(address) == proof

    def acknowledged(self, address: str, offset: int, proof: int) -> bool:
        """A mirror has everything before `offset`; whether `reached` has moved."""
        if not self.proven(address, proof):
            return False
        self._have[address] = max(offset, self._have.get(address, 0))
        if not 0 < self.mirrored <= len(self._have):
            return False
        reached = sorted(self._have.values(), reverse=True)[self.mirrored - 1]
        moved, self.reached = reached > self.reached, reached
        return moved

    def missing(self, offset: int) -> list[str]:
        """The mirrors that do not have the event at `offset`."""
        return [address for address in self.addresses if self._have.get(address, 0) <= offset]

    def positions(self) -> dict[str, int]:
        """The offset before which each mirror has everything."""
        return {address: self._have.get(address, 0) for address in self.addresses}

    def answering(self, address: str, now: float) -> int:
        """The number of an answer that leaves for a mirror now."""
        number = secrets.randbits(62)
        self._asked[address] = (number, now)
        return number

    def echoed(self, address: str, number: int) -> None:
        """A mirror has shown that it followed us when that answer was sent."""
        asked, at = self._asked.get(address, (-1, 0.0))
        if asked == number:
            self._followed[address] = at

    def following(self, now: float) -> list[str]:
        """Mirrors that are known to follow us now."""
        return [address for address, at in self._followed.items() if now - at < self.lease_s]

    def may_dispatch(self, now: float) -> bool:
        """Whether no mirror can have become the publisher."""
        return len(self.following(now)) >= self.mirrored


class Replication:
    """What a control server tells about copies; this one is of a publisher without mirrors."""

    copy = False
    addresses: Sequence[str] = ()
    mirrored = 0
    lease_s = 0.0
    refusal = ""  # why nobody is served here any more

    def epochs(self) -> list[tuple[int, int]]:
        """The source's epochs, as far as known."""
        return []

    def may_dispatch(self, now: float) -> bool:
        """Whether groups may be given events."""
        return True

    def acknowledged(self, address: str, offset: int, proof: int) -> None:
        """A client that says that it is the mirror at `address` has everything before the offset."""

    def answer(self, address: str, request: messages.Request, now: float) -> messages.Reply | None:
        """Answer what mirrors and publishers say to each other; `address` is where the client says to be a mirror."""
        return None
