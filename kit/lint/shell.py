"""The shell language of a batch script: commands by tree-sitter's grammar, sbatch's directives and options."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

LATE = "\x1a"  # ASCII's "substitute": a "$" that the batch shell leaves alone, quoted or meant for a later shell
FIELD = re.compile(r"(?:\$\((?:[^()]|\([^()]*\))*\)|\S)+")  # what word splitting leaves, but $(a b) stays one

KNOWN: dict[str, Any] = tomllib.loads(Path(__file__).with_name("slurm.toml").read_text())
SBATCH = f"{KNOWN['sbatch']} {' '.join(KNOWN['later'].values())}"
OPTIONS = {name.rstrip("=?") for name in re.sub(r"\b\w\|", "", SBATCH).split()}
SINCE = {o.rstrip("=?"): release for release, names in KNOWN["later"].items() for o in names.split()}
VARIABLES = {f"SLURM_{name}" for name in KNOWN["variables"].split()}

_PARSER = Parser(Language(tree_sitter_bash.language()))
_COMMANDS = ("command", "declaration_command", "unset_command", "test_command", "variable_assignment",
             "variable_assignments", "for_statement")  # fmt: skip
_HOLDS = {name: name.partition("_")[0] for name in (
    "program", "ERROR", "list", "pipeline", "redirected_statement", "negated_command", "heredoc_redirect",
    "function_definition", "if_statement", "elif_clause", "else_clause", "while_statement", "for_statement",
    "c_style_for_statement", "do_group", "case_statement", "case_item", "compound_statement", "subshell")}  # fmt: skip
_PLAIN = ("program", "ERROR", "list", "pipeline", "redirected", "negated", "heredoc")  # holds, but decides nothing
_OPERATORS = ("|", "|&", "&", "&&", "||", ";", ";;")
_REDIRECTS = ("file_redirect", "herestring_redirect", "heredoc_redirect")
_DIRECTIVE_WORD = re.compile(r"""#.*|(?:"[^"]*"|'[^']*'|\\\S|[^\s"'\\#])+|\S""", re.ASCII)


class Word(NamedTuple):
    """A word without its quotes."""

    text: str
    line: int
    quoted: bool = False


class Setting(NamedTuple):
    """An option by its long name, or an assignment; a problem is sbatch's reason to refuse it."""

    name: str
    value: str
    line: int
    problem: str = ""


class Command(NamedTuple):
    """A simple command: words, what it is inside ("if", "condition", "function"), the operator after it or ""."""

    words: tuple[Word, ...]
    inside: frozenset[str]
    end: str

    @property
    def text(self) -> str:
        """Its words with a space between."""
        return " ".join(w.text for w in self.words)


