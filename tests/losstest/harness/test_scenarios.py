"""A scenario runs only where it has a meaning."""

from brokerless.losstest import Traits
from brokerless.losstest.harness.scenarios import CONTROLS, MAIN, SCENARIOS


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
