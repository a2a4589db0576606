"""The shell language of a batch script, parsed by tree-sitter's grammar of bash: commands, their words, and comments.

A word is a sequence of parts without quotes. It is known of each part whether it is an expansion by the batch shell, or
text that the batch shell leaves as it is. A dollar sign in such text, as in '$HOME', stays literal, or a later shell
expands it, such as that of `bash -c`.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

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
_ESCAPED_IN_QUOTES = r'[$`"\\\n]'  # by a backslash between double quotes
_ESCAPED_IN_HEREDOC = r"[$`\\\n]"
# After <<EOF, the grammar takes operators for parts of redirections: 2>&1 | tee log. They are read from the text.
_REDIRECTION = re.compile(r"\d*[<>]+&?\s*[\w./$-]+|&>+\s*[\w./$-]+")
_OPERATOR = re.compile(r"\|\||&&|\|&|[|&;]")
_REDIRECTS = ("file_redirect", "herestring_redirect", "heredoc_redirect")
# The grammar's scanner calls isalnum() with code points, and crashes beyond C's table (tree-sitter-bash 0.25.1). To
# bash such characters are plain parts of words, as a dot is; words are cut from the source, at the same places.
_ASCII = bytes(range(128)) + b"." * 128


class Part(NamedTuple):
    """A piece of a word. now: an expansion by the batch shell, as written; else text that it does not expand."""

    text: str
    now: bool = False


Parts = tuple[Part, ...]


def merge(parts: Iterable[Part]) -> Parts:
    """Without empty parts, and with one part in place of neighbours of one kind."""
    merged: list[Part] = []
    for part in parts:
        if merged and merged[-1].now is part.now:
            merged[-1] = Part(merged[-1].text + part.text, part.now)
        elif part.text:
            merged.append(part)
    return tuple(merged)


def plain(parts: Parts) -> str:
    """The text as a person writes it, without quotes."""
    return parts[0].text if len(parts) == 1 else "".join([part.text for part in parts])


def after(parts: Parts, length: int) -> Parts:
    """The parts after so many characters."""
    rest = []
    for part in parts:
        if len(part.text) > length:
            rest.append(Part(part.text[length:], part.now))
        length = max(0, length - len(part.text))
    return tuple(rest)


class Word(NamedTuple):
    """A word without its quotes. quoted: whether any part of it was quoted."""

    parts: Parts
    line: int
    quoted: bool = False

    @property
    def text(self) -> str:
        """The complete text."""
        return plain(self.parts)


@dataclass(frozen=True)
class Setting:
    """A name with a value: an assignment, or an option of a launcher."""

    name: str
    parts: Parts
    line: int

    @property
    def value(self) -> str:
        """The complete value."""
        return plain(self.parts)

    def references(self, now: bool) -> list[str]:
        """Names of the variables in the value that the batch shell expands (`now`), or that only a later shell does."""
        return [name for part in self.parts if part.now is now for name in variables(part.text)]

    def later_matches(self, pattern: str) -> bool:
        """Whether something in the value that only a later shell expands matches a regular expression."""
        return any(not part.now and re.search(pattern, part.text) for part in self.parts)


@dataclass(frozen=True)
class Command:
    """A simple command.

    inside: what contains it, such as "if", "condition", "function", "function NAME". operator: the one after it, such
    as "|", or "". stdin: the text that << or <<< gives it.
    """

    words: tuple[Word, ...]
    inside: frozenset[str]
    operator: str
    stdin: Word | None = None

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


class Comment(NamedTuple):
    """From # to the end of the line."""

    text: str
    line: int


class _Place(NamedTuple):
    """A node of the syntax tree with what contains it and what follows it, as a Command has them."""

    node: Node
    inside: frozenset[str] = frozenset()
    operator: str = ""


