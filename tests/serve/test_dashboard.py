"""The Grafana dashboard: well formed, and of metrics that exist, all of them."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from .test_lifecycle import BODY
from .test_metrics import exposed

FILE = Path(__file__).parents[2] / "docs" / "dashboards" / "tokenspeed.json"
METRIC = re.compile(r"\b(?:vllm|tokenspeed):\w+")
SELECTOR = re.compile(r"((?:vllm|tokenspeed):\w+)\{([^}]*)\}")
BY = re.compile(r"\bby \(([^)]*)\)")
VARIABLE = re.compile(r"\$\{?(\w+)\}?")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def expressions(dashboard: dict[str, Any]) -> list[str]:
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return found + [item["definition"] for item in dashboard["templating"]["list"] if "definition" in item]


def test_it_has_the_form_of_a_dashboard_to_import(dashboard: dict[str, Any]) -> None:
    assert dashboard["id"] is None  # or Grafana would look for one to overwrite
    assert dashboard["schemaVersion"] >= 36  # data sources by type and uid
    assert dashboard["title"]
    assert re.fullmatch(r"[\w-]{1,40}", dashboard["uid"])
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] in ("row", "timeseries", "stat", "heatmap")
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_its_panels_fill_rows_without_covering_each_other(dashboard: dict[str, Any]) -> None:
    cells = set()
    for panel in dashboard["panels"]:
        where = panel["gridPos"]
        own = {
            (x, y)
            for x in range(where["x"], where["x"] + where["w"])
            for y in range(where["y"], where["y"] + where["h"])
        }
        assert not own & cells, panel["title"]
        assert where["x"] + where["w"] <= 24, panel["title"]
        cells |= own
    heights = sorted({y for _, y in cells})
    assert all(after == before + 1 for before, after in pairwise(heights))


def test_it_asks_for_metrics_and_labels_that_exist(client: TestClient, dashboard: dict[str, Any]) -> None:
    client.post("/v1/completions", json=BODY)
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for text in expressions(dashboard):
        names = set(METRIC.findall(text))
        assert names, text
        assert names <= labels.keys(), names - labels.keys()
        for name, selector in SELECTOR.findall(text):
            assert {part.split("=")[0] for part in selector.split(",")} <= labels[name], text
        for grouped in BY.findall(text):
            assert set(grouped.split(", ")) <= set.intersection(*(labels[name] for name in names)), text


def test_every_metric_is_on_it(client: TestClient, dashboard: dict[str, Any]) -> None:
    shown = {
        re.sub(r"_(bucket|sum|count)$", "", name) for text in expressions(dashboard) for name in METRIC.findall(text)
    }
    assert shown == set(exposed(client.get("/metrics").text))


def test_its_expressions_are_closed_and_its_variables_known(dashboard: dict[str, Any]) -> None:
    variables = {item["name"] for item in dashboard["templating"]["list"]}
    for text in expressions(dashboard):
        assert set(VARIABLE.findall(text)) <= variables | {"__rate_interval"}, text
        for opening, closing in ("()", "{}", "[]"):
            depth = 0
            for character in text:
                depth += (character == opening) - (character == closing)
                assert depth >= 0, text
            assert depth == 0, text
        # A counter is of use as a rate alone, save where it should stay 0.
        if "_total" in text and "compilations_after_warmup" not in text:
            assert "rate(" in text or "increase(" in text, text


def test_it_chooses_among_models(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            for _, selector in SELECTOR.findall(target["expr"]):
                assert selector == 'model_name=~"$model_name"'
