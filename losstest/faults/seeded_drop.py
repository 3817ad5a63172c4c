"""Which events the seeded control drops: a pure function of the seed, so that the truth needs no file."""

from hashlib import blake2b


def is_seeded_drop(seed: int, n: int, proportion: float) -> bool:
    """True if event `n` is to be dropped."""
    if proportion <= 0:
        return False
    drawn = int.from_bytes(blake2b(f"{seed}:{n}".encode(), digest_size=4).digest(), "big")
    return drawn < proportion * 2**32
