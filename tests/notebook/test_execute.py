"""Every way a notebook can end is reported truthfully; parameters have the annotated types; saves are complete."""

import asyncio
import concurrent.futures
import contextlib
import hashlib
import io
import json
import os
import platform
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import nbformat
import numpy
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from kit.errors import InputError
from kit.notebook import client, provenance
from kit.notebook.ending import Ending
from kit.notebook.execute import NotebookFailed, execute
from kit.notebook.parameters import Parameter, check, read_parameters, read_values

ROOT = Path(__file__).resolve().parents[2]
PID = "import os; print('kernel', os.getpid(), flush=True)"


def write(path: Path, *cells: str, parameters: str | None = None, **metadata: Any) -> Path:
    """A notebook whose kernelspec names a kernel that no machine has."""
    tagged = [] if parameters is None else [new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    spec = {"kernelspec": {"name": "not-installed", "display_name": "?", "language": "python"}}
    notebook = new_notebook(
        cells=[new_markdown_cell("# Title"), *tagged, *map(new_code_cell, cells)], metadata=spec | metadata
    )
    nbformat.write(notebook, str(path))
    return path


def statuses(path: Path) -> list[str]:
    cells = json.loads(path.read_text())["cells"]
    return [c["metadata"]["papermill"]["status"] for c in cells if c["cell_type"] == "code"]


def text(path: Path) -> str:
    """What the cells printed."""
    outputs = [o for c in nbformat.read(path, 4).cells for o in c.get("outputs", [])]
    return "".join(o.text for o in outputs if o.output_type == "stream")


def kernel_is_gone(path: Path) -> bool:
    pid = int(text(path).split("kernel ")[1].split()[0])
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


# How a notebook ends


def test_a_notebook_without_errors_is_completed(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.ipynb"
    stream = io.StringIO()
    assert execute(write(tmp_path / "in.ipynb", PID, "1 + 1"), out, stream=stream) == out
    saved = nbformat.read(out, 4)
    assert statuses(out) == ["completed", "completed"]
    assert saved.metadata.papermill.exception is False
    assert saved.metadata.kit.reason is None and saved.metadata.kit.ending == "completed"
    assert saved.metadata.kit.duration == pytest.approx(saved.metadata.papermill.duration, abs=0.5)
    assert stream.getvalue() == text(out)
    assert kernel_is_gone(out)


@pytest.mark.parametrize(
    ("cell", "status", "reason", "ending", "code"),
    [
        (
            "raise ValueError('too many nodes')",
            "failed",
            "The cell raised ValueError(too many nodes).",
            Ending.CELL_FAILED,
            1,
        ),
        ("raise SystemExit('no data')", "failed", "The cell raised SystemExit(no data).", Ending.CELL_FAILED, 1),
        ("import sys; sys.exit(3)", "failed", "The cell raised SystemExit(3).", Ending.CELL_FAILED, 1),
        ("this is no Python", "failed", "The cell raised SyntaxError", Ending.CELL_FAILED, 1),
        (
            "import time; time.sleep(.5); os.kill(os.getpid(), 9)",
            "terminated",
            "SIGKILL",
            Ending.KERNEL_SIGKILLED,
            137,
        ),
        ("import time; time.sleep(0.5); os._exit(0)", "terminated", "exit code 0", Ending.KERNEL_EXITED, 1),
        ("import time; time.sleep(0.5); os._exit(7)", "terminated", "exit code 7", Ending.KERNEL_EXITED, 7),
        ("import time; print('so far'); time.sleep(60)", "terminated", "longer than 2 s", Ending.CELL_TIMED_OUT, 124),
    ],
)
def test_an_incomplete_notebook_records_the_reason(
    tmp_path: Path, cell: str, status: str, reason: str, ending: Ending, code: int
) -> None:
    out = tmp_path / "out.ipynb"
    with pytest.raises(NotebookFailed) as failure:
        execute(write(tmp_path / "in.ipynb", PID, cell, "print('later')"), out, timeout=2, stream=io.StringIO())
    saved = nbformat.read(out, 4)
    assert statuses(out) == ["completed", status, "pending"]
    assert failure.value.outcome.ending is ending and saved.metadata.kit.ending == ending
    assert saved.metadata.papermill.exception is True
    assert saved.metadata.papermill.end_time
    assert reason in saved.metadata.kit.reason
    assert reason in str(failure.value) and str(out) in str(failure.value) and "cell 3" in str(failure.value)
    assert failure.value.exit_code == saved.metadata.kit.exit_code == code
    assert "error" in [o.output_type for o in saved.cells[2].outputs], "the reader of the notebook sees no reason"
    assert "later" not in text(out)
    assert kernel_is_gone(out)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "import sys; sys.exit()", "raise SystemExit"])
