"""Generated data in the shapes of what public programs download, for public_programs.py.

`install` makes `keras.datasets`, `keras.utils.get_file`, `urlretrieve`, `tensorflow_datasets`, and `pandas.read_csv`
and `numpy.loadtxt` of an address return it. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import io
import os
import random
import shutil
import sys
import types
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WORDS = (
    "the", "a", "of", "to", "and", "movie", "was", "very", "good", "bad", "not", "film", "it", "is", "this", "that",
    "plot", "actor", "scene", "great", "dull", "long", "one", "all", "cat", "sat", "on",
    "mat",
)  # fmt: skip
USERS, MOVIES, RATINGS = 60, 1700, 3000
GENRES = ("Action", "Comedy", "Drama", "Thriller", "Sci-Fi")

random_numbers = np.random.default_rng(0)


def sentence(length: int = 12) -> str:
    return " ".join(random_numbers.choice(WORDS, length))


# ---------------------------------------------------------------- files that are downloaded


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def reviews(folder: Path) -> None:
    for part in ("train", "test"):
        for kind in ("pos", "neg", "unsup"):
            for index in range(60 if part == "train" else 20):
                write(folder / "aclImdb" / part / kind / f"{index}_7.txt", [sentence(30)])
        write(folder / "aclImdb" / part / "labeledBow.feat", ["0"])
        write(folder / "aclImdb" / part / "urls.txt", ["none"])
    write(folder / "aclImdb" / "train" / "pos" / "6248_7.txt", [sentence(30)])


def newsgroups(folder: Path) -> None:
    for name in ("comp.graphics", "rec.autos", "sci.space"):
        for index in range(30):
            write(folder / "20_newsgroup" / name / str(38987 + index), ["header"] * 10 + [sentence(30)])


def ratings(rows: int = RATINGS) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Users, movies, ratings from 1 to 5, and times; each user and each movie at least once."""
    index = np.arange(rows)
    users, movies = index % USERS + 1, (index * 7) % MOVIES + 1
    return users, movies, random_numbers.integers(1, 6, rows), 900_000_000 + random_numbers.integers(0, 10**6, rows)


def movielens_million(folder: Path) -> None:
    lines = ["::".join(map(str, row)) for row in zip(*ratings(), strict=True)]
    write(folder / "ml-1m" / "ratings.dat", lines)
    titles = [f"{i}::Movie {i} ({1950 + i})::{GENRES[i % 5]}|{GENRES[(i + 1) % 5]}" for i in range(1, MOVIES + 1)]
    write(folder / "ml-1m" / "movies.dat", titles)
    ages, jobs = random_numbers.choice([1, 18, 25, 35], USERS), random_numbers.integers(0, 8, USERS)
    people = [f"{i + 1}::{'MF'[i % 2]}::{ages[i]}::{jobs[i]}::{10000 + i}" for i in range(USERS)]
    write(folder / "ml-1m" / "users.dat", people)


def movielens_small(folder: Path) -> None:
    rows = [f"{u},{m},{r}.0,{t}" for u, m, r, t in zip(*ratings(), strict=True)]
    write(folder / "ml-latest-small" / "ratings.csv", ["userId,movieId,rating,timestamp", *rows])
    titles = [f"{i},Movie {i},{GENRES[i % 5]}" for i in range(1, MOVIES + 1)]
    write(folder / "ml-latest-small" / "movies.csv", ["movieId,title,genres", *titles])


CLIMATE = (
    "p (mbar)", "T (degC)", "Tpot (K)", "Tdew (degC)", "rh (%)", "VPmax (mbar)", "VPact (mbar)", "VPdef (mbar)",
    "sh (g/kg)", "H2OC (mmol/mol)", "rho (g/m**3)", "wv (m/s)", "max. wv (m/s)", "wd (deg)",
)  # fmt: skip


def climate(folder: Path, rows: int = 8000) -> None:
    times = [f"{i % 28 + 1:02}.01.2009 {i // 28 % 24:02}:{i % 6}0:00" for i in range(rows)]
    waves = (
        np.sin(np.arange(rows)[:, None] / np.linspace(20, 90, len(CLIMATE)))
        + random_numbers.normal(size=(rows, 14)) / 9
    )
    lines = [f"{time}," + ",".join(f"{value:.4f}" for value in row) for time, row in zip(times, waves, strict=True)]
    write(folder / "jena_climate_2009_2016.csv", [",".join(["Date Time", *CLIMATE]), *lines])


