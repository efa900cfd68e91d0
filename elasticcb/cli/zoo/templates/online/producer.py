"""Sends clicks whose taste drifts: which items a user likes changes round once in five minutes.

python producer.py [CLICKS_PER_SECOND]
"""

import json
import os
import sys
import time

import numpy as np
from confluent_kafka import Producer

KAFKA = os.environ.get("KAFKA", "127.0.0.1:9092")
USERS, ITEMS, GROUPS, ROUND_SECONDS = 500, 200, 10, 300.0


def clicks(count, now, random):
    """Dicts of user, item and clicked."""
    users, items = random.integers(0, USERS, count), random.integers(0, ITEMS, count)
    angle = 2 * np.pi * ((users - items) % GROUPS / GROUPS + now / ROUND_SECONDS)
    clicked = random.random(count) < 1 / (1 + np.exp(-4 * np.cos(angle)))
    return [
        {"user": int(user), "item": int(item), "clicked": float(click)}
        for user, item, click in zip(users, items, clicked, strict=True)
    ]


def main():
    rate = float(sys.argv[1]) if len(sys.argv) > 1 else 500.0
    producer = Producer({"bootstrap.servers": KAFKA, "linger.ms": 50, "log_level": 2})
    random, began, sent = np.random.default_rng(), time.time(), 0
    print(f"Sending {rate:g} clicks per second to {KAFKA}; Ctrl-C ends it.", flush=True)
    try:
        while True:
            now = time.time()
            due = int((now - began) * rate)
            for click in clicks(due - sent, now, random):
                producer.produce("clicks", json.dumps(click).encode(), partition=sent % 4)
                sent += 1
            producer.flush(10)
            time.sleep(0.05)
    except KeyboardInterrupt:
        print(f"Sent {sent:,} clicks.")


if __name__ == "__main__":
    main()
