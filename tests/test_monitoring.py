"""The alert rules, the dashboard and their documentation; a job's test compares them with what it exposes."""

from __future__ import annotations

import re
from pathlib import Path

from metrics_scrapes import alerts, queries

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "operations.md").read_text(encoding="utf-8")


def test_each_alert_is_explained_and_each_explained_alert_is_there():
    assert re.findall(r"^### (ElasticCB\w+)$", PAGE, re.MULTILINE) == [rule["alert"] for rule in alerts()]


def test_each_alert_says_how_bad_it_is_and_of_which_job():
    for rule in alerts():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert "$labels.instance" in rule["annotations"]["summary"], rule["alert"]


def test_queries_name_their_metrics_as_the_documentation_does():
    documented = set(re.findall(r"elasticcb_\w+", (DOCS / "metrics.md").read_text(encoding="utf-8")))
    asked = {
        re.sub(r"_(bucket|count|sum)$", "", name)
        for _, query in queries()
        for name in re.findall(r"elasticcb_\w+", query)
    }
    assert asked
    assert asked <= documented
