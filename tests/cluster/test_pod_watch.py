"""Following pods: lists and changes in order, and what the user is told while the API server is away."""

from __future__ import annotations

import threading

import pytest

from elasticcb.cluster.kubernetes import backend
from elasticcb.cluster.kubernetes.api import KubernetesError


class API:
    """Gives a list of pods, or an error, at each call; changes after a list by the list's version."""

    def __init__(self, lists, changes):
        self.lists, self.changes = iter(lists), changes

    def list(self, kind, selector):
        found = next(self.lists)
        if isinstance(found, Exception):
            raise found
        return {"metadata": {"resourceVersion": found}, "items": []}

    def watch_pods(self, selector, version, seconds):
        for change in self.changes.get(version, ()):
            if isinstance(change, Exception):
                raise change
            yield change


@pytest.fixture
def follow(monkeypatch):
    """What was seen and said, in this order, until all lists were given."""
    monkeypatch.setattr(backend, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(backend, "_LONG_PAUSE_SECONDS", 0.0)

    def run(lists, changes):
        stopped, events = threading.Event(), []

        def see_all(listing):
            version = listing["metadata"]["resourceVersion"]
            events.append(version)
            if version == "last":
                stopped.set()

        backend.follow_pods(
            API(lists, changes), "job=a", stopped, see_all, lambda pod, gone: events.append((pod, gone)), events.append
        )
        return events

    return run


def test_each_list_is_followed_by_the_changes_after_it_and_by_the_next_list(follow):
    changes = {"1": [("a", False), ("a", True)], "2": [("b", False)], "last": [("c", False)]}
    assert follow(["1", "2", "last"], changes) == ["1", ("a", False), ("a", True), "2", ("b", False), "last"]


def test_a_list_that_is_too_old_to_be_followed_is_made_again_without_a_word(follow):
    assert follow(["1", "last"], {"1": [("a", False), KubernetesError("too old", 410)]}) == ["1", ("a", False), "last"]


def test_the_user_is_told_once_that_the_api_server_is_away_and_when_it_is_back(follow):
    away = KubernetesError("No answer.")
    events = follow(["1", away, away, "last"], {"1": [away]})
    told = "No answer. The job continues; pods that end meanwhile are noticed later."
    assert events == ["1", told, "last", "The Kubernetes API server answers again."]
