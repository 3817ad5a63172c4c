"""A real UDP relay between a client and a daemon that loses, repeats and reorders with a seed."""

import random
import socket
import threading
from types import TracebackType


class Relay:
    """Forwards datagrams in a thread. `lost` and `received` are exact; what is held for reordering goes out later."""

    def __init__(
        self, target: str, seed: int, *, loss: float = 0, repeat: float = 0, reorder: float = 0
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._rnd = random.Random(seed)
        self._rates = (loss, repeat, reorder)
        self._in = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._in.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        self._in.bind(("127.0.0.1", 0))
        self._in.settimeout(0.05)
        self._out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.port: int = self._in.getsockname()[1]
        self.received = self.lost = 0
        self.sent = 0
        self.open = True  # False: everything is lost
        self._held: bytes | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Relay":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._in.close()
        self._out.close()

    def rates(self, *, loss: float = 0, repeat: float = 0, reorder: float = 0) -> None:
        """Change what happens from now on."""
        self._rates = (loss, repeat, reorder)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                datagram = self._in.recv(65536)
            except TimeoutError:
                self._release()
                continue
            loss, repeat, reorder = self._rates
            # Always four, so that which are lost depends on the seed alone and not on how fast this runs.
            lose, hold, again, release = (self._rnd.random() for _ in range(4))
            if not self.open or lose < loss:
                self.lost += 1
            elif self._held is None and hold < reorder:
                self._held = datagram
            else:
                self._send(datagram)
                if again < repeat:
                    self._send(datagram)
                if release < 0.3:
                    self._release()
            self.received += 1

    def _release(self) -> None:
        if self._held is not None:
            self._send(self._held)
            self._held = None  # last: whoever sees that it is idle finds it counted as sent

    def _send(self, datagram: bytes) -> None:
        self._out.sendto(datagram, self._target)
        self.sent += 1

    @property
    def idle(self) -> bool:
        """Nothing is held back."""
        return self._held is None
