"""The request server: sends again what receivers missed, out of a journal."""

import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from brokerless.core import Journal, JournalReader, Reason
from brokerless.core.errors import BrokerlessError, ConfigError
from brokerless.core.exporter import Announced
from brokerless.core.loss_log import LossLog
from brokerless.core.runtime.closing import Closing
from brokerless.core.runtime.datagrams import kernel_drops
from brokerless.core.runtime.wakeup import WakeUp
from brokerless.multicast.counters import PublisherCounters, RequestServerCounters
from brokerless.multicast.policy import AnswerPolicy
from brokerless.multicast.receive.tcp_fetch import LENGTH, PACKET_BYTES, read_exactly
from brokerless.multicast.send.admission import Admission, AdmittedRequest, network_of
from brokerless.multicast.send.positions import Positions
from brokerless.multicast.send.retransmit import Readable, Retransmitter
from brokerless.multicast.send.sharing import Sharing
from brokerless.multicast.send.transmit import Transmitter, open_lines
from brokerless.multicast.sockets import (
    DEFAULT_INTERFACE,
    DEFAULT_TTL,
    Address,
    SocketFault,
    interface_mtu,
    parse_address,
    unicast_socket,
)
from brokerless.multicast.wire.auth import (
    CLOCK_WINDOW_S,
    Freshness,
    Signer,
    Verifier,
    signed_at,
)
from brokerless.multicast.wire.moldudp64 import (
    END_OF_SESSION,
    HEADER_BYTES,
    MAX_DATAGRAM,
    Gone,
    check_name,
    heartbeat,
    parse_header,
)
from brokerless.multicast.wire.pure import TRAILER_BYTES
from brokerless.multicast.wire.status import EXTENDED_REQUEST_BYTES, LEAVING, SHARED_BYTES, status_packet

log = logging.getLogger(__name__)
# IPv6 and UDP headers: what does not fit beside them is fragmented, and one lost fragment loses all.
_HEADERS_BYTES = 48
_ROUND = 64
_MAX_REQUEST_BYTES = EXTENDED_REQUEST_BYTES + TRAILER_BYTES