def traffic(folder: Path, roads: int = 228, hours: int = 400) -> None:
    places = random_numbers.uniform(0, 30_000, roads)
    distances = np.abs(np.subtract.outer(places, places))
    speeds = 60 + 9 * np.sin(np.arange(hours)[:, None] / 12 + places / 9000)
    for name, table in (("W", distances), ("V", speeds)):
        write(folder / f"PeMSD7_{name}_228.csv", [",".join(f"{value:.2f}" for value in row) for row in table])


def sentence_pairs(name: str, attribution: bool) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        tail = ["\tnobody"] if attribution else [""]
        lines = [f"{sentence(4)}\t{sentence(5).upper()}{tail[0]}" for _ in range(400)]
        write(folder / ("" if attribution else "spa-eng") / name, lines)

    return make


def prose(folder: Path) -> None:
    write(folder / "nietzsche.txt", [sentence(14) for _ in range(120)])


def glove(folder: Path) -> None:
    vectors = random_numbers.normal(size=(len(WORDS), 100))
    lines = [f"{word} " + " ".join(f"{x:.4f}" for x in row) for word, row in zip(WORDS, vectors, strict=True)]
    write(folder / "glove.6B.100d.txt", lines)


def credit_cards(folder: Path) -> None:
    numbers = random_numbers.normal(size=(600, 30))
    lines = [",".join(f"{value:.4f}" for value in row) + f',"{int(i % 15 == 0)}"' for i, row in enumerate(numbers)]
    write(folder / "creditcard.csv", [",".join(f"V{i}" for i in range(31)), *lines])


# By the last part of an address: what makes its files.
DOWNLOADS: dict[str, Callable[[Path], None]] = {
    "aclImdb_v1.tar.gz": reviews,
    "news20.tar.gz": newsgroups,
    "ml-1m.zip": movielens_million,
    "ml-latest-small.zip": movielens_small,
    "jena_climate_2009_2016.csv.zip": climate,
    "PeMSD7_Full.zip": traffic,
    "fra-eng.zip": sentence_pairs("fra.txt", attribution=True),
    "spa-eng.zip": sentence_pairs("spa.txt", attribution=False),
    "nietzsche.txt": prose,
}


def download(address: str, into: str | os.PathLike[str]) -> None:
    """Makes the file of an address, an archive where its name says so."""
    name, target = address.rsplit("/", 1)[-1], Path(into)
    folder = target.parent / f".made_{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if name not in DOWNLOADS:
        raise LookupError(f"There is no generated data for {address}. Add it to generated_data.py.")
    DOWNLOADS[name](folder)
    for ending, kind in ((".zip", "zip"), (".tar.gz", "gztar")):
        if name.endswith(ending):
            shutil.make_archive(str(target)[: -len(ending)], kind, folder)
            return
    shutil.copy(folder / name, target)


def get_file(fname: str | None = None, origin: str | None = None, extract: bool = False, **options: Any) -> str:
    """As `keras.utils.get_file`: the path of a file, which is extracted into its folder, as Keras 2 and 3 do."""
    address = str(origin or fname)
    name = str(fname or address.rsplit("/", 1)[-1])
    folder = Path(options.get("cache_dir") or "downloads") / "datasets"
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / name).absolute()
    download(address, path)
    if extract or options.get("untar"):
        shutil.unpack_archive(path, folder)
        shutil.unpack_archive(path, folder / f"{name.split('.')[0]}_extracted")
    return str(path)


# ---------------------------------------------------------------- tables that are read from an address


def adult(rows: int) -> str:
    edu, work = ("Bachelors", "HS-grad", "Masters", "11th"), ("Private", "State-gov", "Self-emp-inc")
    countries = ["United-States", "Mexico", *(f"Country-{i}" for i in range(20))]  # the feature with most values
    pick = random_numbers.choice
    lines = []
    for _ in range(rows):
        numbers = random_numbers.integers(1, 60, 6)
        race = pick(["White", "Black", "Other"])
        lines.append(
            f"{numbers[0] + 17}, {pick(work)}, {numbers[1] * 1000}, {pick(edu)}, {numbers[2]}, "
            f"{pick(['Divorced', 'Married-civ-spouse', 'Never-married'])}, {pick(['Sales', 'Tech-support'])}, "
            f"{pick(['Husband', 'Wife', 'Unmarried'])}, {race}, {pick(['Male', 'Female'])}, "
            f"{numbers[3]}, {numbers[4]}, {numbers[5]}, {pick(countries)}, {pick(['<=50K', '>50K'])}"
        )
    return "\n".join(lines)


