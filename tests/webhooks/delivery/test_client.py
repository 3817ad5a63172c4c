"""The SSRF guard holds at the socket, whatever names, redirects and environments say; TLS is verified."""

import asyncio
import os
import socket
import ssl
import statistics
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from brokerless.webhooks import AddressPolicy, DispatcherConfig
from brokerless.webhooks.delivery import names
from brokerless.webhooks.delivery.client import DeliveryClient, prepare
from brokerless.webhooks.delivery.ssrf import AddressGuard

pytestmark = pytest.mark.anyio
Targets = Callable[..., Awaitable[Any]]

LITERALS = [
    "127.0.0.1",
    "127.1",
    "127.0.1",
    "127.1.2.3",
    "2130706433",
    "017700000001",
    "0x7f000001",
    "0x7f.0.0.1",
    "0177.0.0.1",
    "0x7f.1",
    "0",
    "0.0.0.0",
    "0x0",
    "10.0.0.1",
    "10.1",
    "0xa.1",
    "012.0.0.1",
    "167772161",
    "169.254.169.254",
    "0xa9fea9fe",
    "2852039166",
    "0251.0376.0251.0376",
    "169.254.0.1",
    "172.16.0.1",
    "172.31.255.254",
    "192.168.0.1",
    "192.168.257",
    "3232235521",
    "100.64.0.1",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "[::]",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::127.0.0.1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::ffff:10.0.0.1]",
    "[::ffff:169.254.169.254]",
    "[::ffff:0:127.0.0.1]",
    "[64:ff9b::127.0.0.1]",
    "[64:ff9b::a9fe:a9fe]",
    "[64:ff9b:1::1]",
    "[2002:7f00:1::]",
    "[2002:a9fe:a9fe::1]",
    "[2001::1]",
    "[2001:db8::1]",
    "[100::1]",
    "[fc00::1]",
    "[fd00:ec2::254]",
    "[fe80::1]",
    "[fec0::1]",
    "[ff02::1]",
    "[3fff::1]",
    "[5f00::1]",
]
# What a name server may answer: one bad address is enough, whichever place it has.
NAMES = {
    "loopback.test": ["127.0.0.1"],
    "zero.test": ["0.0.0.0"],
    "metadata.test": ["169.254.169.254"],
    "private10.test": ["10.0.0.5"],
    "private172.test": ["172.20.0.5"],
    "private192.test": ["192.168.1.1"],
    "cgnat.test": ["100.64.1.1"],
    "multicast.test": ["224.0.0.5"],
    "v6loopback.test": ["::1"],
    "mapped.test": ["::ffff:127.0.0.1"],
    "nat64.test": ["64:ff9b::7f00:1"],
    "sixtofour.test": ["2002:7f00:1::1"],
    "ula.test": ["fd12:3456::1"],
    "linklocal6.test": ["fe80::1%lo"],
}


def answer_names(monkeypatch: pytest.MonkeyPatch, answers: Callable[[str], list[str]]) -> list[str]:
    """Stand in for the name server; literals are looked up as ever. Returns the names that were asked for."""
    real = socket.getaddrinfo
    asked: list[str] = []

    def lookup(host: Any, port: Any, *rest: Any, **options: Any) -> Any:
        text = host.decode() if isinstance(host, bytes) else host
        if not str(text).endswith(".test"):
            return real(host, port, *rest, **options)
        asked.append(text)
        found = []
        for address in answers(text):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            place = (address, port, 0, 0) if family == socket.AF_INET6 else (address, port)
            found.append((family, socket.SOCK_STREAM, 6, "", place))
        return found

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    return asked


@pytest.fixture
async def client() -> AsyncIterator[DeliveryClient]:
    config = DispatcherConfig(
        policy=AddressPolicy(schemes=("http", "https")), connect_timeout_s=3, attempt_timeout_s=3
    )
    made = DeliveryClient(config, prepare(config))
    yield made
    await made.close()


