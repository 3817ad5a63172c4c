"""What the relay does to packets and streams: drop, delay, double, slow down, reset. Pure: the seed is given."""

from random import Random

from brokerless.core.errors import ConfigError


class Impairment:
    """The current rule, and the random numbers it goes by."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._burst = 0
        self._rule: tuple[str, tuple[float, ...]] = ("pass", ())
        self.cut_to = False  # nothing reaches the consumer
        self.cut_from = False  # nothing of the consumer's gets out
        self.bytes_per_s = 0.0  # towards the consumer; 0: no limit
        self.resets_per_s = 0.0  # how often a connection is reset, on average; 0: never

    def instruct(self, line: str) -> None:
        """Change what is done from now on.

        `pass`, `loss P`, `burst P N`, `reorder P DELAY_S`, `duplicate P`, `latency DELAY_S JITTER_S`,
        `bandwidth BYTES_PER_S`, `reset PER_S`, `cut to|from|both`, `uncut`.
        """
        word, *arguments = line.split()
        if word == "cut":
            self.cut_to = arguments[0] in ("to", "both")
            self.cut_from = arguments[0] in ("from", "both")
        elif word == "uncut":
            self.cut_to = self.cut_from = False
        elif word in ("pass", "loss", "burst", "reorder", "duplicate", "latency", "bandwidth", "reset"):
            self._rule = (word, tuple(float(a) for a in arguments))
            self._burst = 0
            self.bytes_per_s = self._rule[1][0] if word == "bandwidth" else 0.0
            self.resets_per_s = self._rule[1][0] if word == "reset" else 0.0
        else:
            raise ConfigError("relay", f"does not know the instruction {line!r}")

    def latency_s(self) -> float:
        """How long the next packet, or part of a stream, is held back."""
        word, numbers = self._rule
        return numbers[0] + self._random.uniform(-1, 1) * numbers[1] if word == "latency" else 0.0

    def resets(self, elapsed_s: float) -> bool:
        """True if a connection is to be reset now; `elapsed_s` is the time since it was asked last."""
        return bool(self.resets_per_s) and self._random.random() < self.resets_per_s * elapsed_s

    def delays(self, to_consumer: bool) -> list[float]:
        """For one packet: after how many seconds to send it, once per entry; empty means drop it."""
        if self.cut_to if to_consumer else self.cut_from:
            return []
        word, numbers = self._rule
        if word == "latency":
            return [max(0.0, self.latency_s())]  # both ways, as on a long line
        if word in ("pass", "bandwidth", "reset") or not to_consumer:
            return [0.0]
        if word == "burst":
            if not self._burst and self._random.random() < numbers[0]:
                self._burst = int(numbers[1])
            if self._burst:
                self._burst -= 1
                return []
            return [0.0]
        hit = self._random.random() < numbers[0]
        if not hit:
            return [0.0]
        if word == "loss":
            return []
        return [numbers[1]] if word == "reorder" else [0.0, 0.0]
