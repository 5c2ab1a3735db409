"""The supervisor's metrics, as they are scraped."""

from tentalis.kafka.lag import LagProbe
from tentalis.local.metrics import supervisor_health
from tentalis.service.settings import Settings


class CountedProbe(LagProbe):
    """A probe that finds one record more whenever it is asked."""

    asked = 0

    def ask(self) -> None:
        self.asked += 1
        self.lags, self.reachable = {"join": self.asked}, True


def test_a_scrape_asks_for_the_lag_once() -> None:
    probe = CountedProbe(Settings(bootstrap="nowhere:1"), {}, on_request=True)
    exporter = supervisor_health(dict, probe, None).exporter
    for scrape in (1, 2):
        text = exporter.exposition().decode()
        assert probe.asked == scrape
        assert "\ntentalis_broker_reachable 1.0\n" in text
        assert f'\ntentalis_group_lag_records{{group="join"}} {scrape}.0\n' in text
