"""Every limit that bounds the daemon's memory, or that more than one part must agree on. Pure constants.

docs/metrics.md ("Memory") adds them up.
"""

# The classic daemon takes any length. 8 KiB is what DogStatsD's largest recommended datagram (jumbo frame)
# holds, so no honest line is longer; it bounds what one distinct line can cost.
MAX_LINE_BYTES = 8192
# After the last observed loss, whole datagrams are sampled for this many windows: loss is rarely over after one.
LOSSY_WINDOWS = 4
# Ranges of datagram numbers kept per client: duplicates are told from late arrivals by them, and the ledger
# counts what is missing after any of its totals. At 20 % loss 4096 ranges reach back some 20,000 datagrams.
MAX_RANGES = 4096
# Series or lines turned into Python objects at a time, one to two milliseconds: meanwhile the receiving thread
# waits for the interpreter.
PORTION = 2000
# Lines whose meaning is remembered from window to window, some 200 bytes each. Twice the default of max_series,
# since a counter often has a second line (another rate, another increment). Longer ones are parsed every time.
MAX_REMEMBERED = 400_000
MAX_REMEMBERED_BYTES = 256
# Names and tags of all series may take max_series times this; a few long ones are as good as many short ones.
MEAN_SERIES_BYTES = 256
# Members of all sets in one window, some 150 bytes each; more are refused as `set_limit`. Of a longer member a
# hash of 16 bytes is kept.
MAX_MEMBERS = 1_000_000
MAX_MEMBER_BYTES = 64
# Timer values kept exactly in one window over all series (64 MB); further ones go to sketches at once.
MAX_EXACT = 2_000_000
# Values that get bins of their own in one window over all sketches, at most 100 bytes each; sketches begun after
# that have few bins (their count, sum, min and max stay exact).
MAX_BINNED = 1_000_000
SMALL_SKETCH = 16
# Events and checks of one window.
MAX_PASSED_BYTES = 4 * 1024 * 1024
# Datagrams held back because an earlier number is missing, over all clients. Beyond it nobody is waited for.
MAX_HELD_BYTES = 32 * 1024 * 1024
# Ranges of numbers over all clients: with more clients each remembers fewer, but at least MIN_RANGES.
MAX_RANGES_TOTAL = 400_000
MIN_RANGES = 16
# Distinct lines, or lines that must stay in order, of one origin before they are aggregated: 200,000 series fit,
# lines that never repeat cost 50 MB.
MAX_DISTINCT_LINES = 262_144
# Raw bytes collected before they are aggregated: bounds the memory of distinct lines (worst case some 100 MB) and
# what a flush still has to aggregate.
MAX_COLLECTED_BYTES = 16 * 1024 * 1024
# How often a client sends its totals unless told otherwise; two per window keep counters exact even if one is lost. The
# daemon expects it of clients that do not say theirs.
HEARTBEAT_S = 5.0
