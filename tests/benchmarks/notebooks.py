"""Measure the demo: `python -m tests.benchmarks.notebooks FOLDER` prints the seconds of each notebook and of all."""

import sys
from pathlib import Path

import nbformat

from kit.notebook.demo import demo
from kit.show import Table

LIMIT_S = 480  # for all notebooks on two idle cores


def main(folder: Path) -> int:
    """Run the demo into a new folder. 1 if the notebooks took longer than LIMIT_S together."""
    demo(folder)
    notebooks = {path.stem: nbformat.read(path, as_version=4) for path in sorted(folder.glob("*.ipynb"))}
    rows = [[name, notebook.metadata.papermill.duration] for name, notebook in notebooks.items()]
    total = sum(seconds for _, seconds in rows)
    print(Table(["notebook", "seconds"], [*rows, ["all", total]]))
    return int(total > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
