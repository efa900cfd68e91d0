"""Scrapes of real jobs, and whether the files of deploy/monitoring ask for what they expose."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_MONITORING = Path(__file__).parents[1] / "deploy" / "monitoring"
_SELECTOR = re.compile(r"(elasticcb_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~?)"([^"]*)"')


class Scrape:
    """What a master exposes at the moment, at `address`."""

    def __init__(self, address: str) -> None:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            families = [*text_string_to_metric_families(answer.read().decode())]
        self.samples: list[Sample] = [sample for family in families for sample in family.samples]
        self.families = {f"{each.name}_total" if each.type == "counter" else each.name for each in families}

    def find(self, name: str, **labels: str) -> float | None:
        """The value of the one sample with these labels; None: there is none."""
        values = [each.value for each in self.samples if each.name == name and labels.items() <= each.labels.items()]
        assert len(values) < 2, f"{len(values)} samples {name} {labels}"
        return values[0] if values else None

    def has(self, name: str, matchers: list[tuple[str, str, str]]) -> bool:
        """Whether a sample fits the matchers of a query."""
        return any(
            each.name == name
            and all(
                each.labels.get(label) == value if kind == "=" else re.fullmatch(value, each.labels.get(label, ""))
                for label, kind, value in matchers
            )
            for each in self.samples
        )


def alerts() -> list[dict[str, str]]:
    """The alert rules."""
    groups = yaml.safe_load((_MONITORING / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Each query of the rules and of the dashboard, and where it stands."""
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in json.loads((_MONITORING / "dashboard.json").read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def unanswered(scrape: Scrape) -> list[str]:
    """Selectors of these queries to which no sample of a job fits, which does not train on a stream."""
    found = []
    for place, query in queries():
        for name, given in _SELECTOR.findall(query):
            matchers = [each for each in _MATCHER.findall(given) if each[0] != "instance"]  # which Prometheus adds
            if not scrape.has(name, matchers) and not name.startswith("elasticcb_stream_"):
                found.append(f"{place}: {name}{matchers}")
    return found
