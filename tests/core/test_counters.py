"""Counters describe themselves."""

from typing import Annotated

from brokerless.core.counters import Counters, count, loss, prometheus


class Example(Counters):
    component = "test.example"

    done: Annotated[int, count("things done")] = 0
    dropped: Annotated[int, loss("things dropped")] = 0


def test_counters_are_described_where_they_are_declared() -> None:
    """Names, texts and which of them mean loss can be listed."""
    assert [(d.name, d.text, d.loss) for d in Example.describe()] == [
        ("done", "things done", False),
        ("dropped", "things dropped", True),
    ]
    assert Counters.registry["test.example"] is Example
    example = Example()
    example.done += 2
    assert example.snapshot() == {"done": 2, "dropped": 0}


def test_prometheus_text_has_help_type_and_escaped_labels() -> None:
    """The text format names the component, and a label cannot break out of its quotes."""
    text = prometheus(Example(done=3), {"name": 'a"b\\c\n'})
    assert "# TYPE brokerless_test_example_done_total counter" in text
    assert 'brokerless_test_example_done_total{name="a\\"b\\\\c\\n"} 3' in text
