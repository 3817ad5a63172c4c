"""A scenario runs only where it has a meaning."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from brokerless.losstest import Traits
from brokerless.losstest.harness.scenarios import CONTROLS, MAIN, SCENARIOS, random_schedule


def test_scenarios_fit_where_they_mean_something() -> None:
    """Packet loss is for datagrams, 500 for HTTP, retention for journals; controls are for all."""
    tcp = Traits(family="f", link="tcp")
    assert not SCENARIOS["loss"].fits(tcp)
    assert SCENARIOS["loss"].fits(Traits(family="f", link="udp"))
    assert not SCENARIOS["answer-500"].fits(tcp)
    assert SCENARIOS["answer-500"].fits(Traits(family="f", http=True))
    assert not SCENARIOS["beyond-retention"].fits(tcp)
    assert SCENARIOS["beyond-retention"].fits(Traits(family="f", journal="memory"))
    assert not SCENARIOS["kill"].fits(Traits(family="f", without=("kill",)))
    assert all(SCENARIOS[name].fits(Traits(family="f", only=("kill",))) for name in CONTROLS)
    assert not SCENARIOS["broker-kill"].fits(tcp)
    assert SCENARIOS["broker-kill"].fits(Traits(family="f", journal="broker"))
    assert len(MAIN) == 7
    assert not SCENARIOS["power-cut"].fits(Traits(family="f", journal="memory"))
    assert SCENARIOS["power-cut"].fits(Traits(family="f", journal="disk"))


@given(
    seed=st.integers(0, 10_000),
    seconds=st.floats(0.5, 4000),
    link=st.sampled_from(("tcp", "udp")),
    journal=st.sampled_from(("none", "disk", "broker")),
    disk=st.booleans(),
)
def test_random_faults_are_a_function_of_the_seed(
    seed: int, seconds: float, link: str, journal: str, disk: bool
) -> None:
    """The same seed gives the same faults; each part has one at a time, all end in time, every part is hit."""
    traits = Traits(family="f", link=link, journal=journal)  # type: ignore[arg-type]
    schedule = random_schedule(seed, seconds, traits, disk)
    assert schedule == random_schedule(seed, seconds, traits, disk)
    assert all(0 <= fault.begin_s <= fault.end_s <= seconds for fault in schedule)
    parts = {"consumer", "network", "clock"}
    parts |= {"producer"} if journal in ("disk", "broker") else set()
    parts |= {"disk"} if disk and journal == "disk" else set()
    for part in parts:
        own = [fault for fault in schedule if fault.part == part]
        assert all(one.end_s <= other.begin_s for one, other in pairwise(own))
        assert own or seconds < 60
    assert {fault.part for fault in schedule} <= parts
