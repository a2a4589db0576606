"""Write the executed copies that nbval compares later runs with: python tests/golden/make.py"""

import configparser
import io
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat

from kit.notebook.execute import execute

HERE = Path(__file__).resolve().parent
NOTEBOOKS = HERE.parents[1] / "notebooks"
SANITIZER = HERE.parent / "nbval-sanitize.cfg"
# The parameters of each copy: real forecasts and real data, without a GPU and within seconds.
COPIES: dict[str, dict[str, Any]] = {
    "01_prepare_data": {"recipe": "demo"},
    "02_explore_memory": {"recipe": "llama8b", "cluster": "h100-8x8"},
}


def sanitize(text: str) -> str:
    """The text without paths, times and ids, by the rules that nbval reads."""
    rules = configparser.RawConfigParser()
    rules.read(SANITIZER)
    for name in rules.sections():
        text = re.sub(rules[name]["regex"], rules[name]["replace"], text)
    return text


def copy(name: str) -> Any:
    """The executed notebook with its outputs sanitized, and without what names this machine and hour."""
    with tempfile.TemporaryDirectory() as folder:
        out = execute(NOTEBOOKS / f"{name}.ipynb", Path(folder, name), COPIES[name], cwd=folder, stream=io.StringIO())
        notebook = nbformat.read(out, as_version=4)
    notebook.metadata = {key: notebook.metadata[key] for key in ("kernelspec", "language_info")}
    for number, cell in enumerate(notebook.cells):
        cell.id = str(number)
        cell.metadata = {"tags": tags} if (tags := cell.metadata.get("tags")) else {}
        for output in cell.get("outputs", []):
            output.update(json.loads(sanitize(json.dumps(output))))
            output.get("data", {}).pop("image/png", None)  # depends on the fonts of the machine; nbval ignores it, too
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:] or COPIES:
        nbformat.write(copy(name), HERE / f"{name}.ipynb")
