"""Names and labels of the metrics, and how a histogram becomes one of Prometheus' families.

What vLLM measures as well has vLLM's name, `vllm:` included, so that its dashboards, alerts and routers work unchanged;
what only this engine has begins with `tokenspeed:`.
"""

from dataclasses import dataclass

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from tokenspeed_jax.engine.histogram import HistogramCounts

LABELS = ("model_name", "engine")
ENGINE = "0"
"""The label `engine`: a server has one."""


@dataclass(frozen=True)
class Definition:
    """One metric.

    Attributes:
        name: counters without their ending `_total`.
        text: what it says, as /metrics and docs/metrics.md have it.
    """

    name: str
    text: str


def histogram_family(definition: Definition, labels: list[str], counts: HistogramCounts) -> HistogramMetricFamily:
    """A histogram with the values of its labels."""
    names = [*map(floatToGoString, counts.bounds), "+Inf"]
    family = HistogramMetricFamily(definition.name, definition.text, labels=LABELS)
    family.add_metric(labels, list(zip(names, counts.cumulative(), strict=True)), counts.total)
    return family
