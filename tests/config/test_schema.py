from pathlib import Path
from typing import Literal

import pytest

from kit.config.schema import coerce, describe, nearest, parse
from kit.errors import InputError


@pytest.mark.parametrize(
    ("value", "kind", "result"),
    [
        (1, float, 1.0), (1, int, 1), ("007", str, "007"), (True, bool, True), ("a/b", Path, Path("a/b")),
        (Path("a"), Path, Path("a")), ([1, 2], list[float], [1.0, 2.0]), ((1, 2), list[int], [1, 2]),
        (["a"], tuple[str, ...], ("a",)), (None, int | None, None), ("b", Literal["a", "b"], "b"),
        ("1", int | str, "1"), ({"a": 1}, dict[str, int], {"a": 1}),
    ],
)  # fmt: skip
def test_a_value_of_the_right_type_is_taken(value, kind, result):
    found = coerce(value, kind, "here")
    assert found == result and type(found) is type(result)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ("1", int, "here is '1'; it must be a whole number"), (1, bool, "here is 1; it must be true or false"),
        (True, int, "here is True; it must be a whole number"), (1.0, int, "here is 1.0; it must be a whole number"),
        ([1, "x"], list[int], "here[1] is 'x'; it must be a whole number"),
        ("c", Literal["a", "b"], "here is 'c'; Valid: a, b"), ("x", int | None, "it must be a whole number or none"),
        ({"a": "x"}, dict[str, int], "here.a is 'x'"), (object(), int, "which no key takes"),
    ],
)  # fmt: skip
def test_another_value_is_refused_with_its_place(value, kind, words):
    with pytest.raises(InputError) as caught:
        coerce(value, kind, "here")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kind", "result"),
    [
        ("false", bool, False), ("false", str, "false"), ("007", str, "007"), ("1e-5", float, 1e-5), ("3", int, 3),
        ("none", int | None, None), ("3", int | None, 3), ("a, b", tuple[str, ...], ("a", "b")),
        ('["a,b"]', list[str], ["a,b"]), ("1,2", list[int], [1, 2]), ("2", Literal[1, 2], 2),
        ("a/b", Path, Path("a/b")),
    ],
)  # fmt: skip
def test_text_is_read_by_the_type(text, kind, result):
    found = parse(text, kind, "here")
    assert found == result and type(found) is type(result)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("yes", bool), ("1.0", int), ("x", float), ("x", int | None), ("[1", list[int]), ("1,x", list[int])],
)  # fmt: skip
def test_other_text_is_refused(text, kind):
    with pytest.raises(InputError, match="here"):
        parse(text, kind, "here")


def test_a_type_is_described_in_words():
    assert describe(int | None) == "a whole number or none"
    assert describe(Literal["a", "b"]) == "'a' or 'b'"


def test_a_short_list_is_given_and_of_a_long_one_the_nearest_three():
    assert nearest("metod", ["method", "r"]) == "did you mean 'method'? Valid: method, r."
    names = [f"org/model-{number}" for number in range(100)]
    told = nearest("org/model-7x", names)
    assert told.count("org/") == 3 and "'org/model-7'" in told and "100 names" in told
    assert nearest("quite different", names) == "none of the 100 known names is close to it."
