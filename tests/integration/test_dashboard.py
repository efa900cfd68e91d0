"""The page of a job in a real browser. With ELASTICCB_SCREENSHOTS=docs/images it makes the pictures of the docs."""

import base64
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from elasticcb.cli.main import main
from elasticcb.clients.history import History
from elasticcb.dashboard.server import JobView
from elasticcb.errors import ExitCode
from jobs import JobProcess, offsets_job, train_flags

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [  # tests/dashboard has the server of the page
    pytest.mark.deep,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
]

# Batches that last, up to the gate: there is something to see.
SLOW = """
class SlowGate(Gate):
    def on_train_batch_begin(self, version, logs=None):
        time.sleep(0.02)
        super().on_train_batch_begin(version, logs)

def callbacks():
    return [SlowGate()]
"""
GATE_AT = 400
FITS = """
return document.documentElement.scrollWidth <= arguments[0]
    && [...document.querySelectorAll(".uplot")].every(plot => plot.offsetWidth <= plot.parentElement.clientWidth)
"""
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip


class Page:
    """A browser with the page of a job."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in (*QUIET, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
        self.look(1200, 1500)

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """In a window of this size, light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def text(self, selector: str) -> str:
        return self.driver.find_element(By.CSS_SELECTOR, selector).text

    def wait(self, condition, seconds: float = 120.0) -> None:
        WebDriverWait(self.driver, seconds, 0.1).until(lambda driver: condition())

    def wait_for_text(self, selector: str, pattern: str) -> None:
        self.wait(lambda: re.search(pattern, self.text(selector)))

    def click(self, selector: str) -> None:
        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def value(self, figure: str) -> float:
        """What a figure shows, as the document has it."""
        found = self.driver.find_element(By.ID, f"figure-{figure}").get_attribute("data-value")
        return float(found)


@pytest.fixture
def page(tmp_path):
    page = Page(tmp_path / "profile")
    yield page
    page.driver.quit()


@pytest.fixture
def job(tmp_path):
    """One with its page that loses a worker and then stands at the gate; and the address of the page."""
    offsets_job(tmp_path, ids=100, gate=GATE_AT, train=8_000, test=200)
    model = tmp_path / "offsets.py"
    model.write_text(model.read_text() + SLOW)
    more = {"num_ps": 2, "updates": "async", "evaluation_steps": 100, "checkpoint_steps": 150, "dashboard": "true"}
    flags = train_flags(tmp_path, "offsets", checkpoint_dir=tmp_path / "checkpoints", **more)
    job = JobProcess("train", *flags, cwd=tmp_path)
    line = job.wait_for_line(r"http://\S+#key=")
    yield job, re.search(r"http://\S+", line)[0]
    job.process.kill()
    job.finish()
    job.assert_no_orphans()


def status(folder: Path, capsys) -> dict:
    capsys.readouterr()
    assert main(["status", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def shows(page: Page, said: dict) -> bool:
    """Whether the page has the figures of `elasticcb status`, and all rows of the table are counted."""
    figures = {
        "version": said["version"],
        "loss": said["loss"],
        "epoch": said["epoch"],
        "records": said["records_trained"],
        "workers": said["workers"]["up"],
        "servers": said["servers"]["up"],
        "tasks-to-do": sum(states["todo"] for states in said["tasks"].values()),
        "processes-lost": said["workers"]["lost"],
        "records-repeated": said["records_repeated"],
    }
    if any(each["batches"] is None for each in said["processes"] if each["role"] == "worker"):
        return False  # it has just joined
    batches = [f"{each['batches']:,}" for each in said["processes"] if each["role"] == "worker"]
    cells = page.driver.find_elements(By.CSS_SELECTOR, "#workers td:nth-child(5)")
    return (
        {name: page.value(name) for name in figures} == figures
        and [cell.text for cell in cells] == batches
        and said["tables"]["embedding/embeddings"]["rows"] == 100
        and page.text("#tables tr td:nth-child(2)") == "100"
    )


def take_pictures(page: Page, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, look in {
        "dashboard": (1200, 1450),
        "dashboard-dark": (1200, 1450, "dark"),
        "dashboard-phone": (390, 1600),
    }.items():
        page.look(*look)
        page.wait(lambda width=look[0]: page.driver.execute_script(FITS, width))
        picture = page.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "webp", "quality": 80})
        (folder / f"{name}.webp").write_bytes(base64.b64decode(picture["data"]))
    page.look(1200, 1500)


def test_the_page_shows_what_status_says_scales_and_stops_the_job(job, page, tmp_path, capsys):
    process, address = job
    folder = tmp_path / "job"

    page.driver.get(address.partition("#")[0])
    page.wait_for_text("#trouble", "key is missing or wrong")
    page.driver.get(address)
    page.driver.refresh()
    page.wait(lambda: page.text("#phase") == "training" and page.value("version") >= 60)
    process.kill("worker", 1)
    page.wait_for_text("#events", r"worker 1 .* was lost: killed by SIGKILL")
    page.wait_for_text("#tasks-now", "[12] taken over")
    page.wait(
        lambda: status(folder, capsys)["version"] >= GATE_AT and page.text("#workers-now").startswith("2 of 2 up")
    )
    page.wait_for_text("#events", r"checkpoint is written")

    page.wait(lambda: shows(page, status(folder, capsys)))
    page.click("#count")
    page.wait_for_text("#tables tr td:nth-child(5)", r"\d+ \(\d+")
    page.wait_for_text("#log", "Started: ")
    take_pictures(page, Path(os.environ.get("ELASTICCB_SCREENSHOTS") or tmp_path / "pictures"))

    page.click("#scale")
    page.driver.find_element(By.ID, "scale-workers").clear()
    page.driver.find_element(By.ID, "scale-workers").send_keys("3")
    page.click("#scale-dialog .main")
    page.wait_for_text("#toast", r"now has 3 workers \(was 2\)")
    page.wait_for_text("#workers-now", "3 of 3 up")

    errors = [entry for entry in page.driver.get_log("browser") if "/api/stream" not in entry["message"]]
    assert not errors  # but that of the stream without a key

    (tmp_path / "go_on").touch()
    page.click("#stop")
    page.click("#stop-dialog .danger")
    assert process.finish() == ExitCode.INTERRUPTED
    page.wait_for_text("#phase", "interrupted")
    page.wait_for_text("#trouble", "The job has ended, and so has its dashboard")

    ended = JobView(folder)
    ended.look()
    assert (ended.over, ended.trouble, ended.status["phase"]) == (True, "", "interrupted")
    kept = History()
    kept.extend(ended.everything()["past"])
    assert any(run[0] == 1 and run[4] == "back" for _, run in kept.after(0)["tasks"])
    assert {kind for _, (_, kind, _) in kept.after(0)["events"]} >= {"loss", "joined", "checkpoint", "note"}