class Code:
    """Shell code as bash reads it: `commands` and `comments`. What is not valid is left out, up to what is.

    expanded: of code that only a later shell reads, the ranges of bytes that the batch shell has expanded before; None
    for code of the batch shell. first_line: the line number of the text's first line.
    """

    def __init__(self, text: str, expanded: Sequence[range] | None = None, first_line: int = 1) -> None:
        self.commands: list[Command] = []
        self.comments: list[Comment] = []
        self._source = text.encode(errors="surrogateescape")
        self._expanded = expanded
        self._first_line = first_line
        self._root = _PARSER.parse(self._source.translate(_ASCII) + b"\n").root_node
        self._read()

    @classmethod
    def of_later_shell(cls, parts: Parts, first_line: int) -> "Code":
        """Code in a word, for the shell of `bash -c`."""
        ends = list(itertools.accumulate(len(part.text.encode(errors="surrogateescape")) for part in parts))
        ranges = [range(start, end) for part, start, end in zip(parts, [0, *ends], ends, strict=False) if part.now]
        return cls(plain(parts), ranges, first_line)

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
                self.comments.append(Comment(self._raw(node), self._line(node)))
            elif node.type in _COMMANDS:
                words = tuple(self._words(node))
                if words:
                    operator = self._operator_after_heredoc(node) or place.operator
                    self.commands.append(Command(words, place.inside, operator, self._stdin(node)))
            stack += _children(place)
        self._pass_on_stdin()

    def _pass_on_stdin(self) -> None:
        """The text of `cat <<EOF | bash` is given to bash."""
        for index, (command, following) in enumerate(itertools.pairwise(self.commands), 1):
            if command.text == "cat" and command.stdin and command.operator == "|":
                self.commands[index] = replace(following, stdin=command.stdin)

    def _stdin(self, node: Node) -> Word | None:
        for redirect in _redirects(node, "herestring_redirect"):
            return Word(merge(self._parts(redirect.children[-1])), self._line(redirect), quoted=True)
        for redirect in _redirects(node, "heredoc_redirect"):
            for body in (child for child in redirect.children if child.type == "heredoc_body"):
                literal = re.search(r"['\"\\]", self._raw(redirect.children[1]))
                parts = self._heredoc(body) if not literal else self._cut(body.start_byte, body.end_byte, now=False)
                return Word(merge(parts), self._line(body), quoted=True)
        return None

    def _operator_after_heredoc(self, node: Node) -> str:
        for redirect in _redirects(node, "heredoc_redirect"):
            rest, _, _ = self._slice(redirect.children[1].end_byte, redirect.end_byte).partition("\n")
            match = _OPERATOR.search(_REDIRECTION.sub("", rest))
            return match[0] if match else ""
        return ""

    def _words(self, node: Node) -> Iterator[Word]:
        """Words of a command, and those that the grammar takes for further targets of a redirection."""
        parts = [node] if node.type == "variable_assignment" else node.children
        word, end = None, 0
        for part in [*parts, *_words_after_redirections(node)]:
            if part.type in (*_REDIRECTS, "comment", "do_group", ";"):
                continue
            quoted = bool(re.search(rb"[\"']|\\(?!\n)", self._source[part.start_byte : part.end_byte]))
            following = Word(merge(self._parts(part)), self._line(part), quoted)
            if word and self._source[end : part.start_byte] == b"\\\n":  # a word that is continued on the next line
                following = Word(merge([*word.parts, *following.parts]), word.line, word.quoted or quoted)
            elif word:
                yield word
            word, end = following, part.end_byte
        if word:
            yield word

    def _line(self, node: Node) -> int:
        return self._first_line + node.start_point[0]

    def _raw(self, node: Node) -> str:
        return self._slice(node.start_byte, node.end_byte)

    def _slice(self, start: int, end: int) -> str:
        return self._source[start:end].decode(errors="surrogateescape")

    def _parts(self, node: Node) -> Iterator[Part]:
        """The parts of a word without quotes and escapes; expansions as written, `a` as $(a)."""
        raw, start, end = self._raw(node), node.start_byte, node.end_byte
        if node.type in ("raw_string", "ansi_c_string"):
            yield from self._cut(start + raw.index("'") + 1, end - 1, now=False)
        elif node.type == "word":
            yield from self._unescaped(start, end, ".")
        elif node.type == "string":
            yield from self._double_quoted(node)
        elif node.type in ("concatenation", "variable_assignment", "command_name"):
            for child in node.children:
                yield from self._parts(child)
        else:
            parts = self._cut(start, end, now="$" in raw or "`" in raw)
            yield from (Part(f"$({text[1:-1]})" if text.startswith("`") else text, now) for text, now in parts)

    def _double_quoted(self, node: Node) -> Iterator[Part]:
        end = node.end_byte - 1 if self._raw(node).endswith('"') else node.end_byte
        yield from self._with_expansions(node, node.start_byte + 1, end, _ESCAPED_IN_QUOTES)

    def _heredoc(self, body: Node) -> Iterator[Part]:
        yield from self._with_expansions(body, body.start_byte, body.end_byte, _ESCAPED_IN_HEREDOC)

    def _with_expansions(self, node: Node, position: int, end: int, escaped: str) -> Iterator[Part]:
        """Expansions between two bytes, and literal text between them."""
        for child in node.named_children:
            if child.type not in ("string_content", "heredoc_content"):
                yield from self._unescaped(position, child.start_byte, escaped)
                yield from self._parts(child)
                position = child.end_byte
        yield from self._unescaped(position, end, escaped)

    def _unescaped(self, start: int, end: int, escaped: str) -> Iterator[Part]:
        """Literal text without the backslashes before these characters, and without continued lines."""
        for part in self._cut(start, end, now=False):
            text = part.text
            if "\\" in text:
                text = re.sub(rf"(?s)\\({escaped})", lambda match: match[1].strip("\n"), text)
            yield Part(text, part.now)

    def _cut(self, start: int, end: int, now: bool) -> Iterator[Part]:
        """The source between two bytes. now: whether the shell that reads this code expands it."""
        if self._expanded is None:
            yield Part(self._slice(start, end), now)
            return
        edges = {edge for known in self._expanded for edge in (known.start, known.stop) if start < edge < end}
        for left, right in itertools.pairwise(sorted({start, end} | edges)):
            yield Part(self._slice(left, right), any(left in known for known in self._expanded))


