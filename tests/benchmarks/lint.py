"""How long the linter takes for a long script: `python tests/benchmarks/lint.py` writes lint.json next to it.

The processor time of this process, in milliseconds; `bash -n` is left out. It should stay below 50.
"""

import json
import os
import time
from pathlib import Path

from kit.lint.lint import lint
from tests.lint.scripts import GOOD


def measure() -> dict[str, float]:
    """The fastest of five runs."""
    os.environ["PATH"] = ""  # no bash -n
    rows = [f'export A{i}="$A{i - 1} x" # comment\necho "$(date) $A{i}" | tee log' for i in range(100)]
    text = GOOD + "\n".join(rows)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        lint(text)
        seconds.append(time.process_time() - start)
    return {"lines": text.count("\n") + 1, "lint_ms": round(1000 * min(seconds), 1)}


if __name__ == "__main__":
    result = measure()
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
