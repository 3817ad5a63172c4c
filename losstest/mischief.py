"""What the relay does to packets: drop, drop in bursts, delay, double. Pure: randomness is an argument."""

from random import Random

from brokerless.core.errors import ConfigError


class Mischief:
    """The current rule, and the random numbers it goes by."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._burst = 0
        self._rule: tuple[str, tuple[float, ...]] = ("pass", ())
        self.cut_to = False  # nothing reaches the consumer
        self.cut_from = False  # nothing of the consumer's gets out

    def order(self, line: str) -> None:
        """`pass`, `loss P`, `burst P N`, `reorder P DELAY_S`, `duplicate P`, `cut to|from|both`, `uncut`."""
        word, *arguments = line.split()
        if word == "cut":
            self.cut_to = arguments[0] in ("to", "both")
            self.cut_from = arguments[0] in ("from", "both")
        elif word == "uncut":
            self.cut_to = self.cut_from = False
        elif word in ("pass", "loss", "burst", "reorder", "duplicate"):
            self._rule = (word, tuple(float(a) for a in arguments))
            self._burst = 0
        else:
            raise ConfigError("relay", f"does not know the order {line!r}")

    def delays(self, to_consumer: bool) -> list[float]:
        """For one packet: after how many seconds to send it, once per entry; empty means drop it."""
        if self.cut_to if to_consumer else self.cut_from:
            return []
        word, numbers = self._rule
        if word == "pass" or not to_consumer:
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