def test_a_notebook_that_leaves_with_sys_exit_0_ends_well_and_says_what_did_not_run(tmp_path: Path, leave: str) -> None:
    source = write(tmp_path / "in.ipynb", PID, leave, "print('later')")
    out = execute(source, tmp_path / "out.ipynb", stream=io.StringIO())
    saved = nbformat.read(out, 4)
    assert statuses(out) == ["completed", "completed", "pending"]
    assert saved.metadata.papermill.exception is False and saved.metadata.kit.exit_code == 0
    assert saved.metadata.kit.ending == Ending.LEFT
    assert saved.metadata.kit.reason == "The cell called sys.exit(0), so the cells behind it did not run."
    assert "later" not in text(out) and kernel_is_gone(out)


def test_an_error_while_a_result_is_shown_has_its_name_and_message(tmp_path: Path) -> None:
    class_of_result = "class Broken:\n    def _repr_png_(self): raise OSError('no picture')\nBroken()"
    missing = "from IPython.display import Image\nImage('no-such.png')"
    for cell, words in ((class_of_result, "OSError(no picture)"), (missing, "FileNotFoundError(No such file")):
        with pytest.raises(NotebookFailed) as failure:
            execute(write(tmp_path / "in.ipynb", cell), tmp_path / "out.ipynb", overwrite=True, stream=io.StringIO())
        assert f"The cell raised {words}" in str(failure.value)
        assert words in nbformat.read(tmp_path / "out.ipynb", 4).metadata.kit.reason


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A file: a process that writes its id into it gets no more than 400 MB of memory."""
    for root, limit in (("memory", "memory.limit_in_bytes"), (".", "memory.max")):  # cgroup v1, v2
        group = Path("/sys/fs/cgroup", root, f"kit-test-{os.getpid()}")
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / limit).exists():
                (group / limit).write_text(str(400 << 20))
                yield group / "cgroup.procs"
                group.rmdir()
                return
            group.rmdir()
    pytest.skip("a memory limit takes root and a memory cgroup that can be written")


def test_a_kernel_killed_for_its_memory_is_terminated(tmp_path: Path, small_memory: Path) -> None:
    out = tmp_path / "out.ipynb"
    cells = [PID, f"print(open({str(small_memory)!r}, 'w').write(str(os.getpid())))", "len(bytearray(2000 << 20))", "1"]
    with pytest.raises(NotebookFailed, match="as the system does when memory runs out") as failure:
        execute(write(tmp_path / "in.ipynb", *cells), out, stream=io.StringIO())
    assert failure.value.exit_code == 137
    assert statuses(out) == ["completed", "completed", "terminated", "pending"]


def test_stderr_of_a_crashed_kernel_is_kept(tmp_path: Path) -> None:
    crash = "import ctypes, faulthandler, time; faulthandler.enable(); time.sleep(0.5); ctypes.string_at(0)"
    stream, out = io.StringIO(), tmp_path / "out.ipynb"
    with pytest.raises(NotebookFailed, match="SIGSEGV") as failure:
        execute(write(tmp_path / "in.ipynb", PID, crash), out, stream=stream)
    assert failure.value.exit_code == 128 + signal.SIGSEGV
    assert "Segmentation fault" in stream.getvalue() and "Segmentation fault" in text(out)


def test_stderr_at_a_normal_end_is_not_a_crash(tmp_path: Path, capfd: Any) -> None:
    late = "import atexit, os\natexit.register(lambda: os.write(os.dup(2), b'Traceback (most recent call last):'))"
    assert execute(write(tmp_path / "in.ipynb", late), tmp_path / "out.ipynb", stream=io.StringIO()).exists()
    assert "Traceback" not in capfd.readouterr().err


def test_a_killed_kernel_ends_the_execution(tmp_path: Path) -> None:
    process, out = started(tmp_path)
    os.kill(int(text(out).split("kernel ")[1].split()[0]), signal.SIGKILL)
    assert process.wait(30) == 1  # NotebookFailed, uncaught; the cell itself would take 120 s
    assert statuses(out) == ["completed", "terminated", "pending"]


def test_a_cell_that_ignores_the_interrupt_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "GRACE_S", 1.0)
    stubborn = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(2, 1); time.sleep(60)"])
print("child", child.pid, flush=True)
while True: time.sleep(0.1)
"""
    out = tmp_path / "out.ipynb"
    with pytest.raises(NotebookFailed, match="longer than 2 s"):
        execute(write(tmp_path / "in.ipynb", PID, stubborn), out, timeout=2, stream=io.StringIO())
    assert statuses(out) == ["completed", "terminated"]
    assert kernel_is_gone(out)
    child = int(text(out).split("child ")[1].split()[0])
    wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE, 10)


