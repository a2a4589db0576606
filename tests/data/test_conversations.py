import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.data.conversations import COLUMNS, FORMATS, Conversation, Rejected, convert

USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
TREE = {
    "message_tree_id": "t",
    "prompt": {"message_id": "t", "role": "prompter", "text": "Hi", "lang": "en"}
    | {"replies": [{"message_id": "r", "role": "assistant", "text": "Hello.", "lang": "en"}]},
}
ROWS = {
    "oasst_trees": TREE,
    "oasst_messages": TREE,
    "messages": {"messages": [USER, REPLY]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
    "alpaca": {"instruction": "Hi", "input": "", "output": "Hello."},
    "prompt_completion": {"prompt": "Hi", "completion": "Hello."},
}


def reason(row, source_format="messages", **more):
    with pytest.raises(Rejected) as caught:
        convert(row, source_format, "f:1", **more)
    return str(caught.value)


@pytest.mark.parametrize("source_format", ROWS)
def test_every_format_gives_the_same_messages(source_format):
    made = convert(ROWS[source_format], source_format, "f:1")
    assert made.messages == (USER, REPLY)
    assert made.id == ("t" if "oasst" in source_format else "f:1")


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"conversations": [USER, REPLY], "messages": None}, [USER, REPLY]),
        ({"messages": [USER, REPLY], "system": "Be brief."}, [{"role": "system", "content": "Be brief."}, USER, REPLY]),
        ({"messages": [{"role": "system", "content": "S"}, USER, REPLY], "system": "T"}, None),
        # A table has every column in every row, null where the row has none.
        ({"messages": [m | {"from": None, "value": None, "tool_calls": None} for m in (USER, REPLY)]}, [USER, REPLY]),
        ({"messages": [USER | {"content": [{"type": "text", "text": t} for t in "Hi"]}, REPLY]}, [USER, REPLY]),
        ({"messages": [USER, REPLY, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, REPLY]}, None),
    ],
)
def test_chat_rows_as_people_have_them(row, messages):
    assert list(convert(row, "messages", "f:1").messages) == (messages or row["messages"])


@pytest.mark.parametrize(
    ("source_format", "row", "contents"),
    [
        ("alpaca", {"instruction": "Add.", "input": "1 2", "output": "3"}, ["Add.\n1 2", "3"]),
        ("alpaca", {"instruction": "Add.", "input": " ", "output": "3", "system": "S"}, ["S", "Add.", "3"]),
        ("alpaca", {"instruction": "c", "output": "d", "history": [["a", "b"]]}, ["a", "b", "c", "d"]),
        ("prompt_completion", {"prompt": [USER], "completion": [REPLY]}, ["Hi", "Hello."]),
        ("text", {"text": "A page.", "meta": {"redpajama_set_name": "RedPajamaC4"}}, ["A page."]),
        ("text", {"content": "x = 1\n", "max_stars_repo_path": "a.py", "id": "7"}, ["x = 1\n"]),
    ],
)
def test_other_formats_as_people_have_them(source_format, row, contents):
    assert FORMATS[source_format].fits(row) and row.keys() & COLUMNS
    assert [m["content"] for m in convert(row, source_format, "f:1").messages] == contents


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (None, "no messages"),
        ("text", "no messages"),
        ([], "no messages"),
        ([USER, "text"], "message is not an object"),
        ([USER], "no reply"),
        ([USER, USER, REPLY], "two messages of one role in a row"),
        ([USER, REPLY, REPLY], "two messages of one role in a row"),
        ([REPLY, USER, REPLY], "roles out of order"),
        ([USER, {"role": "system", "content": "S"}, REPLY], "roles out of order"),
        ([USER, REPLY | {"role": "function"}], "unknown role"),
        ([USER, REPLY | {"role": ["assistant"]}], "unknown role"),
        ([USER, {"content": "x"}], "unknown role"),
        ([USER, REPLY | {"content": None}], "empty message"),
        ([USER, REPLY | {"content": ""}], "empty message"),
        ([USER, REPLY | {"content": " \n"}], "empty message"),
        ([USER, REPLY | {"content": []}], "empty message"),
        ([USER, REPLY | {"content": 5}], "content is not text"),
        ([USER, REPLY | {"content": {"parts": ["x"]}}], "content is not text"),
        ([USER, REPLY | {"content": [{"type": "image_url", "image_url": "x"}]}], "image or other non-text content"),
        ([USER, REPLY | {"content": ["x"]}], "image or other non-text content"),
        ([USER, REPLY | {"content": "a\ud800"}], "lone surrogate"),
        ([USER, REPLY | {"content": "a\0"}], "NUL character"),
        ([USER, REPLY | {"content": None, "tool_calls": [{"name": "f"}]}], "tool calls"),
    ],
)
def test_a_chat_row_that_cannot_be_trained_on_says_why(messages, why):
    assert reason({"messages": messages}) == why