def census(rows: int) -> str:
    """The 42 columns of the census-income data."""
    numeric = {0, 5, 16, 17, 18, 24, 30, 39}
    lines = []
    for _ in range(rows):
        row = [
            str(random_numbers.integers(0, 50)) if i in numeric else f" v{random_numbers.integers(0, 3)}"
            for i in range(41)
        ]
        row[40] = str(random_numbers.choice([94, 95]))
        lines.append(",".join([*row, str(random_numbers.choice([" - 50000.", " 50000+."]))]))
    return "\n".join(lines)


def cover_types(rows: int = 600) -> str:
    lines = []
    for i in range(rows):
        numbers = random_numbers.integers(0, 3000, 10)
        soil, area = np.eye(40, dtype=int)[i % 40], np.eye(4, dtype=int)[i % 4]
        lines.append(",".join(map(str, [*numbers, *area, *soil, i % 7 + 1])))
    return "\n".join(lines)


def hearts(rows: int = 300) -> str:
    names = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,target"
    lines = []
    for _ in range(rows):
        n = random_numbers.integers
        row: list[Any] = [n(30, 70), n(0, 2), n(0, 5), n(100, 180), n(150, 300), n(0, 2), n(0, 3), n(90, 190), n(0, 2)]
        row += [n(0, 60) / 10, n(1, 4), n(0, 4), random_numbers.choice(["fixed", "normal", "reversible"]), n(0, 2)]
        lines.append(",".join(map(str, row)))
    return "\n".join([names, *lines])


def noise(rows: int = 4032, jump: float = 0.0) -> str:
    values = 20 + 10 * np.sin(np.arange(rows) / 46) + random_numbers.normal(size=rows)
    values[3000:3200] += jump
    stamp = np.datetime64("2014-04-01") + np.arange(rows) * np.timedelta64(5, "m")
    return "\n".join(["timestamp,value", *(f"{t},{v:.4f}" for t, v in zip(stamp, values, strict=True))])


def engines(rows: int) -> str:
    labels = np.where(np.arange(rows) % 2, 1, -1)
    waves = np.sin(np.arange(500) / (20 + 5 * labels[:, None])) + random_numbers.normal(size=(rows, 500)) / 5
    return "\n".join("\t".join([str(y), *(f"{v:.4f}" for v in x)]) for y, x in zip(labels, waves, strict=True))


TABLES: dict[str, Callable[[], str]] = {
    "adult.data": lambda: adult(600),
    "adult.test": lambda: f"|1x3 Cross validator\n{adult(150)}",
    "census-income.data.gz": lambda: census(600),
    "census-income.test.gz": lambda: census(150),
    "covtype.data.gz": cover_types,
    "heart.csv": hearts,
    "art_daily_small_noise.csv": noise,
    "art_daily_jumpsup.csv": lambda: noise(jump=60),
    "FordA_TRAIN.tsv": lambda: engines(160),
    "FordA_TEST.tsv": lambda: engines(80),
}


def of_address(read: Callable[..., Any]) -> Callable[..., Any]:
    """`read`, where an address stands for the generated table."""

    def reads(source: Any, *args: Any, **options: Any) -> Any:
        if isinstance(source, str) and source.startswith(("http://", "https://")):
            name = source.rsplit("/", 1)[-1]
            if name not in TABLES:
                raise LookupError(f"There is no generated table for {source}. Add it to generated_data.py.")
            source = io.StringIO(TABLES[name]())
        return read(source, *args, **options)

    return reads


# ---------------------------------------------------------------- data sets of libraries


def images(size: int, channels: int, classes: int = 10) -> Callable[..., Any]:
    def load_data(**_: Any) -> Any:
        def part(rows: int) -> tuple[np.ndarray, np.ndarray]:
            x = random_numbers.integers(0, 256, (rows, size, size, channels) if channels > 1 else (rows, size, size))
            y = random_numbers.integers(0, classes, (rows, 1) if channels > 1 else rows)
            return x.astype("uint8"), y.astype("uint8")

        return part(640), part(160)

    return load_data


def imdb(num_words: int = 10_000, **_: Any) -> Any:
    def part(rows: int) -> tuple[np.ndarray, np.ndarray]:
        x = np.empty(rows, object)
        x[:] = [list(random_numbers.integers(1, num_words, random_numbers.integers(5, 60))) for _ in range(rows)]
        return x, random_numbers.integers(0, 2, rows)

    return part(640), part(160)


def houses(**_: Any) -> Any:
    x = random_numbers.normal(size=(500, 13))
    return (x[:400], x[:400].sum(1)), (x[400:], x[400:].sum(1))


DATASETS = {
    "mnist": images(28, 1),
    "fashion_mnist": images(28, 1),
    "cifar10": images(32, 3),
    "cifar100": images(32, 3, 100),
    "imdb": imdb,
    "boston_housing": houses,
    "california_housing": houses,
}


