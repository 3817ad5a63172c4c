"""`brokerless mirror`: keep a copy of a publisher's journal on this host, and make it the publisher."""

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import msgspec
from cyclopts import Parameter

from brokerless.cli.client_keys import Curve, ServerKey, client_keys
from brokerless.cli.options import Json
from brokerless.cli.output import facts_text, result, say
from brokerless.cli.signals import on_signals
from brokerless.core import DiskJournal
from brokerless.core.errors import BrokerlessError, ConfigError, JournalLocked, NotPromoted, PeerError
from brokerless.core.journal.meta import META
from brokerless.core.runtime.files import atomic_write
from brokerless.direct import (
    ClientKeys,
    FileLease,
    KubernetesLease,
    Mirror,
    PostgresLease,
    Publisher,
    ReplayClient,
    ServerKeys,
    load_public,
)
from brokerless.direct.publisher_lease import PublisherLease

app = cyclopts.App(
    name="mirror",
    help="Keep a copy of a publisher's journal: run, status, promote.",
    help_epilogue="Example: brokerless mirror status tcp://b:5560",
)
# `promote` asks the process that has the journal open by a file beside it, and is answered by another.
_WANTED = "promote.wanted"
_ANSWER = "promote.answer"
_LOOK_EVERY_S = 0.2


class _Wanted(msgspec.Struct):
    force: bool = False


class _Answer(msgspec.Struct):
    problem: str = ""
    epoch: int = 0
    offset: int = 0


@app.command(
    help_epilogue="Example: brokerless mirror run tcp://a:5556 --serve tcp://0.0.0.0:5560 --journal var/mirror"
)
def run(
    address: str,
    *,
    serve: str,
    journal: Annotated[Path, Parameter("--journal")],
    advertise: str = "",
    lease: str = "",
    lease_key: int = 0,
    curve: Path | None = None,
    client_key: Path | None = None,
    allow: Annotated[tuple[Path, ...], Parameter(negative="")] = (),
    as_json: Json = False,
) -> None:
    """Copy the journal of the publisher at ADDRESS and serve it, until Ctrl-C; `promote` makes this the publisher.

    Parameters
    ----------
    address
        The publisher's address.
    serve
        Where consumers reach this mirror.
    journal
        The directory of the copy: empty, an earlier copy, or the journal of a publisher that was replaced.
    advertise
        This mirror's address as the publisher's list of mirrors has it, if it is not that of --serve.
    lease
        Become the publisher when this lease is free: a file that all hosts share, a postgresql:// address, or
        kubernetes://NAME or kubernetes://NAMESPACE/NAME. The publisher must hold the same one.
    lease_key
        The number of the lock, with a postgresql:// lease.
    curve
        The publisher's own key file: consumers expect its key at a mirror, too.
    client_key
        Key file with which this mirror connects to the publisher and to other mirrors; with --curve.
    allow
        Public key file of a client that may connect, repeatable; without it all that know the publisher's key. The
        publisher and the other mirrors connect, too.
    """
    if (curve is None) != (client_key is None):
        raise ConfigError(
            "--curve", "encryption needs both --curve (publisher's key file) and --client-key (own key file)"
        )
    keys: dict[str, Any] = {}
    if curve is not None and client_key is not None:
        allowed = [load_public(path) for path in allow] or None
        keys = {
            "curve": ServerKeys.load(curve),
            "client_curve": ClientKeys.load(client_key, curve),
            "allow": allowed,
        }
    for name in (_WANTED, _ANSWER):
        (journal / name).unlink(missing_ok=True)
    held = _lease(lease, lease_key) if lease else None
    serving: Mirror | Publisher = Mirror(address, journal=journal, serve=serve, advertise=advertise, **keys)
    try:
        stopped = on_signals(lambda: None)
        say(f"mirror of {address}, serving at {serving.address}")
        while not stopped:
            time.sleep(_LOOK_EVERY_S)
            if isinstance(serving, Mirror) and (journal / _WANTED).exists():
                serving = _promote(serving, journal)
            elif isinstance(serving, Mirror) and held is not None:
                serving = serving.promote_when(held, timeout=_LOOK_EVERY_S) or serving
    finally:
        serving.close()
    facts = {"source": serving.source, "next": serving.journal.next, "epoch": serving.journal.epoch}
    text = f"{serving.source or 'nothing was copied'}: {serving.journal.next} is the next offset"
    result(facts, text, as_json=as_json)


