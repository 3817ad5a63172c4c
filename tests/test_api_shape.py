"""One shape of API: all publishers and all subscribers have the same methods, parameters and pairs for asyncio."""

import ast
import asyncio
import importlib
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Unpack

import pytest

from brokerless import console, core, direct, losstest, metrics, multicast, spark_collector, webhooks
from brokerless.core import Event, MemoryJournal
from brokerless.core.api import EventPublisher, EventSubscriber
from brokerless.core.errors import ConfigError
from brokerless.direct.batch import Batch as DirectBatch
from brokerless.direct.mirror import PublisherOptions
from brokerless.multicast.receive.batch import Batch as MulticastBatch
from tests.multicast.groups import new_group

PUBLISHERS = [direct.Publisher, multicast.Publisher]
SUBSCRIBERS = [direct.Subscriber, multicast.Subscriber]
# Classes whose constructor takes more than its essentials: those alone may be positional.
CONSTRUCTORS = {
    direct.Publisher: ["address"],
    direct.Subscriber: ["address"],
    direct.Worker: ["address"],
    multicast.Publisher: ["group", "session"],
    multicast.Subscriber: ["group", "session"],
}
BOTH = {**dict.fromkeys(PUBLISHERS, EventPublisher), **dict.fromkeys(SUBSCRIBERS, EventSubscriber)}


def methods_of(shape: type) -> list[str]:
    """What a Protocol asks for."""
    return [name for name, value in vars(shape).items() if inspect.isfunction(value)]


def parameters_of(function: Any) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]


@pytest.mark.parametrize("cls", BOTH, ids=lambda cls: cls.__module__)
def test_methods_have_the_shape(cls: type) -> None:
    """Each method has the Protocol's parameters, in its order and of its kind; others are optional keywords."""
    for name in methods_of(BOTH[cls]):
        if name.startswith("_") and name not in ("__iter__", "__aiter__", "__enter__", "__aenter__"):
            continue
        wanted = {p.name: p for p in parameters_of(getattr(BOTH[cls], name))}
        found = {p.name: p for p in parameters_of(getattr(cls, name))}
        missing = set(wanted) - set(found)
        assert not missing, f"{cls.__module__}.{name} lacks {sorted(missing)}"
        for parameter in found.values():
            if parameter.name in wanted:
                assert parameter.kind == wanted[parameter.name].kind, f"{name}({parameter.name})"
                assert parameter.default == wanted[parameter.name].default, f"{name}({parameter.name})"
            else:
                assert parameter.kind is parameter.KEYWORD_ONLY, f"{name}({parameter.name})"
                assert parameter.default is not parameter.empty, f"{name}({parameter.name})"


