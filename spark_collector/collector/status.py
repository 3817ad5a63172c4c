"""The collector's status: as JSON at `/status`, for Prometheus at `/metrics`, as one line in a terminal."""

import time
from typing import TYPE_CHECKING

import msgspec

from brokerless.core.counters import prometheus
from brokerless.spark_collector.collector.collector import Collector
from brokerless.spark_collector.collector.inputs.base import InputStatus

if TYPE_CHECKING:
    from starlette.applications import Starlette

# A collector of thousands of streams must not answer with megabytes; the sums are of all.
MAX_STREAMS_SHOWN = 200


class StreamStatus(msgspec.Struct, frozen=True):
    """The accounting of one stream since this collector started."""

    source: str
    epoch: int
    topic: str
    received: int
    pending: int
    lost: int


class Status(msgspec.Struct, frozen=True):
    """Everything at one moment."""

    name: str
    uptime_s: float
    spool: dict[str, int | str]
    counters: dict[str, int]
    inputs: list[InputStatus]
    streams: list[StreamStatus]
    healthy: bool


def status(collector: Collector, now_s: float) -> Status:
    """The collector's status; cheap enough to be asked every second."""
    spool = collector.spool
    inputs = [each.status for each in collector.inputs]
    with collector.lock:
        accounts = list(collector.ledger.accounts().items())[:MAX_STREAMS_SHOWN]
    streams = [StreamStatus(*key, a.delivered, a.pending, a.lost) for key, a in accounts]
    held: dict[str, int | str] = {"path": spool.path, "oldest": spool.oldest, "next": spool.next}
    uploader = collector.uploader
    if uploader is not None:
        held |= {"remote": uploader.url, "uploaded": uploader.uploaded, "upload_error": uploader.error}
    held |= {"bytes_written": spool.counters.bytes, "dropped": spool.counters.dropped}
    return Status(
        collector.config.name,
        round(now_s - collector.started, 1),
        held,
        collector.counters.snapshot(),
        inputs,
        streams,
        all(i.connected and not i.error for i in inputs) and not (uploader is not None and uploader.error),
    )


def status_app(collector: Collector) -> "Starlette":
    """A Starlette app with `/status`, `/metrics` and `/healthz`; mount it or let the collector serve it."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def show(_: Request) -> Response:
        return Response(msgspec.json.encode(status(collector, time.time())), media_type="application/json")

    async def metrics(_: Request) -> Response:
        labels = {"collector": collector.config.name}
        text = prometheus(collector.counters, labels) + prometheus(collector.spool.counters, labels)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def health(_: Request) -> Response:
        healthy = status(collector, time.time()).healthy
        return Response(
            "ok\n" if healthy else "an input is not connected\n", status_code=200 if healthy else 503
        )

    return Starlette(routes=[Route("/status", show), Route("/metrics", metrics), Route("/healthz", health)])


def progress_line(collector: Collector, before: dict[str, int], seconds: float) -> str:
    """One line for a terminal: rate, what is behind, what is lost, who is away."""
    now = collector.counters.snapshot()
    rate = (now["events"] - before.get("events", 0)) / max(seconds, 0.001)
    behind = sum(max(0, each.status.behind) for each in collector.inputs)
    away = [each.status.name for each in collector.inputs if not each.status.connected]
    parts = [f"{now['events']:,} events", f"{rate:,.0f}/s", f"{behind:,} behind", f"{now['lost']:,} lost"]
    if now["duplicates"]:
        parts.append(f"{now['duplicates']:,} duplicates dropped")
    if now["refused"]:
        parts.append(f"{now['refused']:,} appends refused")
    if away:
        parts.append(f"away: {', '.join(away[:3])}{' …' if len(away) > 3 else ''}")
    return ", ".join(parts)
