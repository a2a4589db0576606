"""The board in a real JupyterLab in a headless Chromium, of a run that the real wandb SDK logs meanwhile."""

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from kit.watch.metrics import Metrics
from tests.conftest import until
from tests.test_figures import FIGURES
from tests.watch.test_board import line, log, steps

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: bash env/packages chromium"),
    # Playwright's pipes to its driver and Chromium are closed by the collector at its end
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
REPOSITORY = Path(__file__).resolve().parents[2]
WRITER = """
import math, os, sys, time, wandb
run = wandb.init(project="p", id="live", mode="offline", dir=sys.argv[1])
for step in range(1, 100_000):
    loss = math.nan if os.path.exists(sys.argv[1] + "/nan") else 3 / step**0.3
    run.log({"train/loss": loss, "train/tokens_per_s": 9e3, "train/global_step": step, "t": time.time()})
    time.sleep(0.1)
"""
WATCH = "from kit.watch.board import watch\nboard = watch({!r})\nboard"
BUSY = "import time\nend = time.time() + 20\nwhile time.time() < end:\n    pass"
# The step that the board shows, with the time at which it was first seen there.
SPY = """() => { window.seen = []; let last = 0; setInterval(() => {
  const found = /step ([\\d,]+)/.exec(document.querySelector(".kit-board .status")?.textContent);
  const step = found ? +found[1].replaceAll(",", "") : 0;
  if (step > last) { last = step; window.seen.push([step, Date.now() / 1000]); }
}, 20); }"""
BEHIND = """step => {
  const found = /step ([\\d,]+)/.exec(document.querySelector(".kit-board .status")?.textContent);
  return found && +found[1].replaceAll(",", "") > step; }"""
PICTURE_HIDDEN = """() => {
  const output = document.querySelector(".kit-board")?.closest(".jp-OutputArea-child");
  return output && getComputedStyle(output.previousElementSibling).display === "none"; }"""
BACKGROUND = "getComputedStyle(document.querySelector('.kit-board')).backgroundColor"
FRAMES = """() => new Promise(done => { const gaps = []; let last = performance.now(), end = last + 8000;
  const frame = now => { gaps.push(now - last); last = now; now < end ? requestAnimationFrame(frame) : done(gaps); };
  requestAnimationFrame(frame); })"""


class Lab:
    """A JupyterLab server on a free port of this machine, and a browser."""

    def __init__(self, folder, browser):
        self.folder, self.context = folder, browser.new_context()
        places = {f"JUPYTER_{kind}_DIR": str(folder / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
        env = os.environ | places | {"PYTHONPATH": str(REPOSITORY), "IPYTHONDIR": str(folder / "ipython")}
        self.settings = folder / "CONFIG" / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
        self.settings.mkdir(parents=True)
        (self.settings / "notification.jupyterlab-settings").write_text(
            '{"fetchNews": "false", "checkForUpdates": false}'
        )
        here = ["--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root", f"--ServerApp.root_dir={folder}"]
        with (folder / "lab.log").open("w") as log:
            command = [sys.executable, "-m", "jupyterlab", *here]
            self.server = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)
        while not (server_info := list((folder / "RUNTIME").glob("jpserver-*.json"))):
            assert self.server.poll() is None, (folder / "lab.log").read_text()
            time.sleep(0.1)
        self.server_info = json.loads(server_info[0].read_text())

    def open(self, name, *cells, height=1300, width=1250):
        """A page with a new notebook of these cells."""
        made = [nbformat.v4.new_code_cell(cell) for cell in cells]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=kernel), self.folder / f"{name}.ipynb")
        return self.show(name, width, height)

    def show(self, name, width=1250, height=1300):
        """A page with a notebook of the folder."""
        page = self.context.new_page()
        page.set_default_timeout(120_000)  # the machine may be busy
        page.set_viewport_size({"width": width, "height": height})
        page.goto(f"{self.server_info['url']}doc/workspaces/{name}/tree/{name}.ipynb?token={self.server_info['token']}")
        page.wait_for_selector("text=| Idle")
        return page

    def choose_theme(self, theme):
        """For pages that are opened from now on."""
        (self.settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))

    def close(self):
        self.server.terminate()
        self.server.wait(20)


