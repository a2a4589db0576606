"""The shell language of a batch script: words, quotes, heredocs, comments, and sbatch's directives and options."""

import bisect
import getopt
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

LATE = "\ue000"  # stands for a "$" that the batch shell leaves alone: quoted, escaped, or meant for a later shell

# Options as getopt knows them: short|long, "=" takes a value, "?" may take one.
# Source: sbatch(1) of 22.05; the last line came later (23.02 to 25.11).
SBATCH = """A|account= acctg-freq= a|array= batch= bb= bbf= b|begin= D|chdir= cluster-constraint= M|clusters= comment=
C|constraint= container= contiguous S|core-spec= cores-per-socket= cpu-freq= cpus-per-gpu= c|cpus-per-task= deadline=
delay-boot= d|dependency= m|distribution= e|error= x|exclude= exclusive? export= export-file= B|extra-node-info=
get-user-env? gid= gpu-bind= gpu-freq= G|gpus= gpus-per-node= gpus-per-socket= gpus-per-task= gres= gres-flags= h|help
hint= H|hold ignore-pbs i|input= J|job-name= kill-on-invalid-dep= L|licenses= mail-type= mail-user= mcs-label= mem=
mem-bind= mem-per-cpu= mem-per-gpu= mincpus= network= nice? k|no-kill? no-requeue F|nodefile= w|nodelist= N|nodes=
n|ntasks= ntasks-per-core= ntasks-per-gpu= ntasks-per-node= ntasks-per-socket= ntasks-per-tres= open-mode= o|output=
O|overcommit s|oversubscribe parsable p|partition= power= prefer= priority= profile= propagate? q|qos= Q|quiet reboot
requeue reservation= signal= sockets-per-node= spread-job switches= test-only thread-spec= threads-per-core= t|time=
time-min= tmp= uid= usage use-min-nodes v|verbose V|version W|wait wait-all-nodes= wckey= wrap=
container-id= extra= tres-bind= tres-per-task= oom-kill-step? segment= stepmgr resv-ports? consolidate-segments"""
# What srun takes beside them. Source: srun(1) of 22.05.
SRUN = """bcast? compress? cpu-bind= X|disable-status E|preserve-env epilog= exact het-group= I|immediate? jobid= mpi=
K|kill-on-bad-exit? l|label msg-timeout= multi-prog Z|no-allocate overlap prolog= pty? quit-on-interrupt r|relative=
task-epilog= task-prolog= T|threads= u|unbuffered x11? accel-bind="""
# What plug-ins add to both: pyxis (its README) and those of known sites.
SITE = """container-image? container-mounts? container-workdir? container-name? container-save? container-mount-home
no-container-mount-home container-remap-root no-container-remap-root container-entrypoint no-container-entrypoint
container-entrypoint-log container-writable container-readonly container-env? environment? image? volume? quotatype?
uenv? view? tmpdir?"""

_REDIRECT = r"\d*(?:<<<|<<-?|>>|>&|<&|<>|>\||[<>](?!\())|&>>?"
_OPERATOR = re.compile(_REDIRECT + r"|&&|\|\||;;&|;;|;&|\|&|[;&|()\n]")
_PLAIN = re.compile(r"[\w./:=,@%+\-]+")
FIELD = re.compile(r"(?:\$\((?:[^()]|\([^()]*\))*\)|\S)+")  # what word splitting leaves, but $(a b) stays one
_DIRECTIVE_WORD = re.compile(r"""#.*|(?:"[^"]*"|'[^']*'|\\\S|[^\s"'\\#])+|\S""", re.ASCII)


class Token(NamedTuple):
    """A word without its quotes, an operator, a comment or a heredoc's body. A quoted word is no keyword."""

    kind: str
    text: str
    line: int
    quoted: bool = False


class Command(NamedTuple):
    """A simple command: words, the compounds around it ("if" in its condition, "then" in its body), its operators."""

    words: tuple[Token, ...]
    inside: tuple[str, ...]
    before: str
    end: str


class Option(NamedTuple):
    """An option that sbatch reads, by its long name; a problem is getopt's reason to refuse it."""

    name: str
    value: str
    line: int
    problem: str = ""