class RequestServer(Announced, Closing):
    """Answers requests for one session out of one journal, by UDP and TCP at one address.

    `journal` is a Journal of this process, a JournalReader, or the path of a DiskJournal that another process
    writes. There may be several servers for one session, here or on other machines that can read the journal.

    Question 1, more is asked than can be answered: requests over a client's or the total budget are refused
    and counted; clients ask again, with back-off. Question 2, it crashes: nothing is lost, receivers ask
    another server or wait for it to come back, and give up by their own deadline.

    Every request is answered with at most one packet, and a client (a host, whatever its ports) gets its budget
    and no more. A packet is larger than a request, so an address that has not proven that it receives our answers gets
    little; see `AnswerPolicy`.
    """

    def __init__(
        self,
        journal: Readable | str | os.PathLike[str],
        session: str,
        address: str = "127.0.0.1:0",
        *,
        allow: Iterable[str] | None = None,
        answers: AnswerPolicy | None = None,
        auth_key: bytes | None = None,
        answer_bytes: int | None = None,
        tcp: bool = True,
        group: str | Sequence[str] = (),
        interface: str | Sequence[str] = DEFAULT_INTERFACE,
        ttl: int = DEFAULT_TTL,
        clock_window_s: float = CLOCK_WINDOW_S,
        announce: bool = True,
        metrics: str = "",
    ) -> None:
        """Begin to serve. `allow` has the addresses or networks that may ask; None: everybody.

        `group`, `interface` and `ttl` are those of the publisher: what several subscribers lack is sent there, once for
        all of them; without a group everybody is answered alone.
        `answer_bytes` is the largest answer; by default what goes through the interface in one piece. `announce=False`
        keeps it out of `brokerless ps`; `metrics` is a host:port where this process serves `/metrics` for Prometheus.
        """
        check_name(session)
        where = parse_address(address, "address", any_port=True)
        if not isinstance(journal, (Journal, JournalReader, str, os.PathLike)):
            raise ConfigError("journal", f"must be a journal, a reader of one or a path, not {journal!r}")
        self._owned = JournalReader(journal) if isinstance(journal, (str, os.PathLike)) else None
        self._journal: Readable = self._owned or journal  # type: ignore[assignment]
        self._name = session
        self._policy = answers or AnswerPolicy()
        self._sign = Signer(auth_key, "answer") if auth_key is not None else None
        self._verify = Verifier(auth_key, "request") if auth_key is not None else None
        if answer_bytes is None:
            answer_bytes = min(MAX_DATAGRAM, interface_mtu(where.host, where.family) - _HEADERS_BYTES)
        if not 100 <= answer_bytes <= MAX_DATAGRAM:
            raise ConfigError("answer_bytes", f"must be 100 to {MAX_DATAGRAM}")
        self._answer_bytes = answer_bytes
        self.counters = RequestServerCounters()
        self._admission = Admission(
            self._policy,
            allow=allow,
            counters=self.counters,
            now=time.monotonic(),
            secret=secrets.token_bytes(16),
        )
        self._freshness = Freshness(window_s=clock_window_s)
        self.positions = Positions(self._policy.max_clients)
        self.asked_at = 0.0  # when something was asked for last, or somebody came
        self._admission_lock = threading.Lock()
        self._stop = threading.Event()
        self._logged = False
        self._loss_log, self._loss_lock = LossLog("brokerless.multicast.request_server"), threading.Lock()
        self._fetches: dict[threading.Thread, tuple[socket.socket, str]] = {}
        self._listener: socket.socket | None = None
        self._sharing = (
            Sharing(self._policy, time.monotonic()) if group and self._policy.share_repairs else None
        )
        self._lines: list[Transmitter] = []
        try:
            if self._sharing is not None:
                self._lines = open_lines(group, interface, ttl, "plain", PublisherCounters())
            self._sock, self._listener = _bind_both(where, tcp)
        except BaseException:
            for line in self._lines:
                line.close()
            if self._owned:
                self._owned.close()
            raise
        host, port = self._sock.getsockname()[:2]
        self.address = Address(host, port)
        self._wakeup = WakeUp()
        self._retransmitter = Retransmitter(
            self._journal,
            session,
            sign=self._sign,
            sign_shared=Signer(auth_key, "group") if auth_key is not None else None,
        )
        self._thread = threading.Thread(target=self._run, name="brokerless-requests", daemon=True)
        self._thread.start()
        addresses = [str(self.address)]
        self._announce("multicast.request_server", session, addresses, enabled=announce, metrics=metrics)

    def _state(self) -> dict[str, Any]:
        """What it announces about itself (see `core.presence`)."""
        return {"counters": self.counters.snapshot()}

    # -- datagrams ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wakeup.fd, select.POLLIN)
        if self._listener is not None:
            poll.register(self._listener, select.POLLIN)
        while not self._stop.is_set():
            poll.poll(500)
            pause_s = self._admission.pause_s(self._read_requests(), time.monotonic())
            if pause_s > 0:  # a flood: what we do not read costs nothing
                self._stop.wait(pause_s)
            if self._listener is not None:
                self._accept(self._listener)

    def _read_requests(self) -> int:
        """Read up to a round of requests, and answer them; returns how many there were."""
        for done in range(_ROUND):
            try:
                packet, address = self._sock.recvfrom(MAX_DATAGRAM)
            except OSError:
                return done
            try:
                self._serve(packet, address)
            except BrokerlessError as error:
                self._log_once(error)
        return _ROUND

    def _serve(self, packet: bytes, address: tuple[str, int]) -> None:
        host, port = address[0], address[1]
        view = memoryview(packet)
        if self._verify is not None:
            opened = self._verify(view)
            if opened is None:
                self.counters.requests += 1
                self.counters.unauthentic += 1
                return
            if not self._freshness.is_new(*signed_at(packet)):
                self.counters.requests += 1
                self.counters.replayed += 1
                return
            view = opened
        now = time.monotonic()
        with self._admission_lock:
            admitted = self._admission.take(view, host, port, self._retransmitter.session, now)
        if admitted is None:
            return
        if not admitted.messages:
            who = admitted.requester
            # A position in an earlier session says nothing of this one.
            if who is not None and admitted.proven and (admitted.current or who.expected == LEAVING):
                self.positions.update(who, admitted.first, now)
            elif who is not None and who.expected != LEAVING:
                self.asked_at = now  # it has just come, and will tell its position
            self._answer_status(admitted, address, now)
            return
        self.asked_at = now
        answer = self._retransmitter.answer(admitted.first, admitted.messages, self._answer_bytes)
        if answer is None:
            self.counters.ahead += 1
            return
        if (
            self._sharing is not None
            and not isinstance(answer, Gone)
            and admitted.requester
            and admitted.proven
        ):
            size, asker = len(answer[0]) + SHARED_BYTES, admitted.requester.requester
            decision = self._sharing.decide(asker, admitted.first, size, len(self.positions), now)
            if decision == "nobody":
                self.counters.crossed += 1
                return
            if decision == "group" and self._answer_group(admitted):
                return
        raw = self._retransmitter.packet(answer) if isinstance(answer, Gone) else answer[0]
        if not self._send_within_budget(raw, address, now, proven=admitted.proven):
            return
        if isinstance(answer, Gone):
            self._note_gone(answer)
        else:
            self.counters.answered += 1
            self.counters.messages += answer[1]

    def _send_within_budget(self, raw: bytes, address: tuple[str, int], now: float, *, proven: bool) -> bool:
        """Send it to one client; False if that is over the client's budget, or the system refuses."""
        with self._admission_lock:
            if not self._admission.spend(address[0], len(raw), now, proven=proven):
                return False
        try:
            self._sock.sendto(raw, address)
        except OSError:
            self.counters.send_errors += 1
            return False
        self.counters.sent_bytes += len(raw)
        return True

    def _note_gone(self, answer: Gone) -> None:
        """Somebody asked for what the journal no longer has, and will declare it lost: say so on this side, too."""
        first = max(answer.first, answer.base)
        with self._loss_lock:
            self.counters.gone += 1
            self._loss_log.add(
                answer.source, Reason.EVICTED, answer.oldest - first, first - 1, answer.oldest - 2
            )

    def _answer_group(self, admitted: AdmittedRequest) -> bool:
        """Send what was asked for to everybody; False if no line could."""
        answer = self._retransmitter.answer(
            admitted.first, admitted.messages, self._answer_bytes, shared=True
        )
        if answer is None or isinstance(answer, Gone):
            return False
        raw, messages = answer
        sent = sum(line.send_one(raw) for line in self._lines)
        self.counters.send_errors += len(self._lines) - sent
        self.counters.shared += bool(sent)
        self.counters.shared_bytes += sent * len(raw)
        self.counters.messages += messages if sent else 0
        return sent > 0

    def _answer_status(self, admitted: AdmittedRequest, address: tuple[str, int], now: float) -> None:
        assert admitted.requester is not None
        if admitted.requester.expected == LEAVING:
            return
        cookie = self._admission.cookie(address[0], address[1], now)
        raw = status_packet(
            self._retransmitter.status(cookie, admitted.requester.requester, self.sharing_receivers)
        )
        if self._sign:
            raw += self._sign(raw)
        if self._send_within_budget(raw, address, now, proven=admitted.proven):
            self.counters.statuses += 1

    @property
    def sharing_receivers(self) -> int:
        """Subscribers that should wait for each other before they ask; 1: nobody should."""
        return 1 if self._sharing is None else self._sharing.waiting(len(self.positions))

    def count_drops(self) -> int:
        """What the kernel dropped so far of the requests, read from it now."""
        if not self._stop.is_set():
            self.counters.kernel_drops = kernel_drops(self._sock)
        return self.counters.kernel_drops

    # -- TCP ---------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                return
            for thread in [t for t in self._fetches if not t.is_alive()]:
                thread.join()
                del self._fetches[thread]
            host = network_of(address[0])
            own = sum(other == host for _, other in self._fetches.values())
            full = len(self._fetches) >= self._policy.max_fetches or own >= self._policy.client_fetches
            if full or not self._admission.allowed(address[0]):
                self.counters.fetches_refused += 1
                connection.close()
                continue
            thread = threading.Thread(
                target=self._stream,
                args=(connection, address[0]),
                name="brokerless-fetch-server",
                daemon=True,
            )
            self._fetches[thread] = connection, host
            thread.start()

    def _stream(self, connection: socket.socket, host: str) -> None:
        """Serve one connection until it ends, is idle for too long, or says something that is no request."""
        retransmitter = Retransmitter(self._journal, self._name, sign=self._sign)
        try:
            while not self._stop.is_set():
                asked = self._read_request(connection, retransmitter.session)
                if asked is None:
                    return
                self.counters.fetches += 1
                self.asked_at = time.monotonic()
                with self._admission_lock:
                    self._admission.prove(host, time.monotonic())
                self._answer_stream(connection, host, retransmitter, *asked)
        except BrokerlessError as error:
            self._log_once(error)
        except (OSError, ValueError):
            pass  # the client left, or was idle for too long
        finally:
            connection.close()

    def _read_request(self, connection: socket.socket, session: bytes) -> tuple[int, int] | None:
        """One request, which must be here as a whole in time: a client that drips holds nothing."""
        deadline = time.monotonic() + self._policy.fetch_idle_s
        head = read_exactly(connection, LENGTH.size, deadline)
        size = LENGTH.unpack(head)[0] if head else 0
        if not head:
            return None
        whole = HEADER_BYTES <= size <= _MAX_REQUEST_BYTES
        packet = read_exactly(connection, size, deadline) if whole else None
        view = memoryview(packet) if packet is not None else None
        if view is not None and self._verify is not None:
            view = self._verify(view)
            if view is None:
                self.counters.unauthentic += 1
                return None
            if not self._freshness.is_new(*signed_at(packet or b"")):
                self.counters.replayed += 1
                return None
        header = parse_header(view) if view is not None and len(view) == HEADER_BYTES else None
        if header is None or not header.sequence or header.messages in (0, END_OF_SESSION):
            self.counters.malformed += 1
            return None
        if header.session != session:
            self.counters.refused_session += 1
            return None
        return header.sequence, header.messages

    def _answer_stream(
        self, connection: socket.socket, host: str, retransmitter: Retransmitter, first: int, messages: int
    ) -> None:
        following = first
        pending: list[bytes] = []
        size = 0
        for answer in retransmitter.stream(first, messages, PACKET_BYTES):
            if isinstance(answer, Gone):
                raw, following = retransmitter.packet(answer), max(following, answer.oldest)
                self._note_gone(answer)
            else:
                raw = answer[0]
                following += answer[1]
                self.counters.fetched_messages += answer[1]
            pending += [LENGTH.pack(len(raw)), raw]
            size += len(raw)
            if size >= 4 * PACKET_BYTES:
                self._push(connection, host, pending, size)
                pending, size = [], 0
            if self._stop.is_set():
                return
        end = heartbeat(retransmitter.session, min(following, first + messages))
        if self._sign:
            end += self._sign(end)
        self._push(connection, host, [*pending, LENGTH.pack(len(end)), end], size + len(end))

    def _push(self, connection: socket.socket, host: str, pieces: list[bytes], size: int) -> None:
        """Send, at the pace that the budgets allow."""
        while True:
            with self._admission_lock:
                wait = self._admission.fetch_wait_s(host, size, time.monotonic())
            if wait <= 0 or self._stop.wait(min(wait, 1.0)):
                break
        connection.settimeout(self._policy.fetch_idle_s)  # for all of it, however slowly it is read
        connection.sendall(b"".join(pieces))
        self.counters.fetched_bytes += size

    def _log_once(self, error: BrokerlessError) -> None:
        """The journal cannot be read: that must not end the server; it is logged once, and counted."""
        self.counters.journal_errors += 1
        if not self._logged:
            self._logged = True
            log.warning("a request could not be answered: %s", error)

    # -- end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop serving; joins all threads. Closing twice is fine."""
        if self._stop.is_set():
            return
        self._withdraw()
        self._stop.set()
        self._wakeup.wake()
        self._thread.join(10)
        for thread, (connection, _) in list(self._fetches.items()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(10)
        self._loss_log.close()
        self._sock.close()
        for line in self._lines:
            line.close()
        if self._listener is not None:
            self._listener.close()
        self._wakeup.close()
        if self._owned is not None:
            self._owned.close()


def _bind_both(where: Address, tcp: bool) -> tuple[socket.socket, socket.socket | None]:
    """UDP and TCP at the same port; a free one for both if the port is 0."""
    for _ in range(50):
        sock = unicast_socket(where.family, where.host, where.port)
        if not tcp:
            return sock, None
        host, port = sock.getsockname()[:2]
        listener = socket.socket(where.family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(64)
            listener.setblocking(False)
            return sock, listener
        except OSError as error:
            listener.close()
            sock.close()
            if where.port:
                raise SocketFault(f"cannot bind TCP {where}", error) from None
    raise ConfigError("address", "found no port that is free for both UDP and TCP")
