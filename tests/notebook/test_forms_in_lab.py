"""The form, the Launch button and the buttons of a run, clicked in a real JupyterLab in a headless Chromium."""

import shutil

import pytest

from kit.config.recipe import Recipe
from kit.notebook.demo import NOTEBOOKS
from kit.slurm.run import Run
from tests.conftest import tiny_recipe, until
from tests.watch.test_browser import CHROMIUM, Lab, begin, playwright

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: bash env/packages chromium"),
    # Playwright's pipes to its driver and Chromium are closed by the collector at its end
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-quic"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", str(folder / "state"))
            patch.setenv("SLURM_CONF", str(folder / "no-slurm.conf"))
            lab = Lab(folder, browser)
        yield lab
        browser.close()
        lab.close()


def prompt(page, cell):
    return page.locator(".jp-CodeCell").nth(cell).locator(".jp-InputPrompt").inner_text()


def click(page, label):
    page.locator(f".jp-OutputArea button:visible:text-is('{label}')").first.click()


def ran(page, cell):
    until(lambda: prompt(page, cell).strip("[]:* ").isdigit(), seconds=180)


@pytest.fixture
def page(lab, tiny):
    """Notebook 03, with its form shown, and tiny.toml in its folder; 400 steps, so that it can be cancelled."""
    shutil.rmtree(lab.folder / "runs", ignore_errors=True)
    recipe = tiny_recipe(tiny).override(**{"schedule.max_steps": 400, "schedule.save_every": 0})
    (lab.folder / "tiny.toml").write_text(recipe.toml())
    shutil.copy(NOTEBOOKS / "03_launch_run.ipynb", lab.folder)
    page = lab.show("03_launch_run", height=2600)
    for cell in (0, 1):
        begin(page, cell)
    page.wait_for_selector(".kit-form")
    fields = page.locator(".kit-form input[type=text]")
    fields.nth(0).fill("tiny.toml")
    fields.nth(2).fill("1")
    fields.nth(2).press("Tab")
    yield page
    page.close()


def test_nothing_is_submitted_before_launch_and_a_run_is_cancelled_after_a_second_click(lab, page):
    page.locator(".jp-CodeCell .cm-content").nth(5).click()  # Run begins below the form, wherever the cursor is
    click(page, "Run")
    ran(page, 5)
    assert prompt(page, 1) == "[2]:" and prompt(page, 2) == "[3]:"
    assert "tiny: lora" in page.locator(".jp-CodeCell").nth(2).inner_text()
    assert not (lab.folder / "runs").exists()
    before = prompt(page, 4)
    click(page, "Launch")
    page.locator(".jp-OutputArea button:visible:text-is('Cancel')").wait_for()
    until(lambda: prompt(page, 4) != before, seconds=180)  # the cells below run again
    run = Run(next((lab.folder / "runs").iterdir()))
    click(page, "Tail")
    page.wait_for_selector("text=/== .*(out|log)/")
    click(page, "Watch")
    page.wait_for_selector(".kit-board svg")
    click(page, "Cancel")
    assert not run.state.ended
    click(page, "Cancel: yes")
    until(lambda: run.state.ended, seconds=120)
    assert run.state.state == "CANCELLED"
    click(page, "State")
    page.wait_for_selector(".jp-OutputArea .jp-OutputArea >> text=CANCELLED")
    assert len(list((lab.folder / "runs").iterdir())) == 1


def test_a_value_of_another_type_is_refused_in_the_form(page):
    page.locator(".kit-form input[type=text]").nth(2).fill("soon")
    page.locator(".kit-form input[type=text]").nth(2).press("Tab")
    click(page, "Run")
    page.wait_for_selector(".kit-form >> text=tail_s is 'soon'; it must be a number")
    assert prompt(page, 2) == "[ ]:"


def test_a_choice_in_the_explorer_changes_its_verdict_and_the_cells_below(lab):
    shutil.copy(NOTEBOOKS / "02_explore_memory.ipynb", lab.folder)
    page = lab.show("02_explore_memory", height=5200)
    for cell in (0, 1):
        begin(page, cell)
    page.wait_for_selector(".kit-form")
    for index, name in enumerate(("llama8b", "h100-8x8")):
        page.locator(".kit-form input[type=text]").nth(index).fill(name)
        page.locator(".kit-form input[type=text]").nth(index).press("Tab")
    click(page, "Run")
    page.wait_for_selector(".kit-verdict[data-mark=good] >> text=Fits")
    ran(page, 5)
    before = page.locator(".jp-CodeCell").nth(5).inner_text()
    labels = page.locator(".kit-explorer .widget-dropdown", has_text="Strategy")
    labels.locator("select").select_option(label="DDP")
    model = page.locator(".kit-explorer input[type=text]").first
    model.fill("meta-llama/Llama-3.1-70B")
    model.press("Tab")
    page.wait_for_selector(".kit-verdict[data-mark=bad] >> text=Does not fit")
    page.wait_for_selector("text=-s model.name=meta-llama/Llama-3.1-70B -s parallel.strategy=ddp")
    until(lambda: page.locator(".jp-CodeCell").nth(5).inner_text() != before, seconds=120)
    click(page, "Use these settings")
    page.wait_for_selector("text=wrote llama8b-explored.toml")
    written = Recipe.load(lab.folder / "llama8b-explored.toml")
    assert (written.model.name, written.parallel.strategy) == ("meta-llama/Llama-3.1-70B", "ddp")
    page.close()
