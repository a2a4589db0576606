"""Every notebook, headless on a live Slurm: it ends well, and what it leaves is small, offline and without a secret."""

import html
import io
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from kit.config.recipe import Recipe
from kit.notebook.demo import NOTEBOOKS
from kit.notebook.execute import execute
from kit.notebook.redact import hide, secret_values
from kit.slurm.run import Run
from tests.conftest import REPOSITORY
from tests.golden.make import COPIES, SANITIZER

GOLDEN = REPOSITORY / "tests" / "golden"
NAMES = [p.stem for p in sorted(NOTEBOOKS.glob("*.ipynb"))]
DEMO = """
import sys
from pathlib import Path
from kit.notebook.demo import demo
print(demo(Path('demo'), sys.argv[1]))
"""
SECRETS = {name: f"{name.lower()}-{secrets.token_hex(12)}" for name in ("WANDB_API_KEY", "HF_TOKEN", "SITE_PASSWORD")}


def outputs(path):
    return [o for cell in nbformat.read(path, as_version=4).cells for o in cell.get("outputs", [])]


@pytest.fixture(scope="module")
def tiny_recipe(tiny, tmp_path_factory):
    """The demo's job with a model of two layers, as a file."""
    sizes = {"data.seq_len": 128, "schedule.max_steps": 8, "schedule.eval_every": 4, "schedule.save_every": 4}
    source = REPOSITORY / "env" / "data" / "sample_trees.jsonl"
    recipe = Recipe.load("demo", **{"name": "tiny", "model.name": str(tiny), "data.source": str(source), **sizes})
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(recipe.toml())
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """What a user's shell has: secrets among it, and no settings of this one."""
    home = tmp_path_factory.mktemp("home")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "WANDB", "KIT_"))}
    places = {"XDG_STATE_HOME": str(home / "state"), "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"}
    return kept | places | SECRETS | {"PYTHONPATH": str(REPOSITORY)}


@pytest.fixture(scope="module")
def demo(slurm_root, tiny_recipe, environment, tmp_path_factory):
    """All notebooks executed by the demo, once for this module, with one run on Slurm among them; call it to repeat."""
    folder = tmp_path_factory.mktemp("notebooks")

    def again():
        command = [sys.executable, "-c", DEMO, tiny_recipe]
        variables = environment | {"SLURM_CONF": str(slurm_root / "slurm.conf")}
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=850)
        with (folder / "demo.log").open("a") as log:
            log.write(done.stdout + done.stderr)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    again()
    again.folder = folder
    return again


@pytest.fixture(params=NAMES)
def executed(demo, request):
    return demo.folder / "demo" / f"{request.param}.ipynb"


@pytest.mark.slow
@pytest.mark.slurm
def test_each_notebook_completes_without_warnings_and_is_small(executed):
    notebook = nbformat.read(executed, as_version=4)
    assert {c.metadata.papermill.status for c in notebook.cells} == {"completed"}
    counts = [c.execution_count for c in notebook.cells if c.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert [o for o in outputs(executed) if o.get("name") == "stderr"] == []
    assert executed.stat().st_size < 200_000
    assert "widgets" not in notebook.metadata


@pytest.mark.slow
@pytest.mark.slurm
def test_the_demo_run_was_a_slurm_job(demo, live_slurm):
    run = Run(next((demo.folder / "demo" / "runs").glob("tiny-*")))
    assert run.job_id.isdigit() and run.state.state == "COMPLETED"


@pytest.mark.slow
@pytest.mark.slurm
def test_a_second_demo_skips_what_is_done(demo):
    runs = len(list((demo.folder / "demo" / "runs").iterdir()))
    assert demo().count("done before, skipped") == len(NAMES)
    assert len(list((demo.folder / "demo" / "runs").iterdir())) == runs


@pytest.mark.slow
@pytest.mark.slurm
def test_no_secret_of_the_environment_is_in_anything_that_was_written(demo, environment):
    written = [
        p for place in (demo.folder, Path(environment["XDG_STATE_HOME"])) for p in place.rglob("*") if p.is_file()
    ]
    assert {p.suffix for p in written} >= {".ipynb", ".wandb", ".sbatch", ".json", ".log", ".out"}
    assert [
        (p.name, name) for p in written for name, value in SECRETS.items() if value.encode() in p.read_bytes()
    ] == []


class Fetched(HTMLParser):
    """The addresses that a page's outputs would make a browser fetch."""

    def __init__(self, text):
        super().__init__()
        self.found = re.findall(r"""(?:url\(|@import)\s*["']?\s*((?:https?:)?//[^"')\s]+)""", text)
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        names = () if tag == "a" else ("src", "srcset", "href", "xlink:href", "data", "poster")
        self.found += [v for k, v in attributes if k in names and re.match(r"\s*(https?:)?//", v or "")]


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<img src="https://a.b/c.png">', 1),
        ('<script src="//cdn.x/y.js"></script><link href="http://x/y.css">', 2),
        ("<style>@import 'https://x/y.css'; p { background: url(https://x/y.png) }</style>", 2),
        ('<svg xmlns="http://www.w3.org/2000/svg"><path d="M0"/></svg><a href="https://x">read on</a>', 0),
        ('<img src="data:image/png;base64,AAAA">', 0),
    ],
)
def test_addresses_in_a_page_are_detected(page, found):
    assert len(Fetched(page).found) == found


