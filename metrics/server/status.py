"""What /state shows of the last window, as plain JSON-ready data."""

import heapq
from typing import Any

import msgspec

from brokerless.metrics.aggregate.flush import Flush


def window_status(flush: Flush, prefix: str, limit: int) -> dict[str, Any]:
    """Counters, clients and figures of up to `limit` series that begin with `prefix`."""
    # What people look for first: what is busiest. Not sorted as a whole, which would hold up receiving.
    chosen = (p for p in flush.counters if p.series.startswith(prefix))
    counters = heapq.nlargest(limit, chosen, key=lambda p: abs(p.raw)) if limit else []
    return {
        "window": {
            "start": flush.start,
            "end": flush.end,
            "seconds": flush.window_s,
            "lines": flush.lines,
            "datagrams": flush.datagrams,
            "kernel_drops": flush.kernel_drops,
            "lost_datagrams": flush.lost_datagrams,
            "processing_s": flush.processing_s,
            "pause_s": flush.pause_s,
            "pause_cpu_s": flush.pause_cpu_s,
        },
        "loss": loss_of(flush),
        "receive": flush.receive,
        "rollup": flush.rollup,
        "refused": flush.refused,
        "refused_samples": [
            {"reason": reason, "line": line.decode("utf-8", "replace")}
            for reason, line in flush.refused_samples
        ],
        "clients": [msgspec.structs.asdict(client) for client in flush.clients[: max(limit, 50)]],
        "series": {
            "counters": len(flush.counters),
            "gauges": len(flush.gauges),
            "timers": len(flush.timers),
            "sets": len(flush.sets),
        },
        "counters": {
            p.series: {
                "raw": p.raw,
                "rate": p.raw / flush.window_s,
                "corrected": p.corrected,
                "bound": p.bound,
                "grade": p.grade.label,
                "total_raw": p.total_raw,
                "total": p.total,
                "total_bound": p.total_bound,
                "total_grade": p.total_grade.label,
            }
            for p in counters
        },
        "gauges": _some(flush.gauges, prefix, limit),
        "timers": _some(flush.timers, prefix, limit),
        "sets": _some(flush.sets, prefix, limit),
    }


def loss_of(flush: Flush) -> dict[str, int]:
    """The rollup of numbered clients: `sent = received + lost`, and where it was lost as far as that is known.

    Kernel drops are exact but not attributed to clients; where unnumbered traffic shares the socket, some of
    them are its own, and `elsewhere` (network, sender, a dead worker) is a lower limit.
    """
    lost = sum(client.lost for client in flush.clients)
    failed = sum(min(client.failed, client.lost) for client in flush.clients)
    drops = flush.receive.get("kernel_drops", 0)
    return {
        "sent": sum(client.sent for client in flush.clients),
        "received": sum(client.received for client in flush.clients),
        "lost": lost,
        "failed_to_send": failed,
        "kernel_drops": drops,
        "elsewhere": max(0, lost - failed - drops),
    }


def _some(table: dict[str, Any], prefix: str, limit: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for series, value in table.items():
        if len(found) >= limit:
            break
        if series.startswith(prefix):
            found[series] = value
    return found