def tensorflow_dataset(name: str, split: Any = None, as_supervised: bool = False, **_: Any) -> Any:
    """As `tensorflow_datasets.load`."""
    import tensorflow as tf

    if isinstance(split, (list, tuple)):
        return [tensorflow_dataset(name, each, as_supervised) for each in split]
    if name.startswith("movielens") and "movies" in name:
        index = np.arange(1, MOVIES + 1)
        genres = tf.ragged.constant([[i % 5, i % 7 + 5] if i % 2 else [i % 5] for i in index], dtype=tf.int64)
        names = {"movie_id": [str(i) for i in index], "movie_title": [f"Movie {i} ({1950 + i})" for i in index]}
        return tf.data.Dataset.from_tensor_slices({**names, "movie_genres": genres}).map(dense_genres)
    if name.startswith("movielens"):
        users, movies, stars, times = ratings()
        genres = tf.ragged.constant([[i % 5, i % 7 + 5] if i % 2 else [i % 5] for i in movies], dtype=tf.int64)
        columns = {
            "user_id": [str(i) for i in users],
            "movie_id": [str(i) for i in movies],
            "user_rating": stars.astype("float32"),
            "timestamp": times.astype("int64"),
            "movie_title": [f"Movie {i} ({1950 + i})" for i in movies],
            "movie_genres": genres,
            "bucketized_user_age": (18.0 + 10 * (users % 4)).astype("float32"),
            "raw_user_age": (18.0 + users).astype("float32"),
            "user_gender": users % 2 == 0,
            "user_occupation_label": (users % 8).astype("int64"),
            "user_occupation_text": [f"job {i % 8}" for i in users],
            "user_zip_code": [str(10_000 + i) for i in users],
        }
        return tf.data.Dataset.from_tensor_slices(columns).map(dense_genres)
    if name == "imdb_reviews":
        texts, labels = [sentence(30) for _ in range(300)], random_numbers.integers(0, 2, 300)
        data = tf.data.Dataset.from_tensor_slices((texts, labels))
        return data if as_supervised else data.map(lambda text, label: {"text": text, "label": label})
    size, classes = (72, 102) if "flowers" in name else (64, 2)
    pixels = random_numbers.integers(0, 256, (160, size, size, 3)).astype("uint8")
    data = tf.data.Dataset.from_tensor_slices((pixels, random_numbers.integers(0, classes, 160)))
    return data if as_supervised else data.map(lambda image, label: {"image": image, "label": label})


def dense_genres(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "movie_genres": record["movie_genres"] + 0}


class Anything(types.ModuleType):
    """A module of which a program may use everything, to no effect: plots, displays, uploads."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Anything("result")

    def __iter__(self) -> Any:
        return iter([Anything("axis")] * 2)

    def __getitem__(self, _: Any) -> Any:
        return Anything("item")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


SHOWN = (
    "matplotlib", "matplotlib.pyplot", "matplotlib.colors", "mpl_toolkits", "mpl_toolkits.axes_grid1", "IPython",
    "IPython.display", "imageio", "gdown", "seaborn", "tensorflow_docs", "tensorflow_docs.vis", "scann", "tqdm",
)  # fmt: skip


def install() -> None:
    """Replaces what downloads and what shows in this process, and puts files that shells would fetch into the current
    folder."""
    import keras
    import pandas as pd
    import tensorflow as tf

    random.seed(0)
    os.environ["MPLBACKEND"] = "Agg"
    packages = {name.split(".")[0] for name in SHOWN}
    missing = {name for name in packages if importlib.util.find_spec(name) is None}
    sys.modules.update({name: Anything(name) for name in SHOWN if name.split(".")[0] in missing})
    catalogue: Any = types.ModuleType("tensorflow_datasets")
    catalogue.load = tensorflow_dataset
    catalogue.disable_progress_bar = lambda: None
    catalogue.as_numpy = lambda data: [np.array(part) for part in zip(*data.as_numpy_iterator(), strict=True)]
    sys.modules["tensorflow_datasets"] = catalogue
    for kit in (keras, tf.keras):
        for name, load in DATASETS.items():
            if hasattr(kit.datasets, name):
                getattr(kit.datasets, name).load_data = load
        kit.utils.get_file = get_file
        kit.utils.plot_model = lambda *_, **__: None
    urllib.request.urlretrieve = lambda address, filename, *_: (download(address, filename), None)  # type: ignore[assignment,func-returns-value]
    pd.read_csv, np.loadtxt = of_address(pd.read_csv), of_address(np.loadtxt)
    for make in (reviews, movielens_million, credit_cards, glove):
        make(Path())
