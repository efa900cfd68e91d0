"""Asks the served model, which follows training, and a copy that stays as it was, about new clicks.

    python compare.py [SECONDS]

After half a minute of training it makes the copy. Each five seconds it prints the AUC of both on the clicks of that
time, before the job has trained on most of them. At the end it writes compare.png.
"""

import os
import sys
import time
from pathlib import Path

import matplotlib
import numpy as np
import requests
from producer import clicks
from sklearn.metrics import roc_auc_score

import elasticcb

matplotlib.use("agg")
import matplotlib.pyplot as plt

SERVED = os.environ.get("SERVED", "127.0.0.1:8501")
URL = f"http://{SERVED}/v1/models/exports:predict"
FOLDER = Path(__file__).parent
TRAINING_SECONDS = 30.0


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    while requests.get(f"http://{SERVED}/readyz", timeout=10).status_code != 200:
        time.sleep(1.0)  # for the first version
    time.sleep(TRAINING_SECONDS)
    fixed = elasticcb.ServedModel(FOLDER / "exports")  # it does not follow
    random, began, points = np.random.default_rng(), time.time(), []
    try:
        while time.time() - began < seconds:
            time.sleep(5.0)
            given = clicks(1000, time.time(), random)
            labels = [each["clicked"] for each in given]
            features = {name: np.array([each[name] for each in given]) for name in ("user", "item")}
            body = {"inputs": {name: values.tolist() for name, values in features.items()}}
            answer = requests.post(URL, json=body, timeout=10)
            answer.raise_for_status()
            scores = answer.json()["outputs"], fixed.predict(features)["clicked"]
            found = [roc_auc_score(labels, np.ravel(each)) for each in scores]
            points.append((time.time() - began, *found))
            followed, stayed = found
            print(
                f"{points[-1][0]:5.0f} s: AUC {followed:.3f} of the served model, {stayed:.3f} of the fixed one",
                flush=True,
            )
    except KeyboardInterrupt:
        pass
    if points:
        at, served, same = zip(*points, strict=True)
        plt.plot(at, served, label="follows training")
        plt.plot(at, same, label=f"stays at version {fixed.version}")
        plt.xlabel("seconds")
        plt.ylabel("AUC on new clicks")
        plt.legend()
        plt.savefig(FOLDER / "compare.png", dpi=120)
        print(f"Wrote {FOLDER / 'compare.png'}")


if __name__ == "__main__":
    main()