@pytest.mark.parametrize("cls", [*BOTH, direct.Worker], ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_every_asyncio_method_is_the_twin_of_another(cls: type) -> None:
    """`ax` takes what `x` takes, under the same names, of the same kind and with the same defaults."""
    twins = 0
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        if name.startswith("_") or not is_async:
            continue
        assert name.startswith("a"), name
        twin = getattr(cls, name[1:])
        assert [(p.name, p.kind, p.default) for p in parameters_of(function)] == [
            (p.name, p.kind, p.default) for p in parameters_of(twin)
        ], name
        twins += 1
    assert twins >= 2


@pytest.mark.parametrize("cls", CONSTRUCTORS, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_everything_after_the_essentials_is_keyword_only(cls: type) -> None:
    """Settings are written by name: their order means nothing."""
    positional = [p.name for p in parameters_of(cls.__init__) if p.kind is not p.KEYWORD_ONLY]  # type: ignore[misc]
    assert positional == CONSTRUCTORS[cls]


@pytest.mark.parametrize(
    "function",
    [webhooks.Dispatcher.publish, webhooks.BlockingDispatcher.publish, webhooks.Dispatcher.publish_sync],
)
def test_webhooks_publish_like_the_others(function: Any) -> None:
    """`topic` and `data`, then keywords."""
    positional = [p.name for p in parameters_of(function) if p.kind is not p.KEYWORD_ONLY]
    assert positional == ["topic", "data"]
    assert "content_type" in inspect.signature(function).parameters


@pytest.mark.parametrize("name", ["incr", "decr", "gauge", "timing", "set"])
def test_metrics_are_called_as_in_statsd(name: str) -> None:
    """The client keeps the positional parameters of the package `statsd`; what is ours is keyword-only."""
    ours = [p.name for p in parameters_of(getattr(metrics.StatsClient, name)) if p.kind is not p.KEYWORD_ONLY]
    from statsd import StatsClient

    theirs = [p.name for p in parameters_of(getattr(StatsClient, name))]
    assert ours == theirs


@pytest.mark.parametrize("cls", [DirectBatch, MulticastBatch], ids=lambda cls: cls.__module__)
def test_batches_have_the_shape(cls: type) -> None:
    """Iterable, sized, with `events`, `datas`, `after` and what they are of."""
    for name in (
        "__iter__",
        "__len__",
        "events",
        "datas",
        "after",
        "source",
        "epoch",
        "first_offset",
        "next_offset",
    ):
        assert hasattr(cls, name) or name in getattr(cls, "__slots__", ()), name


# Where keywords are collected, and what says which there are.
COLLECTED = {
    "direct.Mirror.promote": "PublisherOptions",
    "direct.Mirror.promote_when": "PublisherOptions",
    "metrics.MetricsServer.__init__": "MetricsConfig",  # its fields; another name is a ConfigError
}


def test_no_public_method_takes_arbitrary_keywords() -> None:
    """`**options: Any` hides a misspelled setting from the reader and from the type checker."""
    found = set()
    for package in (core, direct, multicast, webhooks, metrics, spark_collector, losstest, console):
        for cls in [c for c in vars(package).values() if inspect.isclass(c)]:
            for name, function in inspect.getmembers(cls, inspect.isfunction):
                ours = function.__module__.startswith("brokerless.")
                if ours and (not name.startswith("_") or name == "__init__"):
                    kinds = [p.kind for p in parameters_of(function)]
                    if inspect.Parameter.VAR_KEYWORD in kinds:
                        found.add(f"{package.__name__.rpartition('.')[2]}.{cls.__name__}.{name}")
    assert found == set(COLLECTED)
    assert parameters_of(direct.Mirror.promote)[-1].annotation == Unpack[PublisherOptions]
    with pytest.raises(ConfigError, match="flush_seconds"):
        metrics.MetricsServer(flush_seconds=1)


def test_a_promoted_mirror_takes_what_a_publisher_takes() -> None:
    """`PublisherOptions` names every argument of Publisher but those that `promote` has or decides."""
    settings = {p.name: p for p in parameters_of(direct.Publisher.__init__) if p.kind is p.KEYWORD_ONLY}
    own = {p.name for p in parameters_of(direct.Mirror.promote)}
    decided = {"source", "journal", "curve", "allow", "mirror_keys"}
    assert set(PublisherOptions.__annotations__) == set(settings) - own - decided
    for name, kind in PublisherOptions.__annotations__.items():
        assert settings[name].annotation == kind, name


def test_a_blocking_dispatcher_does_what_a_dispatcher_does() -> None:
    """Each coroutine of a Dispatcher is a method of the same name, parameters and documentation."""
    for name, function in inspect.getmembers(webhooks.Dispatcher, inspect.iscoroutinefunction):
        if name.startswith("_"):
            continue
        twin = getattr(webhooks.BlockingDispatcher, name)
        assert not inspect.iscoroutinefunction(twin), name
        if name in ("start", "stop"):
            continue
        assert parameters_of(twin) == parameters_of(function), name
        if name != "publish":
            assert twin.__doc__ == function.__doc__, name


@contextmanager
def pairs() -> Iterator[list[tuple[Any, Any]]]:
    """A publisher and a subscriber of each transport."""
    with ExitStack() as stack:
        direct_publisher = stack.enter_context(
            direct.Publisher("tcp://127.0.0.1:*", source="p", journal=MemoryJournal())
        )
        group = new_group()
        multicast_publisher = stack.enter_context(multicast.Publisher(group, "P"))
        yield [
            (
                direct_publisher,
                stack.enter_context(direct.Subscriber(direct_publisher.address, start="oldest")),
            ),
            (multicast_publisher, stack.enter_context(multicast.Subscriber(group, "P", start="oldest"))),
        ]


def take(subscriber: EventSubscriber, n: int) -> list[Event]:
    """The next events, whatever the transport."""
    found = []
    for event in subscriber.events(20):
        found.append(event)
        if len(found) == n:
            break
    return found


def test_batches_behave_the_same() -> None:
    """With and without a filter of topics: length, iteration, events and data agree, and so does what is left after
    some; offsets count events that are not wanted, too."""
    for topics, wanted in (((), [b"0", b"1", b"2", b"3"]), (("a",), [b"0", b"2"])):
        group = new_group()
        with ExitStack() as stack:
            journal = MemoryJournal()
            pub = stack.enter_context(direct.Publisher("tcp://127.0.0.1:*", source="P", journal=journal))
            other = stack.enter_context(multicast.Publisher(group, "P"))
            subscribers = (
                direct.Subscriber(pub.address, start="oldest", topics=topics),
                multicast.Subscriber(group, "P", start="oldest", topics=topics),
            )
            for publisher, subscriber in zip((pub, other), subscribers, strict=True):
                stack.enter_context(subscriber)
                for i in range(4):
                    publisher.publish("ab"[i % 2], b"%d" % i, content_type="text/plain")
                publisher.flush()
                got: list[bytes] = []
                for batch in subscriber.batches(20):
                    events = batch.events
                    assert len(batch) == len(events) == len(list(batch)) > 0
                    assert batch.datas == [event.data for event in events]
                    assert {(event.source, event.epoch) for event in events} == {(batch.source, batch.epoch)}
                    assert batch.first_offset <= events[0].offset
                    assert events[-1].offset < batch.next_offset
                    for cut in range(batch.first_offset, batch.next_offset):
                        rest = batch.after(cut)
                        assert (rest.first_offset, rest.next_offset) == (cut, batch.next_offset)
                        assert rest.events == [event for event in events if event.offset >= cut]
                        assert len(rest) == len(rest.datas) == len(rest.events)
                    got += batch.datas
                    if len(got) == len(wanted):
                        break
                assert got == wanted


def test_the_same_code_drives_every_transport() -> None:
    """Publish, receive in every way, commit: one function for all of them, typed by the Protocols."""

    def drive(publisher: EventPublisher, subscriber: EventSubscriber) -> None:
        assert isinstance(publisher, EventPublisher)
        assert isinstance(subscriber, EventSubscriber)
        publisher.publish("t", b"0", key="k", content_type="text/plain")
        publisher.publish_many("t", [b"1", b"2"])
        publisher.flush()
        assert [event.data for event in take(subscriber, 3)] == [b"0", b"1", b"2"]
        publisher.publish_many("t", [b"3", b"4"])
        got: list[bytes] = []
        for batch in subscriber.batches(20):
            assert [event.data for event in batch] == batch.datas == [event.data for event in batch.events]
            got += batch.datas
            if len(got) == 2:
                break
        assert got == [b"3", b"4"]
        subscriber.commit()
        assert subscriber.ledger.account().delivered == 5
        assert not subscriber.losses
        assert subscriber.positions[publisher.source].offset == 5

    async def drive_async(publisher: EventPublisher, subscriber: EventSubscriber) -> None:
        await publisher.apublish("t", b"5")
        await publisher.apublish_many("t", [b"6", b"7"], keys=["k", "l"])
        publisher.flush()
        for data in (b"5", b"6", b"7"):
            event = await subscriber.areceive(20)
            assert event is not None
            assert event.data == data
        await subscriber.acommit()
        assert await subscriber.await_joined(20)
        await subscriber.aclose()
        await publisher.aclose()

    with pairs() as found:
        for publisher, subscriber in found:
            drive(publisher, subscriber)
            asyncio.run(drive_async(publisher, subscriber))


def test_the_protocols_are_not_looser_than_the_classes() -> None:
    """Every public method that both classes of a kind have is in the Protocol."""
    for classes, shape in ((PUBLISHERS, EventPublisher), (SUBSCRIBERS, EventSubscriber)):
        common = set.intersection(*[{n for n in dir(c) if not n.startswith("_")} for c in classes])
        known = {n for n in dir(shape) if not n.startswith("_")} | set(shape.__annotations__)
        assert not common - known, sorted(common - known)


def test_the_module_is_documented() -> None:
    """Every method of the Protocols says what it does."""
    module = importlib.import_module("brokerless.core.api")
    tree = ast.parse(Path(str(module.__file__)).read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name