def begin(page, cell):
    """Run a cell, by its place among the code cells."""
    page.locator(".jp-CodeCell .cm-content").nth(cell).click()
    page.keyboard.press("Control+Enter")


def write(folder):
    folder.mkdir()
    env = os.environ | {"WANDB_SILENT": "true", "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1"}
    return subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], env=env)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-quic"])
        lab = Lab(folder, browser)
        yield lab
        browser.close()
        lab.close()


@pytest.fixture(scope="module")
def run(lab):
    """A folder in which a run is logged for as long as these tests last."""
    writer = write(lab.folder / "run")
    yield lab.folder / "run"
    writer.kill()
    writer.wait()


def shown_step(page):
    page.wait_for_function(BEHIND, arg=0)
    status = page.locator(".kit-board .status").first.inner_text()
    return int(status.partition("step ")[2].split(" ")[0].replace(",", ""))


def ticks(page, panel="Loss"):
    return page.locator(f".kit-board svg[aria-label='{panel}'] .kit-x").all_text_contents()


def drag(page, panel="Loss"):
    """Zoom into the middle of a panel; the numbers of its x axis then."""
    page.wait_for_function(PICTURE_HIDDEN)  # the board moves up then
    box = page.locator(f".kit-board svg[aria-label='{panel}']").bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.6 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.6 * box["height"], steps=5)
    page.mouse.up()
    page.wait_for_selector(".kit-board .kit-all")
    return ticks(page, panel)


def seconds_to_visible(page, folder, watched):
    """Of each row that is logged in so many seconds of watching, how long it took until the board showed it."""
    page.evaluate(SPY)
    page.wait_for_timeout(1000 * watched)
    seen, metrics = page.evaluate("window.seen"), Metrics(folder)
    while len(metrics.series.get("t", [[]])[0]) < seen[-1][0]:
        metrics.poll()
    logged = dict(zip(*metrics.series["t"][:2], strict=True))
    return [at - logged[step] for (before, _), (last, at) in pairwise(seen) for step in range(before + 1, last + 1)]


def test_the_board_shows_new_rows_while_a_cell_runs_and_changes_no_other_cell(lab, run):
    page = lab.open("live", WATCH.format("run"), BUSY, "1 + 1")
    begin(page, 0)
    page.wait_for_selector(".kit-board svg")
    begin(page, 2)
    page.wait_for_selector(".jp-CodeCell >> nth=2 >> text=/\\[2\\]:/")  # the prompt of a cell that has ended
    other = page.locator(".jp-CodeCell").nth(2).inner_text()
    begin(page, 1)
    rows = seconds_to_visible(page, run, 7)
    assert page.locator(".jp-CodeCell").nth(1).locator(".jp-InputPrompt").inner_text() == "[*]:"  # still busy
    page.wait_for_selector(".jp-CodeCell >> nth=1 >> text=/\\[3\\]:/")
    assert [page.locator(".jp-CodeCell").nth(i).locator(".jp-OutputArea-output").count() for i in (1, 2)] == [0, 1]
    assert page.locator(".jp-CodeCell").nth(2).inner_text() == other
    assert len(rows) > 30  # tests.benchmarks.board measures how late they were
    page.close()


def test_zoom_smoothing_and_log_scale_survive_updates_and_a_reload_of_the_page(lab, run):
    page = lab.open("zoom", WATCH.format("run"))
    begin(page, 0)
    before = shown_step(page)
    everything = ticks(page)
    zoomed = drag(page)
    assert zoomed != everything
    page.locator(".kit-board svg[aria-label=Loss] .kit-log").dispatch_event("pointerdown")
    page.locator(".kit-board .smooth").fill("0.9")
    page.wait_for_function(BEHIND, arg=before + 20)
    assert ticks(page) == ticks(page, "Throughput") == zoomed
    page.keyboard.press("Control+s")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')")
    page.reload()
    page.wait_for_selector(".kit-board svg")
    again = shown_step(page)
    assert again > before
    assert ticks(page) == zoomed
    assert page.locator(".kit-board .smooth").input_value() == "0.9"
    assert page.locator(".kit-board svg[aria-label=Loss] .kit-log").get_attribute("font-weight") == "600"
    page.wait_for_function(BEHIND, arg=again)
    page.close()


