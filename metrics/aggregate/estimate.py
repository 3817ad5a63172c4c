"""What was in the datagrams that did not arrive: an estimate and its 95 % bound. Pure arithmetic.

A client numbers its datagrams and says how many of them were heartbeats, so it is known that `missing` that may
hold lines are missing beside `received` that arrived. Heartbeats are in neither number: they hold no lines, so
they are no samples of those that do: one that arrived would make the estimate too small, a missing one too large,
each by up to 1 / R of it, and the variance between samples of data would not know. The received ones are a
sample, without replacement, of all of them, and a datagram is a *cluster* of lines: a counter's increments
travel together. So for one counter, with T the amount of it in one datagram:

    total    = X · H / R                       X received amount, R received, H = R + missing datagrams
    variance = H · missing / R · S²            S² the variance of T between datagrams (finite population)

S² needs the sum of T² over datagrams, which the fast path, counting identical lines, does not know. It knows
q = Σ w² over lines (w the amount of one line); the rest of T² are products of lines in the same datagram, and
these come from a sample of whole datagrams:

    S² = q / R + [variance of T in the sample − mean of Σ w² in the sample]

With all datagrams sampled this is exactly S². With some of them it still is exact for rare counters (one line
of it per datagram), and as good as a sample variance for frequent ones.

The bound is Student's t times the root of the variance. Where a few large datagrams make most of Σ T², S² is known
less well than from as many equal ones: h = Σ T⁴ / (Σ T²)² − 2 / (datagrams that hold it) says by how much. (1 / of them
is there if all hold the same, and as much is covered by what is added below.) The variance is taken 1 + 2.4 h times.
There are two additions for counters that are in few datagrams.
Estimate and variance are then small together, so one more datagram that holds the usual amount, Σ T² / Σ T, is
added, as far as the counter is rare: times (1 − p)², p = (Σ T)² / R Σ T² being the share of datagrams that hold it.
And where a few such datagrams are expected among the missing, the bound reaches the whole number of them that 95 of
100 losses do not exceed; so it covers more than 95 % where so few numbers are possible.

The bound assumes that datagrams are lost independently of what they contain. The newest datagram, which always
has arrived, is taken to be like the others; if it is not, the estimate is off by its difference / R. A loss
that comes in bursts while traffic changes breaks that, and of increments of very different sizes the largest may be
missing altogether; then the bound is too small until the next totals make the counter exact.
"""

from math import ceil, inf, isfinite, sqrt

import msgspec


class Sampled(msgspec.Struct):
    """Of one counter in the sampled datagrams: Σ T, Σ T², Σ Σ w², Σ T⁴, and how many of them hold it."""

    sum: float = 0
    sum_squares: float = 0
    diagonal: float = 0
    sum_fourth: float = 0
    holding: float = 0

    @property
    def unevenness(self) -> float:
        """The relative variance of Σ T² because the datagrams that hold it differ, less what one more covers."""
        if not self.sum_squares or not self.holding:
            return 0.0
        return max(0.0, self.sum_fourth / (self.sum_squares * self.sum_squares) - 2 / self.holding)


class Estimate(msgspec.Struct, frozen=True):
    """A total and the variance of its error; `variance` is infinite where nothing is known."""

    total: float
    variance: float

    @property
    def bound(self) -> float:
        """Half the width of the 95 % interval, for a variance that is known well."""
        return bound(self.variance)


Z95 = 1.959963984540054
# 97.5 % quantiles of Student's t by degrees of freedom, where the expansion below is not good enough.
_SMALL_T = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706}


# What Student's t with 1 / unevenness degrees of freedom adds to the variance, to first order: 2.4.
UNEVEN = (Z95 * Z95 + 1) / 2
# Expected items up to which their number is looked at one by one; beyond it the normal interval is as good.
FEW = 4.0


def bound(variance: float) -> float:
    """± at 95 %; the variance already carries what a small sample adds."""
    return Z95 * sqrt(variance) if variance > 0 else 0.0


