"""Recommends items to users: finds candidates with the retrieval model, and ranks them with the other.

    python serve.py u0 u1 --hour=20

It needs only TensorFlow, neither Keras nor ElasticCB: models are SavedModels. With millions of items, replace
`Recommender.candidates` by an approximate nearest-neighbour index (ScaNN, FAISS).
"""

import argparse
import csv
from datetime import datetime
from pathlib import Path

import numpy as np
import tensorflow as tf

FOLDER = Path(__file__).parent
MAX_GENRES = 6  # as in features.py


class Recommender:
    """Both models and the vectors of all items."""

    def __init__(self, folder=FOLDER):
        self.retrieval = tf.saved_model.load(str(folder / "models" / "retrieval")).signatures["serving_default"]
        self.ranking = tf.saved_model.load(str(folder / "models" / "ranking")).signatures["serving_default"]
        self.items, self.titles, self.genres, self.shares = read_items(folder)
        self.vectors = self._vectors("item", np.full(len(self.items), ""), self.items, self.genres)

    def user_vectors(self, users):
        """Vectors [users, units], normalized like those of items."""
        return self._vectors("user", users, np.full(len(users), ""), np.full((len(users), MAX_GENRES), ""))

    def _vectors(self, tower, users, items, genres):
        """One tower's vectors. The model has both towers, so the other gets empty strings."""
        outputs = self.retrieval(user=tf.constant(users), item=tf.constant(items), genres=tf.constant(genres))
        return outputs[tower].numpy()

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
        outputs = self.ranking(
            user=tf.constant([user] * len(rows)),
            item=tf.constant(self.items[rows]),
            genres=tf.constant(self.genres[rows]),
            hour=tf.constant([hour] * len(rows), tf.int32),
        )
        probabilities = outputs["probability"].numpy()[:, 0]
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
    options = parser.parse_args()
    recommender = Recommender()
    seen = {}
    for row in ratings("train"):
        seen.setdefault(row["user"], []).append(row["item"])
    for user in options.users or [ratings("test")[0]["user"]]:
        print(f"User {user}, at {options.hour} o'clock:")
        for title, probability in recommender.recommend(user, options.hour, without=seen.get(user, ())):
            print(f"  {probability:.2f}  {title}")


if __name__ == "__main__":
    main()
