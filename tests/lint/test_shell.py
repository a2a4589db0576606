"""Shell code is split into commands and words as bash splits it."""

import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.lint.script import Script
from kit.lint.shell import Code, Word


def marked(word: Word) -> str:
    """The text with § for each dollar sign that the batch shell does not expand."""
    return "".join(part.text if part.now else part.text.replace("$", "§") for part in word.parts)


def words(text: str) -> list[list[str]]:
    return [[marked(w) for w in c.words] for c in Code(text).commands]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a 'b c' \"d e\" f\\ g", [["a", "b c", "d e", "f g"]]),
        ("a \\\n  b", [["a", "b"]]),
        ("a # b\nc d#e '#f'", [["a"], ["c", "d#e", "#f"]]),
        ("a; b && c || d | e & f", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]),
        ("a > out 2>&1 < in &>> log b", [["a", "b"]]),
        ("x=1 y='a b' cmd", [["x=1", "y=a b", "cmd"]]),
        ('$A "$B" \'$C\' \\$D "\\$E"', [["$A", "$B", "§C", "§D", "§E"]]),
        (
            'a "$(b "c d" | e)" `f g` ${H:-"i j"} $((1 + 2))',
            [["a", '$(b "c d" | e)', "$(f g)", '${H:-"i j"}', "$((1 + 2))"]],
        ),
        ("a=(b 'c d' # don't\n e)", [["a=(b 'c d' # don't\n e)"]]),
        ("diff <(a b) >(c) d", [["diff", "<(a b)", ">(c)", "d"]]),
        (
            "if [[ $a == (b|c) && d ]]; then e; fi",
            [["[[", "$a == (b|c) && d", "]]"], ["e"]],
        ),
        ("for i in a b; do c; done", [["for", "i", "in", "a", "b"], ["c"]]),
        ("f() { a; }; (b); { c; }", [["a"], ["b"], ["c"]]),
        ("case $x in\n  a | e) b ;;\n  *) c ;;\nesac\nd", [["b"], ["c"], ["d"]]),
        ("echo if then fi", [["echo", "if", "then", "fi"]]),
        ("((i++)); a", [["a"]]),
        ("! time a", [["time", "a"]]),
        ("a b; it's never closed", [["a", "b"], ["it"]]),
        ("c; a $(b", [["c"], ["a", "$(b"]]),
    ],
)
def test_commands_are_split_as_bash_splits_them(text: str, expected: list[list[str]]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize("opener", ["<<EOF", "<< 'EOF'", '<<"EOF"', "<<-EOF", "<<\\EOF"])
def test_a_heredoc_contains_no_commands(opener: str) -> None:
    indent = "\t" if "-" in opener else ""
    text = f"cat {opener} > job.sh && a\n#SBATCH -N 2\nsrun 'x\n{indent}EOF\nb\n"
    assert words(text) == [["cat"], ["a"], ["b"]]
    assert Code(text).comments == []


def test_a_here_string_is_not_a_heredoc() -> None:
    assert words("b <<< 'c'\nd") == [["b"], ["d"]]


def test_words_and_comments_have_line_numbers() -> None:
    code = Code("a \\\n b 'c\nd' e # f\n\ncat <<X\n1\n2\nX\ng", first_line=11)
    assert [(w.text, w.line) for c in code.commands for w in c.words] == [
        ("a", 11),
        ("b", 12),
        ("c\nd", 12),
        ("e", 13),
        ("cat", 15),
        ("g", 19),
    ]
    assert [(c.text, c.line) for c in code.comments] == [("# f", 13)]


def test_a_command_has_its_enclosing_statements_and_operator() -> None:
    text = "if a; then b | c; else d & fi\nwhile e; do (f); done\ng() { h; }; i"
    found = {c.words[0].text: (c.inside, c.operator) for c in Code(text).commands}
    assert found["a"] == ({"if", "condition"}, ";")
    assert found["b"] == ({"if"}, "|")
    assert found["c"] == ({"if"}, ";")
    assert found["d"] == ({"if", "else"}, "&")
    assert found["e"] == ({"while", "condition"}, ";")
    assert found["f"] == ({"while", "do", "subshell"}, "")
    assert found["h"] == ({"function", "function g", "compound"}, ";")
    assert found["i"] == (set(), "")


PIECES = [*"ab $\"'`\\(){}[]<>|&;#=\n-\t!*@\x1a", "#SBATCH ", "EOF", "srun ", "bash -c ", "eval ", "<<", "$(", "${"]


@given(st.lists(st.sampled_from(PIECES)).map("".join))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read(text: str) -> None:
    lines = [c.line for c in Code(text).comments]
    assert lines == sorted(lines)
    Script(text)


@given(st.lists(st.text(alphabet="ab '\"\\$#;|&<>()\n", max_size=8), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_words_quoted_for_bash_are_read_as_bash_reads_them(raw: list[str]) -> None:
    line = "printf '%s\\0' " + shlex.join(raw)
    seen = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    (command,) = Code(line).commands
    assert [w.text for w in command.words[2:]] == seen == raw
