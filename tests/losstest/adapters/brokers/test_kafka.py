"""How a Kafka is started: in KRaft mode, or beside a ZooKeeper where its scripts are older than that."""

from pathlib import Path

import msgspec
import pytest

from brokerless.losstest import Setup
from brokerless.losstest.adapters.brokers import kafka


def install(home: Path, *names: str) -> None:
    (home / "bin").mkdir(parents=True)
    for name in names:
        (home / "bin" / f"{name}.sh").touch()


def setup_in(directory: Path) -> Setup:
    return Setup(
        state=directory,
        shared=directory,
        ports=[5001, 5002, 5003],
        rate=100,
        size=100,
        seed=1,
        buffer_events=10,
        retention_events=10,
    )


def test_an_old_one_has_a_zookeeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZooKeeper first, then the broker that is told where it is; nothing is formatted."""
    install(tmp_path / "kafka-0.9", "kafka-server-start", "zookeeper-server-start")
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path / "kafka-0.9"))
    keeper, broker = kafka.services(setup_in(tmp_path))
    assert keeper.words[0].endswith("zookeeper-server-start.sh")
    assert (keeper.port, broker.port) == (5003, 5002)
    config = Path(broker.words[1]).read_text()
    assert f"zookeeper.connect={setup_in(tmp_path).listen(1)[0]}:5003" in config
    assert "process.roles" not in config
    assert "log.flush.interval.messages" not in config


def test_a_new_one_is_formatted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program, which formats its storage before it starts; told to survive a power cut it syncs every message."""
    install(tmp_path / "kafka", "kafka-server-start", "kafka-storage", "zookeeper-server-start")
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path / "kafka"))
    [command] = kafka.services(msgspec.structs.replace(setup_in(tmp_path), sync=True))
    assert command.words[-4].endswith("kafka-storage.sh")
    config = Path(command.words[-2]).read_text()
    assert "process.roles=broker,controller" in config
    assert "log.flush.interval.messages=1\n" in config
