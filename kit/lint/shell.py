"""The shell language of a batch script, parsed by tree-sitter's grammar of bash: commands, their words, and comments.

Words are texts without quotes, in which expansions stay as written. The dollar sign of an expansion says which shell
expands it. NOW is the batch shell. LATER was quoted for the batch shell, as in '$HOME': it stays literal, or a later
shell expands it, such as that of `bash -c`. (Bash marks quoted characters in its words in the same way, with CTLESC.)
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

NOW = "$"
LATER = "\x1a"  # ASCII's "substitute", which scripts do not contain
DOLLAR = f"[{NOW}{LATER}]"  # either, in a regular expression

_PARSER = Parser(Language(tree_sitter_bash.language()))
_COMMANDS = (
    "command",
    "declaration_command",
    "unset_command",
    "test_command",
    "variable_assignment",
    "variable_assignments",
    "for_statement",
)
# Nodes that contain commands, and what a command is then inside; "": nothing that decides whether or where it runs.
_CONTAINERS = {
    "program": "",
    "ERROR": "",
    "list": "",
    "pipeline": "",
    "redirected_statement": "",
    "negated_command": "",
    "heredoc_redirect": "",
    "function_definition": "function",
    "if_statement": "if",
    "elif_clause": "elif",
    "else_clause": "else",
    "while_statement": "while",
    "for_statement": "for",
    "c_style_for_statement": "for",
    "do_group": "do",
    "case_statement": "case",
    "case_item": "case",
    "compound_statement": "compound",
    "subshell": "subshell",
}
# Nodes whose last command is followed by what follows the node.
_TRANSPARENT = ("list", "pipeline", "redirected_statement", "negated_command")
_OPERATORS = ("|", "|&", "&", "&&", "||", ";", ";;")
_REDIRECTS = ("file_redirect", "herestring_redirect", "heredoc_redirect")
# The grammar's scanner calls isalnum() with code points, and crashes beyond C's table (tree-sitter-bash 0.25.1). To
# bash such characters are plain parts of words, as a dot is; words are cut from the source, at the same places.
_ASCII = bytes(range(128)) + b"." * 128


class Word(NamedTuple):
    """A word without its quotes. quoted: whether any part of it was quoted."""

    text: str
    line: int
    quoted: bool = False


@dataclass(frozen=True)
class Command:
    """A simple command.

    inside: what contains it, such as "if", "condition", "function". operator: the one after it, such as "|", or "".
    """

    words: tuple[Word, ...]
    inside: frozenset[str]
    operator: str

    @property
    def name(self) -> str:
        """The first word."""
        return self.words[0].text

    @property
    def line(self) -> int:
        """Where it begins."""
        return self.words[0].line

    @property
    def text(self) -> str:
        """The words with a space between."""
        return " ".join(word.text for word in self.words)


class _Place(NamedTuple):
    """A node of the syntax tree with what contains it and what follows it, as a Command has them."""

    node: Node
    inside: frozenset[str] = frozenset()
    operator: str = ""


class Code:
    """Shell code as bash reads it: `commands` and `comments`. What is not valid is left out, up to what is.

    dollar: the dollar sign that this code's shell expands; LATER for text that only a later shell reads.
    first_line: the line number of the text's first line.
    """

    def __init__(self, text: str, dollar: str = NOW, first_line: int = 1) -> None:
        self.commands: list[Command] = []
        self.comments: list[Word] = []
        self._source = text.encode(errors="surrogateescape")
        self._dollar = dollar
        self._first_line = first_line
        parsed = self._source.replace(LATER.encode(), NOW.encode()) if dollar == LATER else self._source
        self._root = _PARSER.parse(parsed.translate(_ASCII) + b"\n").root_node
        self._read()

    def node_types(self, start: int, end: int) -> set[str]:
        """The grammar's names of all nodes that contain these bytes."""
        node, found = self._root.descendant_for_byte_range(start, end), set()
        while node:
            found.add(node.type)
            node = node.parent
        return found

    def _read(self) -> None:
        """Collect commands and comments in the order of the source."""
        stack = [_Place(self._root)]
        while stack:
            place = stack.pop()
            node = place.node
            if node.type == "comment":
                self.comments.append(Word(self._raw(node), self._line(node)))
            elif node.type in _COMMANDS:
                words = tuple(self._words(node))
                if words:
                    self.commands.append(Command(words, place.inside, place.operator))
            stack += _children(place)

    def _words(self, node: Node) -> Iterator[Word]:
        """Words of a command, and those that the grammar takes for further targets of a redirection."""
        parts = [node] if node.type == "variable_assignment" else node.children
        for part in [*parts, *_words_after_redirections(node)]:
            if part.type not in (*_REDIRECTS, "comment", "do_group", ";"):
                quoted = re.search(rb"[\"']|\\(?!\n)", self._source[part.start_byte : part.end_byte])
                yield Word(self._text(part), self._line(part), bool(quoted))

    def _line(self, node: Node) -> int:
        return self._first_line + node.start_point[0]

    def _raw(self, node: Node) -> str:
        return self._slice(node.start_byte, node.end_byte)

    def _slice(self, start: int, end: int) -> str:
        return self._source[start:end].decode(errors="surrogateescape")

    def _text(self, node: Node) -> str:
        """A word without quotes and escapes; expansions stay as written, with LATER where this shell expands none."""
        raw = self._raw(node)
        if node.type in ("raw_string", "ansi_c_string"):
            return raw[raw.index("'") + 1 : -1].replace(self._dollar, LATER)
        if node.type == "word":
            return self._unescape(raw, ".")
        if node.type == "string":
            return self._double_quoted(node)
        if node.type == "command_substitution" and raw.startswith("`"):
            return f"{self._dollar}({raw[1:-1]})"
        if node.type in ("concatenation", "variable_assignment", "command_name"):
            return "".join(self._text(child) for child in node.children)
        return raw

    def _double_quoted(self, node: Node) -> str:
        """The text between double quotes: expansions, and literal pieces between them."""
        text, position = "", node.start_byte + 1
        for child in node.named_children:
            if child.type != "string_content":
                text += self._literal(position, child.start_byte) + self._text(child)
                position = child.end_byte
        end = node.end_byte - 1 if self._raw(node).endswith('"') else node.end_byte
        return text + self._literal(position, end)

    def _literal(self, start: int, end: int) -> str:
        return self._unescape(self._slice(start, end), rf'[$`"\\\n{LATER}]')

    def _unescape(self, text: str, escaped: str) -> str:
        """Without the backslashes before these characters, and without continued lines; an escaped dollar is LATER."""
        return re.sub(
            rf"\\({escaped})", lambda match: match[1].strip("\n").replace(self._dollar, LATER), text, flags=re.DOTALL
        )


