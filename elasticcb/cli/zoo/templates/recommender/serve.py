"""Recommends items to users: finds candidates with the retrieval model, and ranks them with the other.

    python serve.py u0 u1 --hour=20
    python serve.py u0 --follow

The models are those that the jobs export to `exports`, also while they are trained: `--follow` recommends again when
a new version is served. With millions of items, replace `Recommender.candidates` by an approximate nearest-neighbour
index (ScaNN, FAISS).
"""

import argparse
import csv
import time
from datetime import datetime
from pathlib import Path

import numpy as np

import elasticcb

FOLDER = Path(__file__).parent
MAX_GENRES = 6  # as in features.py


class Recommender:
    """Both models and the vectors of all items."""

    def __init__(self, folder=FOLDER):
        self.retrieval = elasticcb.ServedModel(folder / "exports" / "retrieval")
        self.ranking = elasticcb.ServedModel(folder / "exports" / "ranking")
        self.items, self.titles, self.genres, self.shares = read_items(folder)
        self.vectors = self.item_vectors()

    @property
    def versions(self):
        """Of both models."""
        return self.retrieval.version, self.ranking.version

    def look(self):
        """Looks for newer versions of the models."""
        before = self.retrieval.version
        self.retrieval.look()
        self.ranking.look()
        if self.retrieval.version != before:
            self.vectors = self.item_vectors()

    def item_vectors(self):
        """Vectors [items, units], normalized."""
        return self._vectors("item", np.full(len(self.items), ""), self.items, self.genres)

    def user_vectors(self, users):
        """Vectors [users, units], normalized like those of items."""
        return self._vectors("user", users, np.full(len(users), ""), np.full((len(users), MAX_GENRES), ""))

    def _vectors(self, tower, users, items, genres):
        """One tower's vectors. The model has both towers, so the other gets empty strings."""
        return self.retrieval.predict({"user": users, "item": items, "genres": genres})[tower]

    def candidates(self, user, count=10, without=()):
        """Row numbers of the items with vectors nearest to the user's, nearest first, by brute force.

        Items in `without`, such as those that the user has seen, are excluded.
        """
        scores = self.vectors @ self.user_vectors([user])[0]
        scores[np.isin(self.items, list(without))] = -np.inf
        return np.argsort(-scores)[: min(count, np.isfinite(scores).sum())]

    def recommend(self, user, hour, count=10, without=()):
        """Candidates as (title, probability that the user likes it), in order of that probability."""
        rows = self.candidates(user, count, without)
        features = {
            "user": [user] * len(rows),
            "item": self.items[rows],
            "genres": self.genres[rows],
            "hour": [hour] * len(rows),
        }
        probabilities = self.ranking.predict(features)["probability"][:, 0]
        return [(self.titles[rows[place]], probabilities[place]) for place in np.argsort(-probabilities)]


def read_items(folder=FOLDER):
    """Columns of data/items.csv: ids, titles, genres [items, MAX_GENRES] with "" at the end, and shares of ratings."""
    rows = _rows(folder / "data" / "items.csv")
    genres = [row["genres"].split("|")[:MAX_GENRES] for row in rows]
    return (
        np.array([row["item"] for row in rows]),
        np.array([row["title"] for row in rows]),
        np.array([names + [""] * (MAX_GENRES - len(names)) for names in genres]),
        np.array([row["item_share"] for row in rows], np.float32),
    )


def ratings(name, folder=FOLDER):
    """Rows of data/NAME.csv, as dicts."""
    return _rows(folder / "data" / f"{name}.csv")


def _rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main():
    parser = argparse.ArgumentParser(description="Recommends items to users.")
    parser.add_argument("users", nargs="*", metavar="USER", help="default: the first user in data/test.csv")
    parser.add_argument("--hour", type=int, default=datetime.now().hour, help="hour of the day, 0 to 23")
    parser.add_argument("--follow", action="store_true", help="recommend again with each new version, until Ctrl-C")
    options = parser.parse_args()
    recommender = Recommender()
    seen = {}
    for row in ratings("train"):
        seen.setdefault(row["user"], []).append(row["item"])
    users = options.users or [ratings("test")[0]["user"]]
    show(recommender, users, options.hour, seen)
    while options.follow:
        shown = recommender.versions
        while recommender.versions == shown:
            time.sleep(1)
            recommender.look()
        show(recommender, users, options.hour, seen)


def show(recommender, users, hour, seen):
    """Prints recommendations, without the items that the users have seen."""
    print("Versions of retrieval and ranking:", *recommender.versions)
    for user in users:
        print(f"User {user}, at {hour} o'clock:")
        for title, probability in recommender.recommend(user, hour, without=seen.get(user, ())):
            print(f"  {probability:.2f}  {title}")


if __name__ == "__main__":
    main()
