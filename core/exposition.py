"""Every announced component in the Prometheus text format. Pure: one page for all processes of this user."""

from collections.abc import Sequence

from brokerless.core.counters import escape_label
from brokerless.core.presence import Component
from brokerless.core.summary import summarise

GAUGES = {
    "up": "1 while the component's process runs, 0 when it was killed",
    "lag": "events that a consumer, a group or an endpoint is behind",
    "lost": "events declared lost, or evicted before somebody registered had them",
    "balanced": "1 if accepted = delivered + pending + lost + compacted holds, 0 if not",
}


def exposition(components: Sequence[Component]) -> str:
    """One family per counter of each kind, `brokerless_<kind>_<counter>_total`, and the gauges above."""
    families: dict[str, list[str]] = {}
    gauges: dict[str, list[str]] = {name: [] for name in GAUGES}
    for component, summary in summarise(components):
        if summary["state"] == "replaced":  # nobody should be woken for it any more
            continue
        labels = ",".join(
            f'{name}="{escape_label(str(value))}"'
            for name, value in (
                ("kind", component.kind),
                ("name", component.name),
                ("host", component.host),
                ("pid", component.pid),
                ("id", component.id),
            )
        )
        gauges["up"].append(f"brokerless_up{{{labels}}} {int(component.alive)}")
        for name in ("lag", "lost", "balanced"):
            if summary[name] is not None:
                gauges[name].append(f"brokerless_{name}{{{labels}}} {int(summary[name])}")
        for name, value in component.state.get("counters", {}).items():
            if isinstance(value, int):
                family = f"brokerless_{component.kind.replace('.', '_')}_{name}_total"
                families.setdefault(family, []).append(f"{family}{{{labels}}} {value}")
    lines = []
    for name, text in GAUGES.items():
        if gauges[name]:
            lines += [f"# HELP brokerless_{name} {text}", f"# TYPE brokerless_{name} gauge", *gauges[name]]
    for family, samples in sorted(families.items()):
        lines += [f"# HELP {family} see the counters page", f"# TYPE {family} counter", *samples]
    return "\n".join(lines) + "\n"