@pytest.fixture
async def local() -> AsyncIterator[DeliveryClient]:
    """One that the operator allowed loopback."""
    config = DispatcherConfig(policy=AddressPolicy(allow=("127.0.0.0/8",), schemes=("http", "https")))
    made = DeliveryClient(config, prepare(config))
    yield made
    await made.close()


def test_table_is_long_enough() -> None:
    """At least sixty forms are tried for real."""
    assert len(set(LITERALS)) + len(NAMES) >= 60


async def test_nothing_connects(
    targets: Targets, client: DeliveryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Literal addresses in all forms, and names that resolve to internal ones: blocked, and no socket was made."""
    target = await targets()
    answer_names(monkeypatch, lambda name: NAMES[name])
    made: list[Any] = []
    real = socket.socket.connect
    monkeypatch.setattr(
        socket.socket, "connect", lambda self, address: (made.append(address), real(self, address))[1]
    )
    for host in [*LITERALS, *NAMES]:
        reply = await client.post(f"http://{host}:{target.port}/hook", {}, b"x")
        assert reply.status is None, host
        # aiohttp refuses odd spellings of IPv4 by itself, before anything is looked up.
        assert reply.blocked or "canonical" in reply.error, (host, reply.error)
    assert (made, target.connections, target.got) == ([], 0, [])


async def test_handshake_is_guarded_too(targets: Targets, client: DeliveryClient) -> None:
    """The httpx client for handshakes runs over the same guarded connections."""
    import httpx

    target = await targets()
    with pytest.raises(httpx.HTTPError):
        await client.httpx.options(target.url)
    assert target.connections == 0


async def test_bad_addresses_among_good_ones_are_left_out(
    targets: Targets, local: DeliveryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with an internal and an allowed address connects to the allowed one only."""
    target = await targets()
    answer_names(monkeypatch, lambda _name: ["10.0.0.1", "127.0.0.1"])
    assert (await local.post(f"http://mixed.test:{target.port}/", {}, b"x")).status == 200


async def test_rebinding(targets: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is allowed when checked and internal when connected to: what connects is what was checked."""
    target = await targets()
    # 127.0.0.2, where nobody listens, stands for an address outside: nothing here leaves this machine.
    answers = iter([["127.0.0.2"], ["127.0.0.1"], ["127.0.0.1"]])
    answer_names(monkeypatch, lambda _name: next(answers))
    config = DispatcherConfig(policy=AddressPolicy(allow=("127.0.0.2/32",), schemes=("http",)))
    client = DeliveryClient(config, prepare(config))
    url = f"http://rebind.test:{target.port}/hook"
    assert client.guard.check_url(url)
    first = await client.post(url, {}, b"x")
    assert (first.status, first.blocked) == (None, False)
    monkeypatch.setattr(names, "TTL_S", 0.0)
    second = await client.post(url, {}, b"x")
    assert second.blocked
    assert target.connections == 0
    await client.close()


async def test_socket_is_checked_even_if_the_resolver_is_fooled(
    targets: Targets, client: DeliveryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address is checked once more where the socket is made: a resolver that lets all pass changes nothing."""
    target = await targets()
    answer_names(monkeypatch, lambda _name: ["127.0.0.1"])
    calls = 0
    real = client.guard.blocked

    def first_passes(address: str) -> str | None:
        nonlocal calls
        calls += 1
        return None if calls == 1 else real(address)

    monkeypatch.setattr(client.guard, "blocked", first_passes)
    reply = await client.post(f"http://fooled.test:{target.port}/hook", {}, b"x")
    assert (reply.blocked, calls, target.connections) == (True, 2, 0)


async def test_redirect_to_internal_is_not_followed(targets: Targets, local: DeliveryClient) -> None:
    """A redirect to an internal address is answered with its own status and goes nowhere."""
    inner = await targets()
    outer = await targets(lambda _got, _number: (302, {"Location": inner.url}))
    assert (await local.post(outer.url, {}, b"x")).status == 302
    assert inner.connections == 0


async def test_environment_proxies_are_ignored(
    targets: Targets, client: DeliveryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy in the environment would connect where we may not: it is not used."""
    proxy = await targets()
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setitem(os.environ, name, f"http://127.0.0.1:{proxy.port}")
    reply = await client.post("http://10.0.0.1/", {}, b"x")
    assert reply.blocked
    assert proxy.connections == 0


async def test_host_and_path_stay_as_registered(
    targets: Targets, local: DeliveryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection goes to the checked address; the Host header and the path are those of the URL."""
    target = await targets()
    answer_names(monkeypatch, lambda _name: ["127.0.0.1"])
    await local.post(f"http://consumer.test:{target.port}/a%2Fb?c=%20d", {"x-a": "1"}, b"x")
    (got,) = target.got
    assert (got.headers["host"], got.path) == (f"consumer.test:{target.port}", "/a%2Fb?c=%20d")


async def test_slow_names_do_not_hold_up_others(
    targets: Targets, local: DeliveryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that hangs for hundreds of hosts delays no delivery to others, also when these have to be looked up
    again, and does not take the application's threads. When it answers again, so do those hosts.
    """
    target = await targets(lambda _got, _number: (200, {"Connection": "close"}))
    hangs = threading.Event()
    release = threading.Event()

    def answers(name: str) -> list[str]:
        if name.startswith("slow"):
            hangs.set()
            release.wait(30)
        return ["127.0.0.1"]

    asked = answer_names(monkeypatch, answers)
    assert (await local.post(f"http://quick.test:{target.port}/", {}, b"x")).status == 200
    slow = [
        asyncio.create_task(local.post(f"http://slow{n}.test:{target.port}/", {}, b"x")) for n in range(200)
    ]
    await asyncio.to_thread(hangs.wait, 10)
    try:
        # What is known of the name is too old, and every connection a new one.
        monkeypatch.setattr(names, "TTL_S", 0.0)
        for _ in range(3):
            async with asyncio.timeout(10):
                assert (await local.post(f"http://quick.test:{target.port}/", {}, b"x")).status == 200
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 5) == 1
        assert not any(task.done() for task in slow)
    finally:
        release.set()
    assert {reply.status for reply in await asyncio.gather(*slow)} == {200}
    assert asked.count("quick.test") >= 2, "it was not looked up again"


async def test_names_that_hung_have_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names whose last look-up was slow are looked up beside the others, however many they are; what nobody waits for
    is not looked up at all, and a name that is gone is not used as it was.
    """
    monkeypatch.setattr(names, "SLOW_S", 0.0)
    monkeypatch.setattr(names, "TTL_S", 0.0)
    monkeypatch.setattr(names, "STALE_S", 0.0)
    release = threading.Event()
    release.set()
    gone: set[str] = set()

    def answers(name: str) -> list[str]:
        if name.startswith("slow"):
            release.wait(30)
        if name in gone:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return ["127.0.0.1"]

    asked = answer_names(monkeypatch, answers)
    resolver = names.Names(AddressGuard(AddressPolicy(allow=("127.0.0.0/8",))), 30.0)
    many = [f"slow{n}.test" for n in range(names.THREADS + names.SLOW_THREADS)]
    await asyncio.gather(*(resolver.resolve(name, 80) for name in many))
    # All are known to be slow now.
    release.clear()
    asked.clear()
    impatient = [asyncio.create_task(resolver.resolve(name, 80)) for name in many]
    async with asyncio.timeout(20):
        (found,) = await resolver.resolve("new.test", 80)
        assert found["host"] == "127.0.0.1"
        while len(asked) < 1 + names.SLOW_THREADS:
            await asyncio.sleep(0.01)
    for task in impatient:
        task.cancel()
    await asyncio.gather(*impatient, return_exceptions=True)
    release.set()
    gone.add("new.test")
    for _ in range(2):
        with pytest.raises(socket.gaierror):
            await resolver.resolve("new.test", 80)
    assert (await resolver.resolve(many[-1], 80))[0]["host"] == "127.0.0.1"
    assert len(asked) == 1 + names.SLOW_THREADS + 2 + 1, "what nobody waited for was looked up"
    await resolver.close()


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for a DNS name."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = directory / f"{name}.pem", directory / f"{name}.key"
    cert_file.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return cert_file, key_file


async def test_tls_is_verified_by_name(
    targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS to the pinned address checks the host name's certificate: the right one passes, a wrong one does not."""
    cert, key = certificate(tmp_path, "right.test")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    target = await targets(ssl=server)
    answer_names(monkeypatch, lambda _name: ["127.0.0.1"])
    for ca_file, host, fine in (
        (str(cert), "right.test", True),
        (str(cert), "wrong.test", False),
        ("", "right.test", False),
    ):
        config = DispatcherConfig(policy=AddressPolicy(allow=("127.0.0.0/8",)), ca_file=ca_file)
        client = DeliveryClient(config, prepare(config))
        reply = await client.post(f"https://{host}:{target.port}/", {}, b"x")
        await client.close()
        assert (reply.status == 200) is fine, (host, reply)
    assert len(target.got) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 999999 X\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x00\xff\xfe",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
)
async def test_garbage_answers_are_failures(targets: Targets, local: DeliveryClient, answer: bytes) -> None:
    """Answers that are not HTTP are a failed attempt with a text, never an exception."""
    target = await targets(lambda _got, _number: answer)

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    target.answer = lambda _got, _number: write
    reply = await local.post(target.url, {}, b"x")
    assert reply.status is None or 200 <= reply.status < 300
    assert reply.status is not None or reply.error


async def test_refused_connection_is_a_failure(local: DeliveryClient) -> None:
    """A closed port is a failed attempt with a text."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reply = await local.post(f"http://127.0.0.1:{port}/", {}, b"x")
    assert (reply.status, bool(reply.error), reply.blocked) == (None, True, False)


async def test_answers_without_end_are_not_parsed(targets: Targets) -> None:
    """ "Continue" some times before an answer is fine; tens of thousands of them are not waited for, because parsing
    them would take the processor from all other deliveries. The next request on a connection has the whole bound again.
    """
    final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    target = await targets(lambda _got, _number: b"HTTP/1.1 100 Continue\r\n\r\n" * times + final)
    config = DispatcherConfig(
        policy=AddressPolicy(allow=("127.0.0.0/8",), schemes=("http",)), attempt_timeout_s=3.0
    )
    client = DeliveryClient(config, prepare(config))
    times = 1000
    for _ in range(5):
        assert (await client.post(target.url, {}, b"x")).status == 200
    assert target.connections == 1
    times = 40_000
    assert (await client.post(target.url, {}, b"x")).error == "timeout"
    await client.close()


async def test_attempts_that_hang_end_one_by_one(targets: Targets) -> None:
    """Each after its own time, not all at the next whole second: ending hundreds at once would hold up the others."""

    async def hang(_writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    target = await targets(lambda _got, _number: hang)
    policy = AddressPolicy(allow=("127.0.0.0/8",), schemes=("http",))
    config = DispatcherConfig(policy=policy, attempt_timeout_s=5.1)
    client = DeliveryClient(config, prepare(config))
    attempts = []
    for _ in range(6):
        attempts.append(asyncio.create_task(client.post(target.url, {}, b"x")))
        await asyncio.sleep(1 / 6)
    replies = await asyncio.gather(*attempts)
    await client.close()
    assert {reply.error for reply in replies} == {"timeout"}
    assert statistics.median(reply.duration_s for reply in replies) < 5.1 + 0.3
