"""What the supervisor sees of a run is what its processes wrote down."""

from pathlib import Path
from tempfile import TemporaryDirectory

from evidence_builder import cell
from hypothesis import given
from hypothesis import strategies as st

from brokerless.losstest.evidence.witness import Kind, Witness
from brokerless.losstest.harness.watch import Watch

PRODUCER, CONSUMER = "producer-0.1", "consumer-0.1"
Step = tuple[Kind, int, int]
producer_steps = st.lists(
    st.tuples(
        st.sampled_from((Kind.OFFERED, Kind.ACCEPTED, Kind.REJECTED, Kind.PENDING)),
        st.integers(0, 50),
        st.just(1),
    ),
    max_size=60,
)
consumer_steps = st.lists(
    st.tuples(
        st.sampled_from((Kind.DELIVERED, Kind.COMMITTED, Kind.ACKED, Kind.IDLE, Kind.PENDING)),
        st.integers(0, 50),
        st.integers(1, 3),
    ),
    max_size=60,
)


@given(sent=producer_steps, received=consumer_steps, portion=st.integers(1, 20))
def test_columns_say_what_the_records_say(sent: list[Step], received: list[Step], portion: int) -> None:
    """In portions of any size, the same as a look at one record after the other."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        watch = Watch(directory, cell())
        began = watch.moved
        for process in (PRODUCER, CONSUMER):
            watch.follow(process)
        assert not watch.done
        witnesses = {process: Witness(directory / f"{process}.wit") for process in (PRODUCER, CONSUMER)}
        witnesses[CONSUMER].write(Kind.READY, t=began + 1)
        witnesses[CONSUMER].write(Kind.PROBE)
        steps = [(PRODUCER, *step) for step in sent] + [(CONSUMER, *step) for step in received]
        moving = began + 1
        for begin in range(0, len(steps), portion):
            for at, (process, kind, n, count) in enumerate(steps[begin : begin + portion], begin):
                t = began + 2 + at
                witnesses[process].write(kind, n, t=t, count=count)
                if kind in (Kind.OFFERED, Kind.DELIVERED, Kind.PENDING):
                    moving = t
            watch.poll()
            assert watch.ready == watch.probed == {CONSUMER}
        watch.poll()

        def numbers(kind: Kind) -> list[int]:
            return [n for _, one, first, count in steps if one == kind for n in range(first, first + count)]

        def last(process: str, kind: Kind, what: str) -> int:
            found = [
                n if what == "n" else began + 2 + at
                for at, (one, k, n, _) in enumerate(steps)
                if (one, k) == (process, kind)
            ]
            return found[-1] if found else 0

        assert watch.offered == len(numbers(Kind.OFFERED))
        assert watch.next == max(numbers(Kind.OFFERED), default=-1) + 1
        assert watch.delivered == len(numbers(Kind.DELIVERED))
        assert watch.committed_total == len(set(numbers(Kind.COMMITTED)))
        assert watch.moved == moving
        accepted = len(numbers(Kind.ACCEPTED))
        assert watch.owed == (len(set(numbers(Kind.COMMITTED))) < accepted)
        assert watch.idle.get(CONSUMER, 0) == last(CONSUMER, Kind.IDLE, "t")
        for process in (PRODUCER, CONSUMER):
            assert watch.pending.get(process, 0) == last(process, Kind.PENDING, "n")
        witnesses[PRODUCER].write(Kind.DONE)
        watch.poll()
        assert watch.done
        for witness in witnesses.values():
            witness.close()
        watch.close()