def started(tmp_path: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """An execution in a new process, inside its second cell."""
    long = f"""
from pathlib import Path
import time
print("working", flush=True)
try:
    Path({str(tmp_path / "inside")!r}).touch()
    time.sleep(120)
finally:
    Path({str(tmp_path / "cleaned")!r}).touch()
"""
    source, out = write(tmp_path / "in.ipynb", PID, long, "print('later')"), tmp_path / "out.ipynb"
    call = f"from kit.notebook.execute import execute; execute({str(source)!r}, {str(out)!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", call], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for((tmp_path / "inside").exists)
    return process, out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_cell_and_is_recorded(tmp_path: Path, number: signal.Signals) -> None:
    process, out = started(tmp_path)
    process.send_signal(number)
    assert process.wait(30) not in (0, None)
    assert statuses(out) == ["completed", "terminated", "pending"]
    saved = nbformat.read(out, 4)
    assert saved.metadata.kit.reason == f"{number.name} stopped the notebook."
    assert saved.metadata.kit.exit_code == 128 + number
    assert saved.metadata.papermill.exception is True
    assert "working" in text(out)
    assert (tmp_path / "cleaned").exists(), "the cell had no chance to clean up"
    assert kernel_is_gone(out)


def test_a_signal_to_all_processes_of_the_job_is_recorded(tmp_path: Path) -> None:
    process, out = started(tmp_path)
    for member in (*psutil.Process(process.pid).children(recursive=True), process):  # as scancel --full does
        member.send_signal(signal.SIGTERM)
    assert process.wait(30) not in (0, None)
    assert statuses(out) == ["completed", "terminated", "pending"]
    assert nbformat.read(out, 4).metadata.kit.reason == "SIGTERM stopped the notebook."
    assert kernel_is_gone(out)


