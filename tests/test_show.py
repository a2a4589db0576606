"""Tables and results in a pipe, on a terminal and in a notebook."""

import io

import nbformat
import pytest
from nbclient import NotebookClient
from rich.console import Console

from kit import figures
from kit.show import Gigabytes, Hours, Result, Table, format_cell, format_count, format_duration
from tests.conftest import REPOSITORY

TABLE = Table.of([{"run": "a<b>", "loss": 2.5}, {"run": "b", "steps": 12_000}], marks={1: "bad"})


class Example(Result):
    def as_dict(self):
        return {"answer": 42}

    def parts(self):
        return ["a line", TABLE, figures.bars("Time", "s", {"all": {"train": 1.0}})]


def test_text_is_aligned_and_has_no_markup():
    assert str(TABLE) == "run   loss   steps\na<b>   2.5\nb           12,000"


def test_html_is_escaped_and_marks_rows():
    page = TABLE.html()
    assert "a&lt;b&gt;" in page and "<b>" not in page
    assert page.count('<tr style="color:') == 1


def test_a_notebook_gets_html_with_pictures_and_plain_text():
    bundle = Example()._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert "<img" in bundle["text/html"] and "<svg" not in bundle["text/html"]  # untrusted notebooks drop bare SVG
    assert bundle["text/plain"].startswith("a line\nrun ")


def test_a_terminal_gets_a_table_and_brackets_survive():
    stream = io.StringIO()
    Console(file=stream, width=60).print(Table(["name"], [["[red]x[/red]"]]))
    assert "[red]x[/red]" in stream.getvalue()


def test_a_terminal_that_is_too_narrow_for_the_columns_gets_a_paragraph_for_each_row():
    table = Table(["strategy", "checkpointing", "why"], [["fsdp2", True, "communication"], ["ddp", None, "fast"]])
    wide, narrow = io.StringIO(), io.StringIO()
    Console(file=wide, width=42).print(table)
    Console(file=narrow, width=41).print(table)
    assert "fsdp2      yes             communication" in wide.getvalue()
    assert "checkpointing yes; why" in narrow.getvalue() and "ddp  why fast" in narrow.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0.5, "0.5 s"), (59, "59 s"), (61, "1 min 1 s"), (6782.74, "1 h 53 min"),
                                               (3600, "1 h"), (180_000, "2 d 2 h")])  # fmt: skip
def test_durations_are_written_for_people(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(9_999, "9,999"), (14_336, "14.3 k"), (7_372_800, "7.37 M"),
                                              (70_553_706_496, "70.6 B"), (405.8e9, "406 B")])  # fmt: skip
def test_large_counts_are_written_for_people(number, text):
    assert format_count(number) == text


@pytest.mark.parametrize(("value", "text"), [(None, ""), (True, "yes"), (12_345, "12,345"), (0.123456, "0.123"),
                                             (48_000.5, "48,000"), ("x", "x"), (Hours(1.884), "1 h 53 min"),
                                             (Gigabytes(5.73e-5), "57.3 kB"), (Gigabytes(812), "812 GB")])  # fmt: skip
def test_values_are_written_for_people(value, text):
    assert format_cell(value) == text


def test_a_notebook_shows_each_figure_of_a_result_in_an_output_that_plotly_can_draw(tmp_path):
    code = "from tests.test_show import Example\nExample()"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(REPOSITORY)}}).execute()
    text, figure = notebook.cells[0].outputs
    assert set(text.data) == {"text/html", "text/plain"} and "<img" not in text.data["text/html"]
    assert set(figure.data) == {"application/vnd.plotly.v1+json", "image/png", "text/plain"}