@pytest.mark.parametrize(
    ("source_format", "row", "why"),
    [
        ("alpaca", {"instruction": "a", "output": None}, "empty message"),
        ("alpaca", {"instruction": "a", "output": "b", "history": ["xy"]}, "history is not pairs"),
        ("prompt_completion", {"prompt": {"a": 1}, "completion": "b"}, "content is not text"),
        ("text", {"text": ""}, "empty message"),
        ("text", {}, "empty message"),
        ("text", [1], "not an object"),
        ("oasst_trees", {"prompt": "x", "message_tree_id": "t"}, "message is not an object"),
        ("oasst_trees", TREE | {"prompt": TREE["prompt"] | {"replies": None}}, "no reply"),
        ("oasst_trees", TREE | {"prompt": TREE["prompt"] | {"deleted": True}}, "deleted or spam"),
        ("oasst_trees", TREE | {"prompt": TREE["prompt"] | {"role": "assistant"}}, "two messages of one role in a row"),
        ("oasst_trees", TREE | {"prompt": TREE["prompt"]["replies"][0]}, "roles out of order"),
    ],
)
def test_a_row_of_another_format_says_why(source_format, row, why):
    assert reason(row, source_format) == why


def test_a_row_in_another_language_is_rejected_and_one_that_does_not_say_is_kept():
    row = ROWS["messages"]
    assert reason(row | {"lang": "de"}, lang="en") == reason(TREE, "oasst_trees", lang="de") == "other language"
    assert convert(row, "messages", "f:1", "en").lang == "" and convert(TREE, "oasst_trees", "f:1", "en").lang == "en"


def test_the_group_is_the_tree_or_what_the_row_says_or_else_the_prompt():
    row = ROWS["messages"]
    same, other = row | {"id": 0}, {"messages": [USER | {"content": "Other"}, REPLY]}
    first, second, third = (convert(r, "messages", "f:1") for r in (row, same, other))
    assert first.group == second.group == first.prompt_key() != third.group
    assert second.id == "0"
    assert convert(row | {"group": "g"}, "messages", "f:1").group == "g"
    assert convert(TREE, "oasst_trees", "f:1").group == "t"


def test_the_prompt_key_is_of_everything_before_the_first_reply():
    def key(*messages):
        return Conversation("i", "g", messages).prompt_key()

    assert key(USER, REPLY) == key(USER, REPLY | {"content": "Other"}) == key(USER, REPLY, USER, REPLY)
    system = {"role": "system", "content": "Hi"}
    text = [{"role": "text", "content": c} for c in "ab"]
    assert len({key(USER), key(system), key(system, USER), key(text[0]), key(text[1])}) == 5


def test_an_id_with_a_lone_surrogate_can_be_written_into_a_report():
    assert convert(ROWS["messages"] | {"id": "\udcff"}, "messages", "f:1").id == "\\udcff"


json_values = st.recursive(
    st.sampled_from([None, True, 0, -1, 2.5, float("nan"), "", " ", "x", "system", "assistant", "\0", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(COLUMNS)), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(sorted(FORMATS)), st.data())
def test_a_row_with_anything_anywhere_is_converted_or_rejected(source_format, data):
    row = dict(ROWS.get(source_format, {"text": "x"}))
    for key in data.draw(st.lists(st.sampled_from([*row, "system", "group", "id", "lang"]), max_size=2)):
        row[key] = data.draw(json_values)
    try:
        made = convert(row, source_format, "f:1", data.draw(st.sampled_from(["", "en"])))
    except Rejected as error:
        assert str(error)
    else:
        assert made.id and made.group and made.messages
        f"{made}".encode()  # nothing in it that a file or a tokenizer could not take
