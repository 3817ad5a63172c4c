"""Statistics are API: every component counts in a Struct whose fields are described where they are declared.

    class PublisherCounters(Counters):
        component = "direct.publisher"

        published: Annotated[int, count("events accepted by publish()")] = 0
        dropped: Annotated[int, loss("frames that the live socket refused; repaired from the journal")] = 0

`docs/counters.md` is made from these declarations, and a test compares the two.
"""

from typing import ClassVar, get_type_hints

import msgspec

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def count(text: str) -> msgspec.Meta:
    """A counter that only informs."""
    return msgspec.Meta(description=text)


def loss(text: str) -> msgspec.Meta:
    """A counter whose rise means that something was dropped or lost."""
    return msgspec.Meta(description=text, extra={"loss": True})


class Described(msgspec.Struct, frozen=True):
    """One counter, as documented."""

    component: str
    name: str
    text: str
    loss: bool


class Counters(msgspec.Struct):
    """Base of all counter sets; fields are plain integers, so counting costs one attribute update."""

    component: ClassVar[str] = ""
    registry: ClassVar[dict[str, type["Counters"]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Counters.registry[cls.component] = cls

    def snapshot(self) -> dict[str, int]:
        """All counters by name."""
        return msgspec.structs.asdict(self)

    @classmethod
    def describe(cls) -> list[Described]:
        """The declared counters, in order."""
        described = []
        for name, hint in get_type_hints(cls, include_extras=True).items():
            meta = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, msgspec.Meta)), None)
            if meta is not None:
                lossy = bool((meta.extra or {}).get("loss"))
                described.append(Described(cls.component, name, meta.description or "", lossy))
        return described


def prometheus(counters: Counters, labels: dict[str, str] | None = None) -> str:
    """The counters in the Prometheus text format, named `brokerless_<component>_<name>_total`."""
    shown = ",".join(f'{k}="{escape_label(v)}"' for k, v in (labels or {}).items())
    suffix = f"{{{shown}}}" if shown else ""
    lines = []
    values = counters.snapshot()
    for entry in counters.describe():
        name = f"brokerless_{entry.component.replace('.', '_')}_{entry.name}_total"
        lines += [
            f"# HELP {name} {entry.text}",
            f"# TYPE {name} counter",
            f"{name}{suffix} {values[entry.name]}",
        ]
    return "\n".join(lines) + "\n"


def escape_label(value: str) -> str:
    """A label's value as both text formats of Prometheus have it."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