def options(words: Sequence[str], line: int, table: str = SBATCH) -> tuple[list[Option], list[str]]:
    """The leading options by getopt's rules (abbreviations, `-N2`, `--nodes 2`), and the words after them."""
    known = re.findall(r"(?:(\w)\|)?([\w-]+)([=?]?)", table)
    long_of = {f"-{short}": name for short, name, _ in known if short}
    optional = {f"-{short}" for short, _, takes in known if short and takes == "?"}
    letters = "".join(short + ":" * (takes == "=") for short, _, takes in known if short)
    left, refused = list(words), []
    while True:
        given = {w.partition("=")[0] for w in left if "=" in w}  # getopt has no optional values before Python 3.14
        names = [name + "=" * (takes == "=" or (takes == "?" and f"--{name}" in given)) for _, name, takes in known]
        try:
            pairs, rest = getopt.getopt(left, letters, names)
        except getopt.GetoptError as error:
            at = _culprit(left, letters, names)
            if left[at][:2] in optional:
                left[at] = f"--{long_of[left[at][:2]]}={left[at][2:]}"
            else:
                refused.append(Option(error.opt, left.pop(at), line, error.msg))
        else:
            return [Option(long_of.get(n) or n.lstrip("-"), v, line) for n, v in pairs] + refused, rest


def _culprit(words: list[str], letters: str, names: list[str]) -> int:
    """The index of the word that getopt refuses."""
    for at in range(len(words)):
        try:
            getopt.getopt([*words[: at + 1], "value"], letters, names)
        except getopt.GetoptError:
            return at
    return len(words) - 1


def directives(text: str) -> Iterator[tuple[int, list[str]]]:
    """Line and words of each #SBATCH line that sbatch reads: it stops at the first line that is no comment."""
    for number, row in enumerate(text.split("\n"), 1):
        if row.startswith("#SBATCH"):
            words = [m[0] for m in _DIRECTIVE_WORD.finditer(row[7:]) if m[0] != "\\"]
            comment = next((i for i, w in enumerate(words) if w.startswith("#")), len(words))
            yield number, [re.sub(r"[\"']|\\(.)", r"\1", w) for w in words[:comment]]
        elif row.strip() and not row.lstrip().startswith("#"):
            return


def commands(tokens: Iterator[Token]) -> Iterator[Command]:
    """Simple commands in order of writing, without their redirections."""
    words: list[Token] = []
    inside: list[str] = []
    before, skip, function = "\n", False, False
    for token in itertools.chain(tokens, [Token("operator", "\n", 0)]):
        text, first = token.text, not words and not token.quoted
        if token.kind == "word" and skip:
            skip = False
        elif token.kind == "word" and first and text in ("if", "while", "until", "{", "for", "case", "select"):
            inside.append("function" if function else text)
            words += [token] if text in ("for", "case", "select") else []
            function = False
        elif token.kind == "word" and first and text in ("then", "else", "elif", "do") and inside:
            inside[-1] = "if" if text == "elif" else text
        elif token.kind == "word" and first and text in ("fi", "done", "esac", "}") and inside:
            inside.pop()
        elif token.kind == "word" or (words and words[0].text == "[[" and words[-1].text != "]]"):
            words += [] if first and text in ("!", "time") else [token]
        elif token.kind == "operator" and re.fullmatch(_REDIRECT, text):
            skip = True
        elif token.kind == "operator":
            if text == "(" and words:
                words, function = [], True
            elif text == "(":
                inside.append("(")
            elif text == ")" and (not inside or inside[-1] != "("):
                words = []
            if words:
                yield Command(tuple(words), tuple(inside), before, text)
            if text == ")" and inside and inside[-1] == "(":
                inside.pop()
            words, before, skip = [], text, False