def _lease(text: str, key: int) -> PublisherLease:
    if text.startswith("kubernetes://"):
        namespace, _, name = text.removeprefix("kubernetes://").rpartition("/")
        return KubernetesLease(name, namespace=namespace)
    return PostgresLease(text, key) if "://" in text else FileLease(text)


def _promote(mirror: Mirror, journal: Path) -> Mirror | Publisher:
    """Do what another process asked for, and say what became of it."""
    serving: Mirror | Publisher = mirror
    try:
        wanted = msgspec.json.decode((journal / _WANTED).read_bytes(), type=_Wanted)
        serving = mirror.promote(force=wanted.force)
        answer = _Answer(epoch=serving.journal.epoch, offset=serving.journal.next)
        say(f"publisher of {serving.source} now, in epoch {answer.epoch} from offset {answer.offset} on")
    except (BrokerlessError, msgspec.MsgspecError) as error:
        answer = _Answer(problem=str(error))
        say(str(error))
    (journal / _WANTED).unlink(missing_ok=True)
    atomic_write(os.fspath(journal / _ANSWER), msgspec.json.encode(answer))
    return serving


def _is_free(journal: Path) -> bool:
    """Whether no process has this journal open."""
    with contextlib.suppress(JournalLocked), DiskJournal(journal):
        return True
    return False


@app.command(help_epilogue="Example: brokerless mirror promote var/mirror")
def promote(
    journal: Path,
    *,
    force: Annotated[bool, Parameter(negative="")] = False,
    timeout: float = 60.0,
    as_json: Json = False,
) -> None:
    """Make the mirror that runs with this directory its source's publisher, in a new epoch.

    It asks the other mirrors first, and waits until the old publisher cannot dispatch any more.

    Parameters
    ----------
    journal
        The directory of the mirror's copy, on this host.
    force
        Whatever the other mirrors say: you guarantee that the old publisher is stopped and that none has more.
    timeout
        How long to wait for the answer, in seconds.
    """
    # Opening a directory that is not there would make it.
    if not (journal / META).exists() or _is_free(journal):
        raise NotPromoted(
            f"no mirror runs with {journal}: start it with `brokerless mirror run`, then promote it"
        )
    (journal / _ANSWER).unlink(missing_ok=True)
    atomic_write(os.fspath(journal / _WANTED), msgspec.json.encode(_Wanted(force)))
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            answer = msgspec.json.decode((journal / _ANSWER).read_bytes(), type=_Answer)
            if answer.problem:
                raise NotPromoted(answer.problem.removeprefix("not promoted: "))
            facts = {"epoch": answer.epoch, "offset": answer.offset}
            text = f"publisher now, in epoch {answer.epoch} from offset {answer.offset} on"
            result(facts, text, as_json=as_json)
            return
        time.sleep(_LOOK_EVERY_S)
    (journal / _WANTED).unlink(missing_ok=True)
    raise NotPromoted(f"the mirror did not answer within {timeout:g} s")


@app.command(help_epilogue="Example: brokerless mirror status tcp://b:5560")
def status(
    address: str,
    *,
    timeout: float = 5.0,
    curve: Curve = None,
    server_key: ServerKey = None,
    as_json: Json = False,
) -> None:
    """Print what a publisher or a mirror has: source, epoch, offsets, and the mirrors that it knows of.

    Parameters
    ----------
    address
        Its address.
    timeout
        How long to wait for its answer, in seconds.
    """
    client = ReplayClient(address, curve=client_keys(curve, server_key))
    try:
        welcome = client.welcome(timeout)
        if welcome is None:
            raise PeerError(f"no publisher answers at {address}: {client.diagnose()}")
    finally:
        client.close()
    facts = {
        "address": address,
        "source": welcome.source,
        "role": "mirror" if welcome.copy else "publisher",
        "epoch": welcome.epoch,
        "oldest": welcome.oldest,
        "next": welcome.next,
        "epochs": welcome.epochs,
        "mirrors": welcome.mirrors,
        "mirrored": welcome.mirrored,
    }
    result(facts, facts_text(facts), as_json=as_json)