def test_after_a_kernel_restart_the_board_says_that_it_is_not_updated_and_its_cell_restores_it(lab, run):
    page = lab.open("restart", WATCH.format("run"))
    begin(page, 0)
    before = shown_step(page)
    page.keyboard.press("Escape")
    page.keyboard.press("0")
    page.keyboard.press("0")
    page.locator(".jp-Dialog .jp-mod-accept").click()
    page.wait_for_selector(".kit-board .status >> text=not updated for")
    begin(page, 0)
    page.wait_for_function("() => !document.querySelector('.kit-board .status')?.textContent.includes('not updated')")
    assert shown_step(page) > before
    assert float(ticks(page)[0].replace(",", "")) < shown_step(page) / 2  # all of it, from the beginning
    assert page.locator(".kit-board").count() == 1
    page.close()


def test_an_alert_is_a_notification_and_stays_on_the_board(lab):
    writer = write(lab.folder / "bad")
    try:
        page = lab.open("bad", WATCH.format("bad"))
        begin(page, 0)
        shown_step(page)
        (lab.folder / "bad" / "nan").touch()  # an alert that was there before the board is not a notification
        page.wait_for_selector(".kit-toast >> text=/train.loss is not finite since step \\d+/")
        assert "not finite" in page.locator(".kit-board .warnings").inner_text()
        assert "NaN or infinite" in page.locator(".kit-board svg[aria-label=Loss]").text_content()
        page.close()
    finally:
        writer.kill()
        writer.wait()


def sample(folder, hosts, t):
    """A second of nodes of eight GPUs each."""
    for host in hosts:
        with (folder / "nodes" / f"{host}.jsonl").open("a") as stream:
            stream.write(line(host, t, 8) + "\n")


@contextmanager
def many_gpus(folder):
    """Ten minutes of eight nodes, of which seven go on."""
    hosts, stop = [f"node{i}" for i in range(1, 9)], threading.Event()
    (folder / "wandb").mkdir(parents=True)
    (folder / "nodes").mkdir()
    for second in range(600, 0, -1):
        sample(folder, hosts, time.time() - second)

    def go_on():
        while not stop.wait(1):
            sample(folder, hosts[:-1], time.time())

    feed = threading.Thread(target=go_on)
    feed.start()
    try:
        yield
    finally:
        stop.set()
        feed.join()


def test_64_gpus_of_8_nodes_are_drawn_and_a_silent_node_is_named(lab):
    with many_gpus(lab.folder / "many"):
        page = lab.open("many", WATCH.format("many"))
        begin(page, 0)
        page.wait_for_selector(".kit-board svg[aria-label='GPU power']")
        page.wait_for_selector(".kit-board .status >> text=node8 silent for")
        assert "7 of 8 nodes reporting (node8 silent for" in page.locator(".kit-board .status").inner_text()
        lines = page.locator(".kit-board svg[aria-label='GPU utilisation'] g path[stroke-opacity='0.5']").count()
        assert lines == 64
        page.close()


def click_row(page, row, rows):
    """Click a row of the heat map, by its place."""
    box = page.evaluate("document.querySelector('.kit-board .map image').getBoundingClientRect().toJSON()")
    page.mouse.click(box["x"] + 0.6 * box["width"], box["y"] + (row + 0.5) * box["height"] / rows)


# Top and bottom of each element, at one time: the board draws them anew twice a second.
BOXES = """selector => [...document.querySelectorAll(selector)].map(e => e.getBoundingClientRect())
  .map(box => [box.top, box.bottom])"""


def overlaps(page, selector):
    """How often one text covers another; the box of a text is higher than its letters."""
    ends = sorted(page.evaluate(BOXES, selector))
    return sum(lower[0] < upper[1] - 3 for upper, lower in pairwise(ends))


