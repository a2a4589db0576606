"""`kit watch` on a terminal: what its view shows, its keys, and the page that it writes."""

import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from kit.cli import main
from kit.figures.charts import DrawnLine, Line
from kit.watch import terminal
from kit.watch.board import watch
from kit.watch.braille import text_chart
from tests.conftest import until
from tests.watch.test_board import cut_exit_record, line, log, steps
from tests.watch.test_damaged_logs import record, row, write_log


def gpus(folder, nodes=("a", "b")):
    """Two minutes of nodes of eight GPUs, of which GPU 5 of the last one is slow."""
    (folder / "nodes").mkdir(exist_ok=True)
    for node in nodes:
        changed = {"util": 41.0, "power_w": 260.0} if node == nodes[-1] else {}
        lines = [line(node, time.time() - 120 + second, 8, **changed) for second in range(120)]
        (folder / "nodes" / f"{node}.jsonl").write_text("\n".join(lines) + "\n")


def shown(board, width, height, place=0, top=0):
    """The view as text."""
    console = Console(width=width, height=height, color_system=None, file=io.StringIO(), record=True)
    console.print(terminal.screen(board, place, top, width, height))
    return console.export_text()


@pytest.fixture
def board(tmp_path):
    log(tmp_path, steps(1, 60))
    gpus(tmp_path)
    board = watch(tmp_path)
    board.status()
    yield board
    board.finish()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60), (40, 12)])
def test_the_view_fits_the_terminal_and_has_run_loss_and_gpus(board, width, height):
    text = shown(board, width, height)
    rows = text.rstrip("\n").split("\n")
    assert len(rows) <= height
    assert max(map(len, rows)) <= width
    assert board.runs[0].title in rows[0]
    if height > 12:
        assert "Loss" in text
        assert "different: b GPU 5" in text


def test_every_gpu_has_a_row_with_its_readings_where_there_is_room(board):
    rows = [row for row in shown(board, 120, 60).split("\n") if " GPU " in row and "%" in row]
    assert [row.split(" ")[0] + row.split(" ")[2] for row in rows] == [
        f"{node}{gpu}" for node in "ab" for gpu in range(8)
    ]
    assert "41 %" in rows[13]
    assert "98 %" in rows[0]
    assert "60.5 of 80 GiB" in rows[0]
    assert "520 W" in rows[0]


def test_in_a_low_terminal_every_gpu_is_a_block_and_the_rows_scroll(board):
    text = shown(board, 80, 24)
    assert (
        "a \u2588\u2588\u2588\u2588\u2588\u2588\u2588\u2588  b \u2588\u2588\u2588\u2588\u2588\u2584\u2588\u2588" in text
    )
    assert "a GPU 0 " in text
    assert "b GPU 7 " not in text
    assert "b GPU 7 " in shown(board, 80, 24, top=100)


def test_a_text_chart_is_a_line_from_its_first_to_its_last_value():
    x = np.arange(101.0)
    chart = text_chart([DrawnLine(Line("", x, x), x, x, "", "")], 60, 12)
    drawn = np.argwhere(chart.canvas.line == 0)
    assert drawn[drawn[:, 0].argmax()].tolist() == [9, 0]
    assert chart.canvas.line[0, -1] == 0
    assert next(label for label in chart.labels if label) == "100"
    assert chart.x_numbers.split() == ["0", "20", "40", "60", "80", "100"]


def test_values_that_are_not_finite_are_gaps_and_nothing_else_is_no_chart():
    x = np.arange(3.0)
    assert text_chart([], 40, 10) is None
    assert text_chart([DrawnLine(Line("", x, x), x, np.full(3, np.nan), "", "")], 40, 10) is None
    chart = text_chart([DrawnLine(Line("", x, x), x, np.array([1.0, np.nan, 1.0]), "", "")], 40, 10)
    assert (chart.canvas.line == 0).sum() == 1  # no way leads through the gap, and a single last point has none


class Terminal:
    """A command on a pseudo-terminal of 100 by 30 characters."""

    def __init__(self, *words):
        import fcntl
        import struct
        import termios

        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        command = [sys.executable, "-m", "kit.cli", "watch", *map(str, words)]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self.text = ""

    def read(self):
        """All that was printed so far."""
        while select.select([self.master], [], [], 0.2)[0]:
            try:
                self.text += os.read(self.master, 65536).decode(errors="replace")
            except OSError:  # the program has ended
                break
        return self.text

    def press(self, key):
        self.text = ""
        os.write(self.master, key.encode())


def test_keys_switch_runs_and_leave(tmp_path):
    for name in ("one", "two"):
        log(tmp_path / name, steps(1, 6))
        cut_exit_record(tmp_path / name)
    started = Terminal(tmp_path / "one", tmp_path / "two", "--html", tmp_path / "page.html")
    until(lambda: "run 1 of 2" in started.read())
    until((tmp_path / "page.html").exists)
    assert 'http-equiv="refresh"' in (tmp_path / "page.html").read_text()
    started.press("\x1b[C")
    until(lambda: "run 2 of 2" in started.read())
    started.press("q")
    assert started.process.wait(30) == 0
    assert "\x1b[?1049l" in started.read()  # the screen is as it was
    os.close(started.master)


def test_in_a_pipe_the_command_prints_text_and_renews_its_page_until_the_run_ends(tmp_path):
    log(tmp_path, steps(1, 6))
    path = cut_exit_record(tmp_path)
    page = tmp_path / "page.html"
    command = [sys.executable, "-m", "kit.cli", "watch", str(tmp_path), "--html", str(page)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    until(page.exists)
    first = page.stat().st_mtime
    until(lambda: page.stat().st_mtime > first)
    long_ago = time.time() - 11 * 60
    os.utime(path, (long_ago, long_ago))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "\x1b" not in out + err
    assert out.startswith("stale ")
    assert 'http-equiv="refresh"' not in page.read_text()


def test_once_prints_every_gpu_of_every_node(tmp_path):
    log(tmp_path, steps(1, 6))
    gpus(tmp_path)
    command = [sys.executable, "-m", "kit.cli", "watch", str(tmp_path), "--once"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(tmp_path)).stdout
    assert next(row for row in out.splitlines() if row.startswith("b GPU 5")).split()[-4:] == [
        "41",
        "60.5",
        "260",
        "60",
    ]
    assert sum(" GPU " in row for row in out.splitlines()) == 16


def test_once_reads_to_the_end_behind_a_record_that_is_longer_than_one_look(tmp_path, capsys):
    first, last = (row({b"train/global_step": step, b"train/loss": b"2.0"}) for step in (b"1", b"9"))
    write_log(tmp_path / "run-x.wandb", first, record(99, bytes(5_000_000)), last)
    assert main(["watch", str(tmp_path), "--once"]) == 0
    said = capsys.readouterr().out
    assert "step 9" in said and "still to read" not in said
