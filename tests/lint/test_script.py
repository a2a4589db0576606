"""How sbatch reads directives and bash reads commands. The directive facts were tried on sbatch 22.05.8."""

import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.lint.script import SRUN, Script
from kit.lint.shell import LATE, Code, directives, options


def header(*rows: str) -> list[list[str]]:
    return [words for _, words in directives("\n".join(["#!/bin/bash", *rows, "hostname", ""]))]


def words(text: str) -> list[list[str]]:
    return [[w.text.replace(LATE, "§") for w in c.words] for c in Code(text).commands]


def value(directive: str, name: str) -> str:
    return Script(f"#!/bin/bash\n#SBATCH {directive}\nhostname\n").value(name)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("#SBATCH --nodes=5", ["--nodes=5"]),
        ("#SBATCH --nodes=5 # comment", ["--nodes=5"]),
        ("#SBATCH --job-name=a#b", ["--job-name=a"]),
        ("#SBATCH--nodes=5", ["--nodes=5"]),
        ("#SBATCH --job-name='x # y' -N 2", ["--job-name=x # y", "-N", "2"]),
        ('#SBATCH --job-name="a b"', ["--job-name=a b"]),
        ("#SBATCH --nodes=4 \\", ["--nodes=4"]),
        ("#SBATCH --nodes\u00a0=4", ["--nodes\u00a0=4"]),
        ("#SBATCH", []),
    ],
)
def test_a_directive_is_split_as_sbatch_splits_it(row: str, expected: list[str]) -> None:
    assert header(row) == [expected]


@pytest.mark.parametrize("row", ["##SBATCH -N 2", " #SBATCH -N 2", "# SBATCH -N 2", "#sbatch -N 2", "#SABTCH -N 2"])
def test_what_only_looks_like_a_directive_is_ignored(row: str) -> None:
    assert header(row, "#SBATCH -n 1") == [["-n", "1"]]


def test_directives_end_at_the_first_command_but_not_at_blank_lines_and_comments() -> None:
    assert header("", "# text", "  # text", "#SBATCH -n 1", "set -e", "#SBATCH -n 2") == [["-n", "1"]]


def test_the_last_duplicate_wins() -> None:
    assert value("--nodes=2 -N 3", "nodes") == "3"


def test_unambiguous_abbreviations_and_all_short_forms_pass() -> None:
    found, rest = options(["--out=a", "--err", "b", "-N2", "-n", "3", "-HO", "--nice=5", "x", "-c4"], 1)
    assert [(o.name, o.value, o.problem) for o in found] == [
        ("output", "a", ""),
        ("error", "b", ""),
        ("nodes", "2", ""),
        ("ntasks", "3", ""),
        ("hold", "", ""),
        ("overcommit", "", ""),
        ("nice", "5", ""),
    ]
    assert rest == ["x", "-c4"]


@pytest.mark.parametrize("word", ["--no=1", "--ntask=2", "--bogus=1", "--requeue=1", "--nodes", "-j", "-jx=1"])
def test_what_getopt_refuses_is_a_problem_and_hides_no_other_option(word: str) -> None:
    found, rest = options([*word.split(), "-n3"] if word != "--nodes" else ["-n3", word], 1)
    assert [o.name for o in found if not o.problem] == ["ntasks"]
    assert len([o for o in found if o.problem]) == 1 and rest == []


def test_the_refused_word_is_the_right_one() -> None:
    found, _ = options(["--nodes=2", "--no=1", "-Jjob", "-jx", "-n3"], 1)
    assert [(o.name, o.value) for o in found if not o.problem] == [("nodes", "2"), ("job-name", "job"), ("ntasks", "3")]
    assert [o.value for o in found if o.problem] == ["--no=1", "-jx"]


def test_srun_has_options_of_its_own() -> None:
    found, rest = options(["-K1", "-u", "--cpu-bind=none", "-l", "python", "-u"], 1, SRUN)
    assert [o.name for o in found] == ["kill-on-bad-exit", "unbuffered", "cpu-bind", "label"]
    assert rest == ["python", "-u"]


