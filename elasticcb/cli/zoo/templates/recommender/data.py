"""Writes data/train.csv, data/test.csv and data/items.csv: users' ratings of films, with times.

    python data.py                               # generated ratings, in which there is something to learn
    python data.py --movielens=ml-100k/u.data    # MovieLens 100k, with u.item in the same folder

The last tenth of each user's ratings is the test data. To train on your own data, write the same columns:

- train.csv, test.csv: user, item, genres, hour, item_share, rating (1 to 5). `item_share` is the item's share of all
  ratings in train.csv, with which retrieval.py corrects for popular items.
- items.csv: item, title, genres, item_share; each item once.

Users and items are any strings without commas. Genres are one string, separated by |.
"""

import argparse
import csv
from pathlib import Path

import numpy as np

GENRES = [  # in the order of u.item
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
]  # fmt: skip
TEST_SHARE = 0.1


def generated(users, items, ratings_per_user, seed=0):
    """Generates ratings of users who like some genres, and some films by a hidden taste.

    Returns rows (user, item, rating, seconds) and {item: (title, genres)}.
    """
    random = np.random.default_rng(seed)
    genres = np.zeros((items, len(GENRES)))
    for row in genres:
        row[random.choice(np.arange(1, len(GENRES)), random.integers(1, 4), replace=False)] = 1
    item_taste = random.normal(size=(items, 4))
    user_taste = random.normal(size=(users, 4)) * 0.5
    likes = random.normal(size=(users, len(GENRES)))
    affinity = likes @ (genres / np.sqrt(genres.sum(axis=1, keepdims=True))).T + user_taste @ item_taste.T
    popularity = random.normal(size=items)
    # Ratings without repetition, each film with probability ~ exp(popularity + 1.5 affinity): the Gumbel-top-k trick.
    keys = popularity + 1.5 * affinity + random.gumbel(size=(users, items))
    chosen = np.argsort(-keys, axis=1)[:, :ratings_per_user]
    rows = []
    for user in range(users):
        for item in random.permutation(chosen[user]):
            hour = random.integers(24)
            evening = 0.8 if hour >= 18 else -0.4  # users are kinder in the evening
            rating = 2.8 + 0.6 * affinity[user, item] + evening + random.normal(scale=0.5)
            seconds = (len(rows) * 24 + hour) * 3600
            rows.append((f"u{user}", f"m{item}", int(np.clip(round(rating), 1, 5)), seconds))
    films = {f"m{n}": (f"Film {n}", "|".join(np.array(GENRES)[genres[n] > 0])) for n in range(items)}
    return rows, films


def movielens(path):
    """MovieLens 100k, in the form of `generated`. Titles and genres are in u.item, in the folder of `path`."""
    rows = []
    for line in path.read_text().splitlines():
        user, item, rating, seconds = line.split("\t")
        rows.append((user, item, int(rating), int(seconds)))
    films = {}
    for line in (path.parent / "u.item").read_text(encoding="latin-1").splitlines():
        item, title, *rest = line.split("|")
        flags = rest[-len(GENRES) :]
        films[item] = title, "|".join(name for name, flag in zip(GENRES, flags, strict=True) if flag == "1")
    return rows, films


def split(rows):
    """Splits rows into training and test data: the last rows of each user."""
    by_user = {}
    for row in sorted(rows, key=lambda row: row[3]):
        by_user.setdefault(row[0], []).append(row)
    train, test = [], []
    for own in by_user.values():
        held_out = int(len(own) * TEST_SHARE)
        train += own[: len(own) - held_out]
        test += own[len(own) - held_out :]
    return train, test


def write(folder, rows, films):
    train, test = split(rows)
    counts = dict.fromkeys(films, 0)
    for _, item, _, _ in train:
        counts[item] += 1
    # Plus one, so that no share is 0.
    shares = {item: f"{(count + 1) / (len(train) + len(films)):.3e}" for item, count in counts.items()}
    np.random.default_rng(0).shuffle(train)  # tasks are ranges of lines, and each should have all kinds of users

    folder.mkdir(exist_ok=True)
    for name, part in (("train", train), ("test", test)):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["user", "item", "genres", "hour", "item_share", "rating"])
            for user, item, rating, seconds in part:
                writer.writerow([user, item, films[item][1], seconds // 3600 % 24, shares[item], rating])
    with (folder / "items.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["item", "title", "genres", "item_share"])
        writer.writerows([item, title, genres, shares[item]] for item, (title, genres) in films.items())
    print(f"{folder}: {len(train)} ratings to train on, {len(test)} to test, {len(films)} films")


def main():
    parser = argparse.ArgumentParser(description="Writes the data that retrieval.yaml and ranking.yaml train on.")
    parser.add_argument("--movielens", type=Path, metavar="FILE", help="u.data of MovieLens 100k")
    parser.add_argument("--users", type=int, default=2000, help="generated users")
    parser.add_argument("--items", type=int, default=1000, help="generated films")
    parser.add_argument("--ratings", type=int, default=40, help="generated ratings of each user")
    options = parser.parse_args()
    if options.movielens:
        rows, films = movielens(options.movielens)
    else:
        rows, films = generated(options.users, options.items, options.ratings)
    write(Path(__file__).parent / "data", rows, films)


if __name__ == "__main__":
    main()