@pytest.mark.slow
@pytest.mark.slurm
def test_outputs_load_nothing_from_the_network(executed):
    texts = [text for o in outputs(executed) for text in o.get("data", {}).values() if isinstance(text, str)]
    assert [address for text in texts for address in Fetched(text).found] == []


PICTURES = ".jp-OutputArea svg, .jp-OutputArea img"
SHOWN = {"00_check_cluster": 1, "01_prepare_data": 1, "02_explore_memory": 4, "04_watch_run": 1, "06_compare_runs": 1}


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not here: pip install playwright")
    if not (chromium := shutil.which("chromium")):
        pytest.skip("no Chromium here: bash env/packages chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


A4 = round((210 - 20) / 25.4 * 96)  # CSS pixels between margins of 10 mm


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.browser
# Playwright's pipes to its driver and Chromium are closed by the collector at its end.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_figures_are_visible_without_javascript_or_network(demo, browser, tmp_path):
    from nbconvert import HTMLExporter

    context = browser.new_context(java_script_enabled=False, offline=True, viewport={"width": 1280, "height": 900})
    asked, shown = [], {}
    for name in NAMES:
        page_file = tmp_path / f"{name}.html"
        page_file.write_text(HTMLExporter().from_filename(str(demo.folder / "demo" / f"{name}.ipynb"))[0])
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_file.as_uri())
        width = page.locator(".jp-OutputArea").first.bounding_box()["width"]
        boxes = [picture.bounding_box() for picture in page.locator(PICTURES).all()]
        assert all(b and b["height"] > 50 and 100 < b["width"] <= width for b in boxes), (
            f"{name}: hidden or cut: {boxes}"
        )
        shown[name] = len(boxes)
        page.emulate_media(media="print")
        page.set_viewport_size({"width": A4, "height": 1000})
        boxes = [table.bounding_box() for table in page.locator(".jp-OutputArea table").all()]
        assert all(box["x"] + box["width"] <= A4 for box in boxes), f"{name}: a table is cut on paper"
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert all(shown[name] >= count for name, count in SHOWN.items()), shown


def test_a_parameter_named_token_is_an_error_and_its_value_is_not_written(tmp_path):
    import papermill
    from papermill.engines import papermill_engines

    from kit.errors import InputError
    from kit.notebook.execute import KitEngine

    cell = new_code_cell('token: str = ""  # a secret', metadata={"tags": ["parameters"]})
    spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=[cell, new_code_cell("print(token)")], metadata=spec), tmp_path / "in.ipynb")
    value = SECRETS["HF_TOKEN"]
    command = [sys.executable, "-m", "kit.cli", "run", "in.ipynb", "out.ipynb", "-p", f"token={value}"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True)
    assert done.returncode == 2 and "looks like a secret" in done.stderr
    assert value not in done.stdout + done.stderr
    papermill_engines.register("kit", KitEngine)
    with pytest.raises(InputError, match="looks like a secret") as refused:
        papermill.execute_notebook("in.ipynb", "out.ipynb", {"token": value}, engine_name="kit", log_output=True)
    assert value not in str(refused.value)
    assert [p for p in tmp_path.rglob("*") if p.is_file() and value.encode() in p.read_bytes()] == []