def _children(place: _Place) -> Iterator[_Place]:
    """The named parts of a node that contains commands, from last to first."""
    node = place.node
    if node.type not in _CONTAINERS:
        return
    kind = _CONTAINERS[node.type]
    inside = place.inside | {kind} if kind else place.inside
    if kind == "function" and (name := node.child_by_field_name("name")) and name.text:
        inside = inside | {f"function {name.text.decode(errors='replace')}"}
    operator = place.operator if node.type in _TRANSPARENT else ""
    for child in reversed(node.children):
        if child.type in _OPERATORS:
            operator = child.type
        elif child.is_named:
            yield _Place(child, inside, operator)
            operator = operator if child.type in _REDIRECTS else ""
        if child.type in ("then", "do_group") and node.type != "for_statement":
            inside = inside | {"condition"}  # what is before "then" or "do"


def _redirects(node: Node, kind: str) -> list[Node]:
    """The redirections of a command that are of this type."""
    parent = node.parent
    siblings = parent.children if parent and parent.type == "redirected_statement" else []
    return [child for child in [*node.children, *siblings] if child.type == kind]


def _words_after_redirections(node: Node) -> list[Node]:
    """Words such as b in `a > log b`."""
    redirects = _redirects(node, "file_redirect")
    return [word for redirect in redirects for word in redirect.children_by_field_name("destination")[1:]]


def program_name(word: str) -> str:
    """The last part of a path."""
    return word.rsplit("/", 1)[-1]


def variables(text: str) -> list[str]:
    """Names of the variables to which a text refers."""
    return re.findall(r"\$\{?(\w+)", text)
