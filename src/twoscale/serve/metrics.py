"""Aggregates the metrics of several replicas to those of one server, in Prometheus's text format."""

from collections.abc import Iterable, Mapping

RATIOS = {  # gauge -> (numerator, denominator): these gauges are ratios of counters, so they are computed from the totals of the counters
    "twoscale_mean_steps": ("twoscale_loop_steps_total", "twoscale_processed_tokens_total"),
    "twoscale_speculation_acceptance": ("twoscale_speculation_accepted_total", "twoscale_speculation_drafted_total"),
}
MEANS = ("twoscale_running_ratio",)  # gauges that are averaged over the replicas; all others are added


class ReplicaMetrics:
    """Adds up the metrics of replicas. The last known counters of a dead replica stay in the totals, so that they never decrease:
    Prometheus would take a decrease for a reset."""

    def __init__(self) -> None:
        self.counters: dict[str, dict[str, float]] = {}
        """Counters by replica id, of dead ones too."""
        self.lines: list[str] = []
        """The text of one replica, whose HELP and TYPE lines and order are those of the result."""

    def update(self, texts: Mapping[str, str], own: Mapping[str, float] | None = None) -> str:
        """The totals, given the text of each replica that is alive, by replica id. `own` replaces values."""
        gauges: dict[str, float] = {}
        for replica, text in texts.items():
            values = parse_metrics(text)
            self.counters[replica] = {name: value for name, value in values.items() if is_counter(name)}
            _add(gauges, ((name, value) for name, value in values.items() if not is_counter(name)))
            self.lines = text.splitlines()
        total = gauges
        for counted in self.counters.values():
            _add(total, counted.items())
        for name in total:
            base, brace, labels = name.partition("{")
            if base in RATIOS:
                above, below = RATIOS[base]
                total[name] = total[above + brace + labels] / max(1.0, total[below])
            elif base in MEANS:
                total[name] /= len(texts)
        total |= own or {}
        return "".join(f"{_with_value(line, total)}\n" for line in self.lines)


def parse_metrics(text: str) -> dict[str, float]:
    """Value by name, labels included."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def is_counter(name: str) -> bool:
    return name.partition("{")[0].endswith("_total")


def _add(total: dict[str, float], values: Iterable[tuple[str, float]]) -> None:
    for name, value in values:
        total[name] = total.get(name, 0.0) + value


def _with_value(line: str, total: Mapping[str, float]) -> str:
    """A line with the total as its value; 0 for a gauge while no replica is alive."""
    name = line.rpartition(" ")[0]
    return line if line.startswith("#") else f"{name} {total.get(name, 0.0)!r}"