def test_a_secret_is_hidden_in_every_spelling_and_place(monkeypatch):
    lines = ["pass&word<'1\"", "second line \\ of it"]
    monkeypatch.setenv("DB_PASSWD", "\n".join(lines))
    hidden = secret_values()
    for line in lines:
        for text in (line, html.escape(line), repr(line), json.dumps(line), quote(line, safe=""), quote(line)):
            found = hide({"x": [f"<p>{text}</p>"], text: 1}, hidden)
            assert str(found).count("[hidden]") == 2, text
            assert not [word for word in ("pass", "word", "second", "line") if word in str(found)]
    assert hide("a tokenizer's keyboard", hidden) == "a tokenizer's keyboard"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "cluster"),
    [
        ("llama405b-oasst2", "two-node-pcie"),  # a published run for which the forecast finds no setting with a margin
        ("llama405b-oasst2", "local"),  # two CPU ranks
        ("cannot-fit", "two-node-pcie"),
    ],
)
def test_the_forecast_notebook_completes_where_nothing_fits(recipe, cluster, tmp_path):
    """No error ends it: notebook 02 is where people look for a way out."""
    full = Recipe.load("llama405b-oasst2", **{"name": "cannot-fit", "tuning.method": "full"})
    (tmp_path / "cannot-fit.toml").write_text(full.toml())
    given = {"recipe": f"{recipe}.toml" if recipe == "cannot-fit" else recipe, "cluster": cluster}
    source, out = NOTEBOOKS / "02_explore_memory.ipynb", tmp_path / "02.ipynb"
    execute(source, out, given, cwd=tmp_path, stream=io.StringIO())
    assert {c.metadata.papermill.status for c in nbformat.read(out, as_version=4).cells} == {"completed"}


# nbval, as a person calls it: pytest --nbval --nbval-sanitize-with tests/nbval-sanitize.cfg tests/golden


def nbval(how, *paths):
    """Its report on the notebooks, which run in their own folders, with warnings as errors as everywhere here."""
    command = [
        sys.executable, "-m", "pytest", "-c", REPOSITORY / "pyproject.toml", "--rootdir", ".", "-p", "no:cacheprovider",
        how, "--nbval-current-env", "--nbval-cell-timeout=120", f"--nbval-sanitize-with={SANITIZER}", *paths,
    ]  # fmt: skip
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)


@pytest.mark.slow
def test_golden_copies_are_reproduced(smollm2, tmp_path):
    for path in GOLDEN.glob("*.ipynb"):
        shutil.copy(path, tmp_path)
    done = nbval("--nbval", *tmp_path.glob("*.ipynb"))
    assert done.returncode == 0, f"{done.stdout}\nWhere the change is meant: python tests/golden/make.py"


@pytest.mark.parametrize("name", COPIES)
def test_golden_copies_are_small_and_current_and_name_no_machine(name):
    path = GOLDEN / f"{name}.ipynb"
    golden, source = (nbformat.read(p, as_version=4) for p in (path, NOTEBOOKS / f"{name}.ipynb"))
    cells = [
        c for c in golden.cells if c.cell_type == "code" and "injected-parameters" not in c.metadata.get("tags", [])
    ]
    code = [c.source for c in source.cells if c.cell_type == "code"]
    assert [c.source for c in cells] == code, "run tests/golden/make.py"
    assert path.stat().st_size < 100_000
    assert set(golden.metadata) == {"kernelspec", "language_info"}
    assert (
        all(c.execution_count for c in cells) and sum(bool(c.outputs) for c in cells) >= len(cells) - 2
    )  # parameters, form
    assert re.findall(r'[^\w<"!]/(?:\w+/)+', json.dumps([c.get("outputs") for c in golden.cells])) == []


def test_golden_copies_exist_for_these_and_no_others():
    assert sorted(COPIES) == sorted(p.stem for p in GOLDEN.glob("*.ipynb"))


def test_nbval_ignores_only_paths_times_and_ids(tmp_path):
    """A stored output that differs only in these passes; one whose loss differs by a digit fails."""
    same = "import datetime, os, uuid\nprint(os.getcwd() + '/runs/x', datetime.datetime.now(), uuid.uuid4(), object())"
    before = (
        "/else/where/runs/x 2020-01-01 10:00:00.123456 00000000-1111-2222-3333-444444444444 <object object at 0x7f00>\n"
    )
    cells = [
        new_code_cell(source, execution_count=n, outputs=[new_output("stream", name="stdout", text=text)])
        for n, (source, text) in enumerate([(same, before), ("print('loss', 2.3417)", "loss 2.3418\n")], 1)
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "pair.ipynb")
    done = nbval("--nbval", tmp_path / "pair.ipynb")
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout
