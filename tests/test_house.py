"""The structure of the kit: which package imports which, how large modules are, and which words they use.

Each check has a list of known exceptions. An exception that is no longer real fails as well, so that the lists shrink.
"""

import ast
import re
import sys
import tomllib
from collections import defaultdict
from importlib.metadata import packages_distributions

import nbformat
import pytest

from tests.conftest import REPOSITORY

KIT = REPOSITORY / "kit"
MODULES = sorted(path for path in KIT.rglob("*.py"))
# A room (a package of kit, or a module at its top) imports only rooms of lower levels, and of its own level without
# a circle.
LEVELS = [
    {"errors", "files", "show", "figures", "callable_room"},
    {"config"},
    {"data", "forecast", "lint"},
    {"trainers"},
    {"slurm"},
    {"watch", "checkpoints"},
    {"deploy"},
    {"train", "check", "notebook"},
    {"cli", "kit"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
LINT_MAY_IMPORT = {"errors", "files", "show", "lint"}
UPWARD: set[tuple[str, str]] = set()  # (module, room)
MOST_LINES = 400
LONG: set[str] = set()
MOST_FILES_AT_THE_TOP = 8


def name_of(path):
    """The path inside kit/, such as "data/pack.py"."""
    return path.relative_to(KIT).as_posix()


def room_of(path):
    parts = path.relative_to(KIT).parts
    if len(parts) > 1:
        return parts[0]
    return "kit" if parts[0] == "__init__.py" else path.stem


def imported_modules(path):
    """Absolute names of all imported modules: lazy imports, those for type checkers and relative ones included."""
    package = ["kit", *path.relative_to(KIT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield module
            if module == "kit":
                yield from (f"kit.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            yield from (str(word.value) for word in node.args[:1] if isinstance(word, ast.Constant))


def imported_rooms(path):
    rooms = {name.split(".")[1] for name in imported_modules(path) if name.startswith("kit.")}
    return {room for room in rooms if (KIT / room).is_dir() or (KIT / f"{room}.py").exists()} - {room_of(path)}


def test_every_room_has_a_level():
    assert {room_of(path) for path in MODULES} <= set(LEVEL)


def test_imports_point_downward():
    found = {
        (name_of(path), room)
        for path in MODULES
        for room in imported_rooms(path)
        if LEVEL.get(room, 0) > LEVEL.get(room_of(path), 0)
    }
    assert found == UPWARD


def test_lint_imports_nothing_but_errors_and_results():
    found = {(name_of(path), room) for path in MODULES if room_of(path) == "lint" for room in imported_rooms(path)}
    assert {(module, room) for module, room in found if room not in LINT_MAY_IMPORT} == set()


def circles(edges):
    """The rooms that can be reached from themselves."""
    reached = {room: set(targets) for room, targets in edges.items()}
    for middle in list(reached):
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    return {room for room, targets in reached.items() if room in targets}


def test_no_circle_between_rooms():
    edges = defaultdict(set)
    for path in MODULES:
        edges[room_of(path)] |= {room for room in imported_rooms(path) if (name_of(path), room) not in UPWARD}
    assert circles(edges) == set()


def test_a_circle_is_found_through_several_rooms():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {"a", "b", "c"}
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == set()


def test_no_module_is_longer_than_400_lines():
    assert {name_of(path) for path in MODULES if len(path.read_text().splitlines()) > MOST_LINES} == LONG


def test_few_files_at_the_top_of_kit():
    assert len([path for path in KIT.iterdir() if path.is_file()]) <= MOST_FILES_AT_THE_TOP


# Dependencies

# Imported names that belong to a declared package, which pins their version, or that brings them.
PARTS = {
    "pydantic_core": "pydantic", "kvikio": "kvikio-cu13", "orbax": "orbax-checkpoint",
    "tensorstore": "orbax-checkpoint", "ml_dtypes": "orbax-checkpoint",
}  # fmt: skip


def requirement_names(requirements):
    return {re.match(r"[\w.-]+", text)[0].lower().replace("_", "-") for text in requirements}


def test_every_imported_package_is_declared():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    declared = requirement_names([*project["dependencies"], *optional])
    owners = packages_distributions()
    undeclared = set()
    for path in MODULES:
        for name in imported_modules(path):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or top in ("kit", "__future__"):
                continue
            packages = {package.lower().replace("_", "-") for package in owners.get(top, [top])} | {PARTS.get(top)}
            if not packages & declared:
                undeclared.add((name_of(path), top))
    assert undeclared == set()


# Notebooks

NOTEBOOKS_WITH_OTHER_IMPORTS: set[str] = set()


def code_of(notebook):
    """The Python of a notebook's cells, without cells and lines of magics."""
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code" and not cell.source.lstrip().startswith("%%"):
            yield re.sub(r"^\s*[%!].*$", "", cell.source, flags=re.MULTILINE)


def test_notebooks_import_kit_alone():
    """Other packages are free, modules inside kit are not."""
    found = set()
    for notebook in sorted((REPOSITORY / "notebooks").glob("*.ipynb")):
        for source in code_of(notebook):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ImportFrom):
                    found.add((notebook.stem, str(node.module)))
                elif isinstance(node, ast.Import):
                    found |= {(notebook.stem, alias.name) for alias in node.names if alias.name != "kit"}
    assert {name for name, module in found if module.partition(".")[0] == "kit"} == NOTEBOOKS_WITH_OTHER_IMPORTS


# Environment variables

VARIABLE = re.compile(r"(?<![\w-])KIT_[A-Z][A-Z_]*[A-Z]\b")


def test_every_environment_variable_is_listed_in_one_place():
    listed = set(VARIABLE.findall((KIT / "slurm" / "variables.py").read_text()))
    used = {}
    for folder in ("kit", "env", "notebooks"):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.is_file() and path.suffix not in (".pyc", ".png"):
                used |= dict.fromkeys(VARIABLE.findall(path.read_text(errors="replace")), path.name)
    assert {name: file for name, file in used.items() if name not in listed} == {}


# Words

# Words of an earlier style in kit/, and how often each may occur at most. A number may only fall.
OLD_WORDS = {
    "is told": 0, "told": 0, "(?<!there )is none": 0, "of its own": 0, "nobody": 0, "stands": 0,
    "lies": 1, "mends?": 0, "beside": 2, "whole": 31,
}  # fmt: skip


def occurrences(word):
    texts = [p.read_text() for p in KIT.rglob("*") if p.suffix in (".py", ".js", ".sh", ".sbatch")]
    return sum(len(re.findall(rf"\b{word}\b", text)) for text in texts)


@pytest.mark.parametrize("word", OLD_WORDS)
def test_the_old_words_only_become_fewer(word):
    assert occurrences(word) <= OLD_WORDS[word]
