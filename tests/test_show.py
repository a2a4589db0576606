"""Tables and results in a pipe, on a terminal and in a notebook."""

import io

import pytest
from rich.console import Console

from kit import figures
from kit.show import Result, Table, format_cell, format_duration

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


@pytest.mark.parametrize(("seconds", "text"), [(0.5, "0.5 s"), (59, "59 s"), (61, "1 min 1 s"), (6782.74, "1 h 53 min"),
                                               (3600, "1 h"), (180_000, "2 d 2 h")])  # fmt: skip
def test_durations_are_written_for_people(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(None, ""), (True, "yes"), (12_345, "12,345"), (0.123456, "0.123"),
                                             (48_000.5, "48,000"), ("x", "x")])  # fmt: skip
def test_values_are_written_for_people(value, text):
    assert format_cell(value) == text