def _children(place: _Place) -> Iterator[_Place]:
    """The named parts of a node that contains commands, from last to first."""
    node = place.node
    if node.type not in _CONTAINERS:
        return
    kind = _CONTAINERS[node.type]
    inside = place.inside | {kind} if kind else place.inside
    operator = place.operator if node.type in _TRANSPARENT else ""
    for child in reversed(node.children):
        if child.type in _OPERATORS:
            operator = child.type
        elif child.is_named:
            yield _Place(child, inside, operator)
            operator = operator if child.type in _REDIRECTS else ""
        if child.type in ("then", "do_group") and node.type != "for_statement":
            inside = inside | {"condition"}  # what is before "then" or "do"


def _words_after_redirections(node: Node) -> list[Node]:
    """Words such as b in `a > log b`."""
    parent = node.parent
    siblings = parent.children if parent and parent.type == "redirected_statement" else []
    redirects = [child for child in [*node.children, *siblings] if child.type == "file_redirect"]
    return [word for redirect in redirects for word in redirect.children_by_field_name("destination")[1:]]


def program_name(word: str) -> str:
    """The last part of a path."""
    return word.rsplit("/", 1)[-1]


def variables(text: str, dollar: str = "") -> list[str]:
    """Names of the variables that a text refers to; of those with this dollar sign (NOW, LATER), or of all."""
    return re.findall(rf"{re.escape(dollar) or DOLLAR}\{{?(\w+)", text)


def as_written(text: str) -> str:
    """The text as a person writes it: with "$" for every dollar sign."""
    return text.replace(LATER, NOW)