class Lexer:
    """Bash's tokens. `dollar` is the character that expands here: LATE in text that only a later shell reads."""

    def __init__(self, text: str, dollar: str = "$", line: int = 1) -> None:
        self.text, self.dollar, self.first, self.pos = text + "\n", dollar, line, 0
        self.breaks = [m.start() for m in re.finditer("\n", text)]

    def __iter__(self) -> Iterator[Token]:
        heredocs: list[tuple[str, bool]] = []
        while self.pos < len(self.text):
            char, line = self.text[self.pos], self._line()
            if char in " \t\r" or self.text.startswith("\\\n", self.pos):
                self.pos += 1 + (char == "\\")
            elif char == "#":
                start, self.pos = self.pos, self._find("\n", self.pos)
                yield Token("comment", self.text[start : self.pos], line)
            elif self.text.startswith("((", self.pos):
                start, self.pos = self.pos, self._skip(self.pos + 1, ")")
                yield Token("word", self.text[start : self.pos], line, True)
            elif match := _OPERATOR.match(self.text, self.pos):
                self.pos = match.end()
                yield Token("operator", match[0], line)
                if match[0] == "\n":
                    yield from (self._heredoc(*h) for h in heredocs)
                    heredocs.clear()
                elif match[0].lstrip("0123456789") in ("<<", "<<-"):
                    self.pos += len(self.text[self.pos :]) - len(self.text[self.pos :].lstrip(" \t"))
                    word = self._word()
                    heredocs.append((word.text, match[0].endswith("-")))
                    yield word
            else:
                yield self._word()

    def _line(self) -> int:
        return self.first + bisect.bisect_left(self.breaks, self.pos)

    def _find(self, what: str, start: int) -> int:
        end = self.text.find(what, start)
        return len(self.text) if end < 0 else end

    def _heredoc(self, delimiter: str, indented: bool) -> Token:
        line, start = self._line(), self.pos
        tabs = r"\t*" if indented else ""
        end = re.compile(rf"^{tabs}{re.escape(delimiter)}$", re.MULTILINE).search(self.text, start)
        stop, self.pos = (end.start(), end.end()) if end else (len(self.text), len(self.text))
        return Token("heredoc", self.text[start:stop], line)

    def _word(self) -> Token:
        out, quoted, line = "", False, self._line()
        while self.pos < len(self.text) and (char := self.text[self.pos]) not in " \t\n\r;&|)":
            if char in "(<>":
                start, bracket = self.pos, self.text.find("(", self.pos, self.pos + 2)
                if bracket < 0 or (char == "(" and not re.fullmatch(r"\w+\+?=", out)) or (char != "(" and out):
                    break
                self.pos = self._skip(bracket + 1, ")")
                out += self.text[start : self.pos]
            elif char == "'":
                end = self._find("'", self.pos + 1)
                out += self.text[self.pos + 1 : end].replace(self.dollar, LATE)
                self.pos, quoted = end + 1, True
            elif char == '"':
                self.pos, quoted = self.pos + 1, True
                while self.pos < len(self.text) and self.text[self.pos] != '"':
                    out += self._piece(escapes='$`"\\' + self.dollar)
                self.pos += 1
            else:
                quoted |= char == "\\" and not self.text.startswith("\\\n", self.pos)
                out += self._piece()
        return Token("word", out, line, quoted)

    def _piece(self, escapes: str = "") -> str:
        """Plain characters, an escape or an expansion; in double quotes only `escapes` lose their backslash."""
        start, char, after = self.pos, self.text[self.pos], self.text[self.pos + 1 : self.pos + 2]
        if match := _PLAIN.match(self.text, start):
            self.pos = match.end()
        elif char == "\\" and after:
            self.pos += 2
            kept = after if not escapes or after in escapes else char + after
            return "" if after == "\n" else kept.replace(self.dollar, LATE)
        elif char in ("$", LATE) and after in ("(", "{"):
            self.pos = self._skip(start + 2, ")" if after == "(" else "}")
        elif char == "`":
            self.pos = self._find("`", start + 1) + 1
            return f"{self.dollar}({self.text[start + 1 : self.pos - 1]})"
        else:
            self.pos += 1
        return self.text[start : self.pos]

    def _skip(self, i: int, close: str) -> int:
        """The index after the bracket or quote that closes what was opened just before i."""
        while i < len(self.text) and (char := self.text[i]) != close:
            pair = char in ("$", LATE) and self.text[i + 1 : i + 2] in ("(", "{")
            if char == "'" and close != '"':
                i = self._find("'", i + 1) + 1
            elif char == "#" and close == ")" and self.text[i - 1] in " \n\t":
                i = self._find("\n", i)
            elif char == '"' or pair or (char == "(" and close == ")"):
                opened = self.text[i + pair]
                i = self._skip(i + 1 + pair, {"(": ")", "{": "}"}.get(opened, opened))
            else:
                i += 1 + (char == "\\")
        return min(i + 1, len(self.text))


def base(word: str) -> str:
    """A path's last part."""
    return word.rsplit("/", 1)[-1]


def number(text: str) -> int | None:
    """A plain whole number, else None."""
    return int(text) if text.isdecimal() else None
