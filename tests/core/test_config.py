"""The TOML reader names what is wrong."""

import importlib
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from brokerless.core import load_toml
from brokerless.core.config import check_choices, parse_toml, split_host_port
from brokerless.core.errors import ConfigError


class Example(msgspec.Struct, forbid_unknown_fields=True):
    port: int = 1
    names: list[str] = []


def test_a_file_becomes_a_struct(tmp_path: Path) -> None:
    """Values arrive with their types, defaults fill the rest."""
    path = tmp_path / "a.toml"
    path.write_text('port = 8125\nnames = ["a"]\n')
    assert load_toml(path, Example) == Example(port=8125, names=["a"])


@pytest.mark.parametrize(
    ("text", "said"),
    [("port = 'x'", "port"), ("pot = 1", "pot"), ("port = ", "TOML"), ("names = [1]", "names")],
)
def test_errors_name_the_field_and_the_file(tmp_path: Path, text: str, said: str) -> None:
    """A wrong type, an unknown field and broken TOML are told apart and named."""
    path = tmp_path / "b.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_toml(path, Example)
    assert str(path) in str(caught.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    """A file that is not there or is not text is a ConfigError, too."""
    with pytest.raises(ConfigError, match="cannot be read"):
        load_toml(tmp_path / "none.toml", Example)
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_toml(tmp_path / "c.toml", Example)
    with pytest.raises(ConfigError, match="configuration"):
        parse_toml("port = true", Example)


class Chooses(msgspec.Struct, frozen=True):
    """With a choice, and fields that are none."""

    on_full: Literal["evict", "block"] = "evict"
    size: int = 1

    def __post_init__(self) -> None:
        check_choices(self)


def test_a_word_that_is_not_offered_is_refused() -> None:
    """Also where no file is read: a typed program that is not type-checked is told at once."""
    assert Chooses(on_full="block").on_full == "block"
    with pytest.raises(ConfigError, match="on_full: must be 'evict' or 'block', not 'drop'"):
        Chooses(on_full="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "name", "fields"),
    [
        ("brokerless.webhooks", "DispatcherConfig", {"on_full": "drop"}),
        ("brokerless.webhooks", "DispatcherConfig", {"synchronous": "off"}),
        ("brokerless.metrics", "MetricsConfig", {"dialect": "graphite"}),
        ("brokerless.spark_collector.collector.config", "SpoolConfig", {"path": "x", "fsync": "often"}),
        ("brokerless.spark_collector.collector.config", "DirectIn", {"addresses": [], "start": "newest"}),
    ],
)
def test_every_configuration_checks_its_choices(module: str, name: str, fields: dict[str, object]) -> None:
    """A wrong word is refused where it is written, not where it is used."""
    with pytest.raises(ConfigError, match="must be '"):
        getattr(importlib.import_module(module), name)(**fields)


@pytest.mark.parametrize(
    ("text", "found"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), (":65535", ("", 65535))],
)
def test_hosts_with_ports(text: str, found: tuple[str, int]) -> None:
    """A name or address, of version 6 in brackets, and a port; the host may be left out."""
    assert split_host_port(text, "udp") == found


@pytest.mark.parametrize("text", ["", "80", "h:", "h:-1", "h:65536", "h:²", "h:٣", "h: 1", f"h:{'9' * 5000}"])
def test_what_is_no_port_is_named(text: str) -> None:
    """Also what `str.isdigit` takes for a number and `int` does not."""
    with pytest.raises(ConfigError, match=r"udp: .* is not host:port"):
        split_host_port(text, "udp")
