"""Measures retrieval: of the items in data/test.csv that a user liked, which share is among the ten best?

    python evaluate.py

Candidates are all items that the user has not rated in data/train.csv. The baseline, popularity, recommends the most
rated items to everybody; a useful model is better.
"""

import keras_rs
import numpy as np
from features import LIKED  # in this folder
from serve import Recommender, ratings


def main():
    recommender = Recommender()
    places = {item: place for place, item in enumerate(recommender.items)}
    liked = [row for row in ratings("test") if float(row["rating"]) >= LIKED]
    users = sorted({row["user"] for row in liked})
    numbers = {user: number for number, user in enumerate(users)}

    relevant = np.zeros((len(users), len(places)), np.float32)
    for row in liked:
        relevant[numbers[row["user"]], places[row["item"]]] = 1
    unseen = np.ones(relevant.shape, bool)
    for row in ratings("train"):
        if row["user"] in numbers:
            unseen[numbers[row["user"]], places[row["item"]]] = False

    scores = {
        "two towers": recommender.user_vectors(users) @ recommender.vectors.T,
        "popularity": np.broadcast_to(recommender.shares, relevant.shape),
    }
    print(f"{len(users)} users, {len(liked)} items that they liked, out of {len(places)}")
    for name, predictions in scores.items():
        recall, ndcg = keras_rs.metrics.RecallAtK(k=10), keras_rs.metrics.NDCG(k=10)
        for metric in (recall, ndcg):
            metric.update_state({"labels": relevant, "mask": unseen}, predictions)
        print(f"{name}: recall@10 {float(recall.result()):.3f}, NDCG@10 {float(ndcg.result()):.3f}")


if __name__ == "__main__":
    main()