def test_a_signal_before_the_kernel_is_up_leaves_every_cell_pending(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.ipynb", "1"), tmp_path / "out.ipynb"
    call = f"from kit.notebook.execute import execute; execute({str(source)!r}, {str(out)!r})"
    process = subprocess.Popen([sys.executable, "-c", call], cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for(out.exists)
    process.terminate()
    assert process.wait(30) not in (0, None)
    assert statuses(out) == ["pending"]
    assert nbformat.read(out, 4).metadata.kit.reason == "SIGTERM stopped the notebook."


def test_after_sigkill_no_cell_is_completed_and_the_kernel_ends(tmp_path: Path) -> None:
    process, out = started(tmp_path)
    process.kill()
    process.wait(30)
    assert statuses(out) == ["completed", "running", "pending"]
    assert nbformat.read(out, 4).metadata.kit.end_time is None
    wait_for(lambda: kernel_is_gone(out), 20)


# Parameters


DEFAULTS = """\
use_lora: bool = True  # train an adapter
steps: int = 10
lr: float = 1e-3  # peak rate, "#" and all
name: str = "a # b"
out: Path = Path("runs")
modules: list[str] = ["q_proj"]
sizes: list[int] = [1]
batch: int | None = None  # rows
loss: "Literal['assistant', 'all']" = "all"
plain = 3
"""


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Parameter]:
    return read_parameters(write(tmp_path / "in.ipynb", parameters=f"from pathlib import Path\n{DEFAULTS}"))


def test_the_parameters_cell_is_read_without_running_it(known: dict[str, Parameter]) -> None:
    assert list(known) == ["use_lora", "steps", "lr", "name", "out", "modules", "sizes", "batch", "loss", "plain"]
    assert known["lr"] == Parameter("lr", float, 1e-3, 'peak rate, "#" and all')
    assert known["name"] == Parameter("name", str, "a # b", "")
    assert known["out"].default == "Path('runs')"
    assert known["batch"].kind == int | None
    assert known["loss"].kind == Literal["assistant", "all"]
    assert known["plain"].kind is int


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("use_lora", "false", False),
        ("use_lora", "True", True),
        ("use_lora", False, False),
        ("steps", "1_000", 1000),
        ("lr", "1e-5", 1e-5),
        ("lr", 1, 1.0),
        ("lr", 0.1 + 0.2, 0.30000000000000004),
        ("name", "007", "007"),
        ("name", "1:30:00", "1:30:00"),
        ("name", "false", "false"),
        ("out", "/data/run 1", Path("/data/run 1")),
        ("out", Path("x"), Path("x")),
        ("modules", "q_proj,v_proj", ["q_proj", "v_proj"]),
        ("modules", ["a"], ["a"]),
        ("sizes", ["1", "2"], [1, 2]),
        ("sizes", "[1, 2]", [1, 2]),
        ("batch", "8", 8),
        ("batch", "none", None),
        ("batch", None, None),
        ("loss", "assistant", "assistant"),
    ],
)
def test_a_value_gets_the_type_of_its_annotation(
    known: dict[str, Parameter], name: str, given: Any, value: Any
) -> None:
    checked = check(known, {name: given})[name]
    assert checked == value and type(checked) is type(value)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("stepz", "5", "did you mean 'steps'"),
        ("x; import os", "1", "Unknown parameter"),
        ("use_lora", "1", "true or false"),
        ("use_lora", "yes", "true or false"),
        ("steps", "1.5", "whole number"),
        ("steps", True, "whole number"),
        ("batch", "8x", "whole number"),
        ("name", 7, "text"),
        ("loss", "al", "did you mean 'all'"),
        ("lr", "fast", "a number"),
    ],
)
def test_unknown_names_and_wrong_values_are_errors(
    known: dict[str, Parameter], name: str, given: Any, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        check(known, {name: given})


def test_secrets_are_rejected_as_parameters_and_numbers_of_tokens_are_not(tmp_path: Path) -> None:
    cell = 'hf_token: str = ""\nmax_tokens: int = 5\ntokenizer: str = ""'
    known = read_parameters(write(tmp_path / "in.ipynb", parameters=cell))
    assert check(known, {"max_tokens": "7", "tokenizer": "gpt2"}) == {"max_tokens": 7, "tokenizer": "gpt2"}
    with pytest.raises(InputError, match=r"hf_token.*environment or a file"):
        check(known, {"hf_token": "hf_123"})


def test_a_yaml_file_is_read_by_the_annotations(known: dict[str, Parameter], tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("lr: 1e-5\nname: 1:30:00\nuse_lora: false\nsizes: [1, 2]\nbatch: null\nsteps: 012\n")
    expected = {"lr": 1e-5, "name": "1:30:00", "use_lora": False, "sizes": [1, 2], "batch": None, "steps": 12}
    assert check(known, read_values(file)) == expected
    file.write_text("just words")
    with pytest.raises(InputError, match="name: value"):
        read_values(file)


def test_values_are_exact_in_the_kernel_and_recorded(tmp_path: Path) -> None:
    cells = ["print(repr([use_lora, lr, name, out, modules, batch]))", "import sys; print(sys.executable)"]
    source = write(tmp_path / "in.ipynb", *cells, parameters=f"from pathlib import Path\nLiteral = str\n{DEFAULTS}")
    given = {
        "use_lora": "false",
        "lr": 0.1 + 0.2,
        "name": 'it\'s "7" \\ {x}\n\u00e9',
        "out": "a b",
        "modules": ["x'y"],
        "batch": "4",
    }
    out = execute(source, tmp_path / "out{x}.ipynb", given, stream=io.StringIO())
    path = type(Path())("a b")
    expected = [False, 0.1 + 0.2, given["name"], path, ["x'y"], 4]
    assert text(out) == f"{expected!r}\n{sys.executable}\n"
    recorded = nbformat.read(out, 4).metadata.papermill.parameters
    assert recorded == given | {"use_lora": False, "batch": 4}
    again = execute(out, tmp_path / "again.ipynb", {"batch": 5}, stream=io.StringIO())
    assert len(nbformat.read(again, 4).cells) == len(nbformat.read(out, 4).cells), "the injected cell was not replaced"
    assert "[True, 0.001, 'a # b', PosixPath('runs'), ['q_proj'], 5]" in text(again)


# Wrong calls


def test_a_wrong_call_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    good = write(tmp_path / "good.ipynb", "1", parameters="steps: int = 1")
    two = write(tmp_path / "two.ipynb", parameters="a: int = 1")
    notebook = nbformat.read(two, 4)
    notebook.cells.append(new_code_cell("b: int = 1", metadata={"tags": ["parameters"]}))
    nbformat.write(notebook, str(two))
    none = write(tmp_path / "none.ipynb", "1")
    julia = write(tmp_path / "julia.ipynb", "1", language_info={"name": "julia"})
    odd = write(tmp_path / "odd.ipynb", parameters="when: date = 1")
    broken = write(tmp_path / "broken.ipynb", parameters="x = ")
    words = tmp_path / "words.ipynb"
    words.write_text("not a notebook")
    empty = tmp_path / "empty.ipynb"
    empty.write_text('{"cells": 3}')
    out = tmp_path / "out.ipynb"
    for source, target, given, message in [
        (good, out, {"step": 1}, "did you mean 'steps'"),
        (good, good, {}, "exists"),
        (two, out, {}, "2 cells are tagged"),
        (none, out, {"a": 1}, "takes no parameters"),
        (julia, out, {}, "julia"),
        (odd, out, {"when": "2"}, "Parameter 'when' cannot be given: its type 'date' is not made of bool, int"),
        (broken, out, {}, "is not Python"),
        (words, out, {}, "not a notebook"),
        (empty, out, {}, "not a notebook"),
        (tmp_path / "absent.ipynb", out, {}, "no such notebook"),
    ]:
        with pytest.raises(InputError, match=message):
            execute(source, target, given)
        assert not out.exists()
    before = good.read_bytes()
    with pytest.raises(InputError):
        execute(good, good, overwrite=True)
    assert good.read_bytes() == before


def test_an_existing_notebook_is_overwritten_only_when_asked(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.ipynb", "print('new')"), tmp_path / "out.ipynb"
    out.write_text("old")
    with pytest.raises(InputError, match="exists"):
        execute(source, out)
    assert out.read_text() == "old"
    assert text(execute(source, out, overwrite=True, stream=io.StringIO())) == "new\n"


# The saved file


def test_saves_are_atomic_with_the_mode_of_the_umask(tmp_path: Path) -> None:
    out, reads, done = tmp_path / "out.ipynb", [], threading.Event()

    def read() -> None:
        while not done.is_set():
            with contextlib.suppress(FileNotFoundError):
                reads.append(len(json.loads(out.read_text())["cells"]))

    reader = threading.Thread(target=read)
    old = os.umask(0o027)
    try:
        reader.start()
        execute(write(tmp_path / "in.ipynb", "print('x' * 2_000_000)", *["1"] * 20), out, stream=io.StringIO())
    finally:
        os.umask(old)
        done.set()
        reader.join()
    assert set(reads) == {22}
    assert stat.S_IMODE(out.stat().st_mode) == 0o640


def test_output_is_saved_while_its_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "AUTOSAVE_S", 0.2)
    gate, out = tmp_path / "gate", tmp_path / "out.ipynb"
    waits = f"import os, time\nprint('early')\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.05)"
    source = write(tmp_path / "in.ipynb", waits)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        job = pool.submit(execute, source, out, stream=io.StringIO())
        wait_for(lambda: out.exists() and text(out) == "early\n")
        assert statuses(out) == ["running"]
        gate.touch()
        job.result()
    assert statuses(out) == ["completed"]


def test_widgets_are_saved_as_plain_text_without_state(tmp_path: Path) -> None:
    state = {"application/vnd.jupyter.widget-state+json": {"state": {}, "version_major": 2, "version_minor": 0}}
    source = write(tmp_path / "in.ipynb", "import ipywidgets; ipywidgets.IntSlider()", widgets=state)
    out = execute(source, tmp_path / "out.ipynb", stream=io.StringIO())
    saved = nbformat.read(out, 4)
    assert "widgets" not in saved.metadata
    assert list(saved.cells[1].outputs[0].data) == ["text/plain"]


def test_a_progress_bar_is_one_line_of_output_and_of_the_log(tmp_path: Path) -> None:
    bar = """
import sys, time
for i in range(1000):
    print(f"\\r{i + 1}/1000", end="", file=sys.stderr, flush=True)
    if i % 100 == 0:
        print("loss", i, flush=True)
        time.sleep(0.01)
"""
    stream = io.StringIO()
    out = execute(write(tmp_path / "in.ipynb", bar), tmp_path / "out.ipynb", stream=stream)
    assert stream.getvalue().splitlines() == [*(f"loss {i}" for i in range(0, 1000, 100)), "1000/1000"]
    outputs = {o.name: o.text for o in nbformat.read(out, 4).cells[1].outputs}
    assert outputs["stderr"].strip("\r") == "1000/1000"
    assert outputs["stdout"].count("loss") == 10


def test_secrets_of_the_environment_are_hidden_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hf_0123456789abcdef"
    monkeypatch.setenv("MY_API_TOKEN", secret)
    leaks = "import os\nt = os.environ['MY_API_TOKEN']\nprint('token', t)\nraise ValueError(f'refused {t}')"
    stream, out = io.StringIO(), tmp_path / "out.ipynb"
    source = write(tmp_path / "in.ipynb", leaks, parameters='note: str = ""')
    with pytest.raises(NotebookFailed) as failure:
        execute(source, out, {"note": f"see {secret}"}, stream=stream)
    for place in (out.read_text(), stream.getvalue(), str(failure.value)):
        assert secret not in place and "[hidden]" in place
    assert nbformat.read(out, 4).metadata.kit.hidden == ["MY_API_TOKEN"]
    assert "[hidden] is in the place of the values of MY_API_TOKEN" in stream.getvalue()


def test_provenance_names_the_code_and_not_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("USER", "somebody_known")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    source = write(tmp_path / "in.ipynb", "1", parameters="lr: float = 1.0")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    saved = nbformat.read(execute(source, tmp_path / "1.ipynb", {"lr": "1e-5"}, stream=io.StringIO()), 4)
    kit = saved.metadata.kit
    assert (kit.git.commit, kit.git.dirty, kit.git.diff) == (commit, False, "")
    assert kit.notebook_sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
    assert kit.parameters == {"lr": 1e-5}
    assert (kit.input, kit.slurm_job_id, kit.python) == ("in.ipynb", "4711", platform.python_version())
    assert kit.constraints == hashlib.sha256((ROOT / "env" / "constraints.txt").read_bytes()).hexdigest()
    assert kit.start_time < kit.end_time and kit.duration > 0
    assert "somebody_known" not in nbformat.writes(saved)


def test_a_dirty_tree_is_recorded_with_a_limited_diff(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "code.py").write_text("before\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "code.py").write_text("after\n" * 10_000)
    found = provenance.git(tmp_path)
    assert found and found["dirty"] and "-before\n+after\n" in found["diff"]
    assert len(found["diff"]) == provenance.DIFF_LIMIT < 10_000 * len("after\n")
    assert provenance.git(tmp_path.parent / "nowhere") is None


def test_runs_datasets_and_results_in_variables_are_recorded(tmp_path: Path) -> None:
    cells = [
        "from kit import Cluster, Run\nrun = Run.create_for_script('', Cluster('c'), 'own')",
        "import numpy\nresult = {'loss': [2.5, numpy.float32(0.1), float('nan')], 'note': 'words', 'steps': 3}",
    ]
    out = execute(
        write(tmp_path / "in.ipynb", *cells), tmp_path / "to" / "out.ipynb", cwd=tmp_path, stream=io.StringIO()
    )
    kit = nbformat.read(out, 4).metadata.kit
    assert kit.result == {"loss": [2.5, float(numpy.float32(0.1)), "NaN"], "steps": 3}
    assert (out.parent / kit.runs[0] / "run.json").is_file() and kit.runs[0].startswith("../runs/own-")


# Company


def test_six_concurrent_executions_in_one_folder(tmp_path: Path) -> None:
    source = write(tmp_path / "in.ipynb", "print(n)", parameters="n: int = 0")
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(execute, source, tmp_path / f"{n}.ipynb", {"n": n}, stream=io.StringIO()) for n in range(6)]
    assert [text(job.result()) for job in jobs] == [f"{n}\n" for n in range(6)]


def test_a_notebook_can_run_another(tmp_path: Path) -> None:
    async def cell() -> Path:  # a kernel runs its cells inside a running loop
        return execute(write(tmp_path / "in.ipynb", "print('inner')"), tmp_path / "out.ipynb", stream=io.StringIO())

    assert text(asyncio.run(cell())) == "inner\n"


def test_the_kernel_transport_is_encrypted(tmp_path: Path) -> None:
    peek = "import json, ipykernel; print('curve_publickey' in json.load(open(ipykernel.get_connection_file())))"
    assert text(execute(write(tmp_path / "in.ipynb", peek), tmp_path / "out.ipynb", stream=io.StringIO())) == "True\n"


def test_papermill_finds_the_engine_in_any_import_order(tmp_path: Path) -> None:
    info = tmp_path / "finetune_kit-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: finetune-kit\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[papermill.engine]\nkit = kit.notebook.execute:KitEngine\n")
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    call = (
        "import kit.notebook.execute; from papermill.engines import papermill_engines as e; print(e.get_engine('kit'))"
    )
    found = subprocess.run([sys.executable, "-c", call], env=env, capture_output=True, text=True)
    assert "KitEngine" in found.stdout, found.stderr
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "in.ipynb", "import sys", "sys.exit(0 if flag else 3)", parameters="flag: bool = False")
    command = [sys.executable, "-m", "papermill", "--engine", "kit", "in.ipynb", "out.ipynb", "-p", "flag", "true"]
    done = subprocess.run([*command, "--cwd", "elsewhere"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert statuses(tmp_path / "out.ipynb") == ["completed", "completed", "completed", "completed"]
    assert nbformat.read(tmp_path / "out.ipynb", 4).metadata.kit.ending == Ending.LEFT
    command[-1] = "false"
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "PapermillExecutionError" in done.stderr
    saved = nbformat.read(tmp_path / "out.ipynb", 4)
    assert "papermill-error-cell" in saved.cells[0].source
    assert saved.metadata.kit.reason == "The cell raised SystemExit(3)."