def test_the_heat_map_shows_64_gpus_without_overlap_and_curves_of_those_that_are_clicked(lab):
    with many_gpus(lab.folder / "map"):
        lab.choose_theme("JupyterLab Dark")
        page = lab.open("map", WATCH.format("map"), height=2400)
        begin(page, 0)
        page.wait_for_selector(".kit-board .map image")
        page.wait_for_function(PICTURE_HIDDEN)
        rows = page.locator(".kit-board .map .kit-row")
        until(lambda: rows.count() >= 16)
        assert overlaps(page, ".kit-board .map .kit-row") == 0
        board, cell = page.locator(".kit-board").bounding_box(), page.locator(".jp-OutputArea").first.bounding_box()
        assert board["width"] > 0.9 * cell["width"]
        assert (
            page.evaluate("getComputedStyle(document.querySelector('.kit-board')).backgroundColor")
            != "rgb(255, 255, 255)"
        )
        page.wait_for_timeout(12_000)  # a newer picture was shown by then
        assert page.evaluate(PICTURE_HIDDEN)
        click_row(page, 3, 64)
        curves = page.locator(".kit-board svg[aria-label='GPU power'] g path[stroke-linejoin]")
        until(lambda: curves.count() == 1)
        assert "node1 GPU 3" in page.locator(".kit-board svg[aria-label='GPU power']").text_content()
        page.locator(".kit-board .reading").select_option("power_w")
        page.wait_for_selector(".kit-board .map >> text=Power of every GPU")
        lab.choose_theme("JupyterLab Light")
        page.close()


# Of a screenshot: how much of it has another colour than its first pixel.
INK = """async data => {
  const image = new Image(); image.src = "data:image/png;base64," + data; await image.decode();
  const canvas = document.createElement("canvas"); canvas.width = image.width; canvas.height = image.height;
  const context = canvas.getContext("2d"); context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  let different = 0;
  for (let i = 0; i < pixels.length; i += 4)
    if ([0, 1, 2].some(c => Math.abs(pixels[i + c] - pixels[c]) > 40)) different++;
  return different / (pixels.length / 4); }"""
EXECUTED = [
    "from tests import test_figures",
    *(f"test_figures.FIGURES[{index}]" for index in range(len(FIGURES))),
    "import kit\nkit.predict(kit.Recipe.load('llama8b'), kit.Cluster.load('h100-8x8'))",
    "board = kit.watch('finished')\nboard.wait()\nboard",
]
SHELL = "echo $HOME and $PATH"  # MathJax takes what is between two dollars for mathematics
TABLE = f"from kit.show import Table\nTable(['script'], [[{SHELL!r}]])"


@pytest.fixture(scope="module")
def executed(lab):
    """A notebook that was executed headless, as a colleague gets it: JupyterLab does not trust it."""
    log(lab.folder / "finished", steps(1, 40))
    cells = [nbformat.v4.new_code_cell(code) for code in [*EXECUTED, TABLE]]
    notebook = nbformat.v4.new_notebook(cells=[*cells, nbformat.v4.new_markdown_cell("$x^2$")])
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(lab.folder)}}).execute(
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)}
    )
    nbformat.write(notebook, lab.folder / "executed.ipynb")
    return lab.folder / "executed.ipynb"


def has_ink(page, element):
    box = element.bounding_box()
    assert box["width"] > 300 and box["height"] > 100
    until(lambda: page.evaluate(INK, base64.b64encode(element.screenshot()).decode()) > 0.002)


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_every_figure_of_an_executed_notebook_is_drawn_in_an_untrusted_jupyterlab(lab, executed, theme):
    assert executed.stat().st_size < 250_000
    lab.choose_theme(theme)
    addresses = []
    lab.context.on("request", lambda request: addresses.append(request.url))
    page = lab.show("executed", height=6000)  # so that all of it is on the page
    page.wait_for_selector(f"body[data-jp-theme-name='{theme}']", state="attached")
    figures = page.locator(".jp-RenderedPlotly, .jp-RenderedImage")
    wanted = sum("image/png" in output.get("data", {}) for output in outputs_of(executed))
    assert wanted == len(EXECUTED) - 1
    until(lambda: figures.count() == wanted)
    for figure in figures.all():
        has_ink(page, figure.locator("img"))
        if "jp-RenderedPlotly" in figure.get_attribute("class"):
            figure.hover()  # from then on it can be zoomed
            figure.locator(".main-svg").first.wait_for()
            has_ink(page, figure)
    page.locator(".jp-MarkdownCell mjx-container").wait_for()  # mathematics are set by now
    assert page.locator(".jp-RenderedHTMLCommon td", has_text=SHELL).count() == 1
    here = (lab.server_info["url"], "data:", "blob:", "ws://127.")
    assert [address for address in addresses if not address.startswith(here)] == []
    page.close()


def outputs_of(path):
    return [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", [])]
