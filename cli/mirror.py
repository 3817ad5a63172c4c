"""`brokerless mirror`: keep a copy of a publisher's journal on this host, and make it the publisher."""

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated

import cyclopts
import msgspec
from cyclopts import Parameter

from brokerless.cli.exit_codes import FAILED
from brokerless.cli.options import Json
from brokerless.cli.output import result, say
from brokerless.cli.signals import exit_code, on_signals
from brokerless.core import DiskJournal
from brokerless.core.errors import BrokerlessError, JournalLocked, NotPromoted
from brokerless.core.runtime.files import atomic_write
from brokerless.direct import FileLease, KubernetesLease, Mirror, PostgresLease, Publisher, ReplayClient
from brokerless.direct.publisher_lease import Lease

app = cyclopts.App(name="mirror", help="Keep a copy of a publisher's journal: run, status, promote.")
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
    """
    for name in (_WANTED, _ANSWER):
        (journal / name).unlink(missing_ok=True)
    stopped: list[int] = []
    held = _lease(lease, lease_key) if lease else None
    serving: Mirror | Publisher = Mirror(address, journal=journal, serve=serve, advertise=advertise)
    try:
        interrupted = on_signals(lambda: stopped.append(1))
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
    result(facts, f"{facts['source']}: {facts['next']} is the next offset", as_json=as_json)
    raise SystemExit(exit_code(interrupted))


def _lease(text: str, key: int) -> Lease:
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
    with contextlib.suppress(JournalLocked), DiskJournal(journal):
        say(f"no mirror runs with {journal}: start it with `brokerless mirror run`, then promote it")
        raise SystemExit(FAILED)
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
def status(address: str, *, timeout: float = 5.0, as_json: Json = False) -> None:
    """Print what a publisher or a mirror has: source, epoch, offsets, and the mirrors that it knows of.

    Parameters
    ----------
    address
        Its address.
    timeout
        How long to wait for its answer, in seconds.
    """
    client = ReplayClient(address)
    try:
        welcome = client.welcome(timeout)
    finally:
        client.close()
    if welcome is None:
        say(f"{address} did not answer within {timeout:g} s")
        raise SystemExit(FAILED)
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
    result(facts, "\n".join(f"{name}: {value}" for name, value in facts.items()), as_json=as_json)