def widening(sampled: int) -> float:
    """By how much Student's t for a variance from `sampled` datagrams exceeds the normal quantile."""
    df = sampled - 1
    if df < 1:
        return inf
    if df in _SMALL_T:
        return _SMALL_T[df] / Z95
    # Cornish–Fisher expansion of the t quantile; better than 0.2 % from here on.
    z, z2 = Z95, Z95 * Z95
    return (
        1
        + (z2 + 1) / (4 * df)
        + (5 * z2 * z2 + 16 * z2 + 3) / (96 * df**2)
        + (3 * z**6 + 19 * z2 * z2 + 17 * z2 - 15) / (384 * df**3)
    )


def estimate(
    amount: float, squares: float, received: int, missing: float, sample: Sampled | None, sampled: int
) -> Estimate:
    """The total of a counter of which `amount` arrived in `received` datagrams, with `missing` more sent.

    `squares` is Σ w² over the received lines; `sample` the figures of `sampled` whole datagrams.
    """
    if missing <= 0:
        return Estimate(amount, 0.0)
    try:
        found = _estimate(amount, squares, received, missing, sample, sampled)
    except (OverflowError, ZeroDivisionError):
        # Increments of 10^100 beside one of 1: nothing is known that a float could hold.
        return Estimate(amount, inf)
    return found if isfinite(found.total) and found.variance >= 0 else Estimate(amount, inf)


def _estimate(
    amount: float, squares: float, received: int, missing: float, sample: Sampled | None, sampled: int
) -> Estimate:
    if received <= 0:
        return Estimate(amount, inf)
    population = received + missing
    total = amount * (population / received)
    if received < 2 or sampled < 2:
        # One datagram says nothing about the variance between datagrams.
        return Estimate(total, inf)
    line = _one_more(amount, squares) or squares / received
    seen = sample or Sampled()
    mean = seen.sum / sampled
    between = (seen.sum_squares - seen.sum * mean) / (sampled - 1)
    spread = squares / received + between - seen.diagonal / sampled
    if sample is None or not seen.sum_squares:
        # Not in any sampled datagram: rare, so at most one line in a datagram, and its mean counts off.
        spread = (squares - amount * amount / received) / (received - 1)
    spread = max(0.0, spread)
    mean = amount / received
    # Σ T² over what arrived, from which follow the size of a usual datagram that holds it, and their share.
    clusters = received * (spread + mean * mean)
    usual = max(line, _one_more(amount, clusters))
    share = mean * mean / (spread + mean * mean) if amount else 1 / received
    # Never nothing: datagrams that were all alike until now need not stay so.
    spread = max(line / received, spread + max(line, usual * (1 - share) ** 2) / received)
    wide = widening(sampled)
    variance = population * missing / received * spread * wide * wide * (1 + UNEVEN * seen.unevenness)
    return Estimate(total, max(variance, _at_least(missing, share, sqrt(usual))))


def _one_more(amount: float, squares: float) -> float:
    """The square of one more item of the usual size: what a Poisson interval adds to a count.

    It keeps the bound honest where a handful of items arrived, and vanishes beside a hundred. Of ups and downs
    that nearly cancel it is not the mean that counts.
    """
    if not amount:
        return 0.0
    usual = min(abs(squares / amount), sqrt(squares))
    return usual * usual


def _at_least(missing: float, share: float, usual: float) -> float:
    """The variance whose bound reaches as many whole items as 95 of 100 losses hold at most.

    With few items expected, a normal interval ends between two numbers of them: with one in ten, below one.
    """
    n = ceil(missing)
    expected = missing * share
    if expected > FEW or share >= 1:
        return 0.0
    probability = below = (1 - share) ** n
    items = 0
    while below < 0.95 and items < n:
        probability *= (n - items) / (items + 1) * share / (1 - share)
        below += probability
        items += 1
    return (max(0.0, items - expected) * usual / Z95) ** 2