@pytest.mark.parametrize(
    ("time", "hours"),
    [
        ("15", 0.25),
        ("72", 1.2),
        ("90:00", 1.5),
        ("1:30:00", 1.5),
        ("2-0", 48),
        ("1-12:30", 36.5),
        ("1-00:00:36", 24.01),
        ("UNLIMITED", 0),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(time: str, hours: float) -> None:
    assert Script(f"#!/bin/bash\n#SBATCH --time={time}\n").hours == pytest.approx(hours)


@pytest.mark.parametrize(
    ("options_", "gpus"),
    [
        ("--gres=gpu:8", 8),
        ("--gres=gpu:a100:4,nvme:1", 4),
        ("--gres=gpu", 1),
        ("--gpus-per-node=h100:4", 4),
        ("-G 4", 4),
        ("-N2 -G 4", None),
        ("--gres=gpu:a100_1g.5gb:2", None),
        ("-n 4", None),
    ],
)
def test_gpus_are_counted_per_node(options_: str, gpus: int | None) -> None:
    assert Script(f"#!/bin/bash\n#SBATCH {options_}\n").gpus == gpus


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
def test_a_heredoc_holds_no_commands(opener: str) -> None:
    indent = "\t" if "-" in opener else ""
    text = f"cat {opener} > job.sh && a\n#SBATCH -N 2\nsrun 'x\n{indent}EOF\nb\n"
    assert words(text) == [["cat"], ["a"], ["b"]]
    assert Code(text).comments == []


def test_a_here_string_is_no_heredoc() -> None:
    assert words("b <<< 'c'\nd") == [["b"], ["d"]]


def test_words_and_comments_know_their_lines() -> None:
    code = Code("a \\\n b 'c\nd' e # f\n\ncat <<X\n1\n2\nX\ng", line=11)
    assert [(w.text, w.line) for c in code.commands for w in c.words] == [
        ("a", 11),
        ("b", 12),
        ("c\nd", 12),
        ("e", 13),
        ("cat", 15),
        ("g", 19),
    ]
    assert [(c.text, c.line) for c in code.comments] == [("# f", 13)]


def test_a_command_knows_what_surrounds_it() -> None:
    text = "if a; then b | c; else d & fi\nwhile e; do (f); done\ng() { h; }; i"
    found = {c.words[0].text: (c.inside, c.end) for c in Code(text).commands}
    assert found["a"] == ({"if", "condition"}, ";")
    assert found["b"] == ({"if"}, "|")
    assert found["c"] == ({"if"}, ";")
    assert found["d"] == ({"if", "else"}, "&")
    assert found["e"] == ({"while", "condition"}, ";")
    assert found["f"] == ({"while", "do", "subshell"}, "")
    assert found["h"] == ({"function", "compound"}, ";")
    assert found["i"] == (set(), "")


def steps(body: str) -> list[tuple[str, list[str]]]:
    script = Script("#!/bin/bash\n" + body)
    return [(s.program, [t.replace(LATE, "§") for t in s.texts]) for s in script.steps]


@pytest.mark.parametrize(
    ("body", "program", "texts"),
    [
        ('C="a b"\n$C c', "a", ["a", "b", "c"]),
        ('C="a b"\nx "$C"', "x", ["x", "a b"]),
        ('A=(b "c d")\na "${A[@]}"', "a", ["a", "b", "c", "d"]),
        ("X=1\nX=2\na $X", "a", ["a", "2"]),
        ("X=1\nif b; then X=2; fi\na $X", "a", ["a", "$X"]),
        ("for X in 1 2; do a $X; done", "a", ["a", "$X"]),
        ("X=\n$X\na $X b", "a", ["a", "b"]),
        ("A=1 srun -n2 env B=1 numactl -N 0 python3 -m torch.distributed.run x.py", "torchrun", ["python3", "-m"]),
        ("uv run accelerate launch x.py", "accelerate", ["accelerate", "launch", "x.py"]),
        ("accelerate config", "", ["accelerate", "config"]),
        ("L='torchrun x.py'\nsrun bash -lc \"exec $L\"", "torchrun", ["torchrun", "x.py"]),
        ("eval \"torchrun $A '$B'\"", "torchrun", ["torchrun", "$A", "§B"]),
        ('srun bash -c "a \\$SLURM_PROCID $SLURM_NODEID"', "a", ["a", "§SLURM_PROCID", "$SLURM_NODEID"]),
        ("export R=$SLURM_NODEID\nsrun bash -c 'a $R $S'", "a", ["a", "$SLURM_NODEID", "§S"]),
        ('srun bash -c "a $(b c) d"', "a", ["a", "$(b c)", "d"]),
    ],
)
def test_a_step_is_what_runs_in_the_end(body: str, program: str, texts: list[str]) -> None:
    found = steps(body)[-1]
    assert found[0] == program
    assert found[1][: len(texts)] == texts


@pytest.mark.parametrize(
    ("directive", "command", "tasks"),
    [
        ("--nodes=2 --ntasks-per-node=8", "srun a", 8),
        ("--nodes=2 --ntasks-per-node=8", "srun --ntasks-per-node=1 a", 1),
        ("--nodes=2 --ntasks=16", "srun a", 8),
        ("--nodes=2", "srun -n 4 a", 2),
        ("--nodes=2 --ntasks-per-node=8", "srun -N1 -n1 a", 1),
        ("--nodes=2 --ntasks-per-node=8", "srun -n $N a", None),
        ("--nodes=2", "srun a", 1),
    ],
)
def test_tasks_on_a_node_follow_srun_before_the_directives(directive: str, command: str, tasks: int | None) -> None:
    script = Script(f"#!/bin/bash\n#SBATCH {directive}\n{command}\n")
    assert script.tasks_per_node(script.steps[0]) == tasks


PIECES = [*"ab $\"'`\\(){}[]<>|&;#=\n-\t!*@\x1a", "#SBATCH ", "EOF", "srun ", "bash -c ", "eval ", "<<", "$(", "${"]


@given(st.lists(st.sampled_from(PIECES)).map("".join))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read(text: str) -> None:
    lines = [c.line for c in Code(text).comments]
    assert lines == sorted(lines)
    Script(text)


def test_a_script_that_calls_itself_ends() -> None:
    assert len(Script('C=\'eval "$C"; eval "$C"\'\neval "$C"\n').steps) < 2000
    double = "".join(f'A{i + 1}="$A{i}$A{i}"\n' for i in range(40))
    assert max(len(a.value) for a in Script(f"A0=xxxxxxxx\n{double}").assigned) < 50_000


@given(st.lists(st.text(alphabet="ab '\"\\$#;|&<>()\n", max_size=8), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_words_quoted_for_bash_come_back_as_bash_sees_them(raw: list[str]) -> None:
    line = "printf '%s\\0' " + shlex.join(raw)
    seen = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    (command,) = Code(line).commands
    assert [w.text.replace(LATE, "$") for w in command.words[2:]] == seen == raw