@cache
def _table(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """What each long option takes, and the long name of each short one."""
    known = re.findall(r"(?:(\w)\|)?([\w-]+)([=?]?)", text)
    return {name: takes for _, name, takes in known}, {short: name for short, name, _ in known if short}


def options(words: Sequence[str], line: int, table: str = SBATCH) -> tuple[list[Setting], list[str]]:
    """The leading options by getopt's rules (abbreviations, `-N2`, `--nodes 2`), and the words after them."""
    (known, shorts), left, found = _table(table), list(words), []
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            given, equals, value = word[2:].partition("=")
            names = [given] if given in known else [n for n in known if n.startswith(given)]
        else:
            given, value = word[1], word[2:]
            names, equals = [shorts[given]] if given in shorts else [], value
            if names and not known[names[0]] and value:  # -HO is -H -O
                left.insert(0, f"-{value}")
                value = equals = ""
        problem = "" if len(names) == 1 else "is ambiguous" if names else "not recognized"
        if not problem and known[names[0]] == "=" and not equals:
            value, problem = (left.pop(0), "") if left else (word, "needs a value")
        elif not problem and equals and not known[names[0]]:
            problem = "takes no value"
        shown = f"option {word.partition('=')[0] if word.startswith('--') else word[:2]} {problem}"
        found.append(Setting(given, word, line, shown) if problem else Setting(names[0], value, line))
    return found, left


def directives(text: str) -> Iterator[tuple[int, list[str]]]:
    """Line and words of each #SBATCH line that sbatch reads: it stops at the first line that is no comment."""
    for number, row in enumerate(text.split("\n"), 1):
        if row.startswith("#SBATCH"):
            words = [m[0] for m in _DIRECTIVE_WORD.finditer(row[7:]) if m[0] != "\\"]
            comment = next((i for i, w in enumerate(words) if w.startswith("#")), len(words))
            yield number, [re.sub(r"[\"']|\\(.)", r"\1", w) for w in words[:comment]]
        elif row.strip() and not row.lstrip().startswith("#"):
            return


# The grammar's scanner asks isalnum() of whole code points, and crashes beyond C's table (tree-sitter-bash 0.25.1). To
# bash such characters are plain parts of words, as a dot is; names are cut from the source, at the same places.
_ASCII = bytes(range(128)) + b"." * 128


class Code:
    """Shell code as bash reads it: commands and comments; what it cannot read is left out, up to what it can.

    `sign` is the character that expands here: LATE in text that only a later shell reads.
    """

    def __init__(self, text: str, sign: str = "$", line: int = 1) -> None:
        self.source, self.sign, self.line = text.encode(errors="surrogateescape"), sign, line
        parsed = self.source.replace(LATE.encode(), b"$") if sign == LATE else self.source
        parsed = parsed.translate(_ASCII)
        self.commands: list[Command] = []
        self.comments: list[Word] = []
        self.root = _PARSER.parse(parsed + b"\n").root_node
        stack: list[tuple[Node, frozenset[str], str]] = [(self.root, frozenset(), "")]
        while stack:
            node, inside, end = stack.pop()
            if node.type == "comment":
                self.comments.append(Word(self._raw(node), self._line(node)))
            elif node.type in _COMMANDS and (words := tuple(self._words(node))):
                self.commands.append(Command(words, inside, end))
            if kind := _HOLDS.get(node.type):
                around = inside if kind in _PLAIN else inside | {kind}
                follows = end if kind in ("list", "pipeline", "redirected", "negated") else ""
                for child in reversed(node.children):
                    if child.type in _OPERATORS:
                        follows = child.type
                    elif child.is_named:
                        stack.append((child, around, follows))
                        follows = follows if child.type in _REDIRECTS else ""
                    if child.type in ("then", "do_group") and kind != "for":
                        around = around | {"condition"}  # what stands before it

    def around(self, start: int, end: int) -> set[str]:
        """The grammar's names for what holds these bytes."""
        node, found = self.root.descendant_for_byte_range(start, end), set()
        while node:
            found.add(node.type)
            node = node.parent
        return found

    def _words(self, node: Node) -> Iterator[Word]:
        """Words of a command, also those that the grammar takes for further targets of a redirection."""
        parts, parent = node.children, node.parent
        beside = parent.children if parent and parent.type == "redirected_statement" else []
        targets = [c.children_by_field_name("destination") for c in parts + beside if c.type == "file_redirect"]
        if node.type == "variable_assignment":
            parts = [node]
        for part in [*parts, *(word for words in targets for word in words[1:])]:
            if part.type not in (*_REDIRECTS, "comment", "do_group", ";"):
                quoted = re.search(rb"[\"']|\\(?!\n)", self.source[part.start_byte : part.end_byte])
                yield Word(self._text(part), self._line(part), bool(quoted))

    def _line(self, node: Node) -> int:
        return self.line + node.start_point[0]

    def _raw(self, node: Node) -> str:
        return self.source[node.start_byte : node.end_byte].decode(errors="surrogateescape")

    def _text(self, node: Node) -> str:
        """A word without quotes and escapes; expansions stay as written, with LATE for $ where nothing expands."""
        raw, kind = self._raw(node), node.type
        if kind in ("raw_string", "ansi_c_string"):
            return raw[raw.index("'") + 1 : -1].replace(self.sign, LATE)
        if kind == "word":
            return self._unescape(raw, ".")
        if kind == "string":
            out, at = "", node.start_byte + 1
            for child in node.named_children:
                if child.type != "string_content":
                    out += self._literal(at, child.start_byte) + self._text(child)
                    at = child.end_byte
            return out + self._literal(at, node.end_byte - raw.endswith('"'))
        if kind == "command_substitution" and raw.startswith("`"):
            return f"{self.sign}({raw[1:-1]})"
        if kind in ("concatenation", "variable_assignment", "command_name"):
            return "".join(map(self._text, node.children))
        return raw

    def _literal(self, start: int, end: int) -> str:
        return self._unescape(self.source[start:end].decode(errors="surrogateescape"), rf'[$`"\\\n{LATE}]')

    def _unescape(self, text: str, escaped: str) -> str:
        return re.sub(rf"\\({escaped})", lambda m: m[1].strip("\n").replace(self.sign, LATE), text, flags=re.DOTALL)


def base(word: str) -> str:
    """A path's last part."""
    return word.rsplit("/", 1)[-1]


def number(text: str) -> int | None:
    """A plain whole number, else None."""
    return int(text) if text.isdecimal() else None
