import json

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
        ({"messages": [USER | {"content": ["H", "i"]}, REPLY]}, [USER, REPLY]),
        ({"messages": [USER | {"content": [{"text": "H"}, {"type": "text", "value": "i"}]}, REPLY]}, [USER, REPLY]),
        # Empty values say nothing, in each way that writers have for that.
        ({"messages": [m | {"tool_calls": "[]", "function_call": {}} for m in (USER, REPLY)]}, [USER, REPLY]),
        ({"messages": [USER, REPLY], "tools": "[]", "images": [], "system": ""}, [USER, REPLY]),
        ({"messages": [USER, REPLY, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, REPLY]}, None),
    ],
)
def test_chat_rows_in_common_variants(row, messages):
    assert list(convert(row, "messages", "f:1").messages) == (messages or row["messages"])


@pytest.mark.parametrize(
    ("source_format", "row", "contents"),
    [
        ("alpaca", {"instruction": "Add.", "input": "1 2", "output": "3"}, ["Add.\n1 2", "3"]),
        ("alpaca", {"instruction": "Add.", "input": " ", "output": "3", "system": "S"}, ["S", "Add.", "3"]),
        ("alpaca", {"instruction": "c", "output": "d", "history": [["a", "b"]]}, ["a", "b", "c", "d"]),
        ("alpaca", {"instruction": "", "input": "Hi", "output": "3"}, ["Hi", "3"]),
        ("alpaca", {"instruction": None, "input": "Hi", "output": "3", "history": ""}, ["Hi", "3"]),
        ("alpaca", {"instruction": "Hi", "output": "3", "system_prompt": "S"}, ["S", "Hi", "3"]),
        ("prompt_completion", {"system": "S", "prompt": "Hi", "completion": "Hello."}, ["S", "Hi", "Hello."]),
        ("prompt_completion", {"prompt": ["Hi"], "completion": ["Hello."]}, ["Hi", "Hello."]),
        ("sharegpt", ROWS["sharegpt"] | {"system_prompt": "S"}, ["S", "Hi", "Hello."]),
        ("sharegpt", ROWS["sharegpt"] | {"system_message": "S", "system": None}, ["S", "Hi", "Hello."]),
        ("messages", ROWS["messages"] | {"instructions": "S"}, ["S", "Hi", "Hello."]),
        ("prompt_completion", {"prompt": [USER], "completion": [REPLY]}, ["Hi", "Hello."]),
        ("text", {"text": "A page.", "meta": {"redpajama_set_name": "RedPajamaC4"}}, ["A page."]),
        ("text", {"content": "x = 1\n", "max_stars_repo_path": "a.py", "id": "7"}, ["x = 1\n"]),
    ],
)
def test_other_formats_in_common_variants(source_format, row, contents):
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
        ([USER, REPLY | {"role": "critic"}], "unknown role 'critic'"),
        ([USER, REPLY | {"role": "\ud800" + "x" * 50}], "unknown role '\\\\ud800" + "x" * 39 + "'"),
        ([USER, REPLY | {"role": ["assistant"]}], """unknown role "['assistant']\""""),
        ([USER, REPLY | {"role": 0}], "unknown role '0'"),
        ([USER, {"content": "x"}], "message without a role"),
        ([USER, REPLY | {"content": None}], "empty message"),
        ([USER, REPLY | {"content": ""}], "empty message"),
        ([USER, REPLY | {"content": " \n"}], "empty message"),
        ([USER, REPLY | {"content": []}], "empty message"),
        ([USER, REPLY | {"content": 5}], "content is not text"),
        ([USER, REPLY | {"content": {"parts": ["x"]}}], "content is not text"),
        ([USER, REPLY | {"content": [{"type": "image_url", "image_url": "x"}]}], "image or other non-text content"),
        ([USER, REPLY | {"content": [{"type": "thinking", "thinking": "x"}]}], "content of type 'thinking'"),
        ([USER, REPLY | {"content": [5]}], "content is not text"),
        ([USER, REPLY | {"content": 0}], "content is not text"),
        ([USER, REPLY | {"content": False}], "content is not text"),
        ([USER, REPLY | {"content": "a\ud800"}], "lone surrogate"),
        ([USER, REPLY | {"content": "a\0"}], "NUL character"),
        ([USER, REPLY | {"content": None, "tool_calls": [{"id": "1"}]}], "tool call without a function's name"),
        ([USER, REPLY | {"content": None, "tool_calls": "f()"}], "tool calls are not a list"),
        ([USER, REPLY | {"content": None, "tool_calls": 0}], "tool calls are not a list"),
        ([USER, REPLY | {"weight": 0}], "every reply has weight 0"),
        ([USER, REPLY | {"masked": True}], "every reply has weight 0"),
    ],
)
def test_an_unusable_chat_row_is_rejected_with_a_reason(messages, why):
    assert reason({"messages": messages}) == why


@pytest.mark.parametrize(
    ("source_format", "row", "why"),
    [
        ("alpaca", {"instruction": "a", "output": None}, "empty message"),
        ("alpaca", {"instruction": "a", "output": "b", "history": ["xy"]}, "history is not pairs"),
        ("alpaca", {"instruction": "a", "output": "b", "history": 0}, "history is not pairs"),
        ("alpaca", {"instruction": "a", "input": 0, "output": "b"}, "content is not text"),
        ("alpaca", {"instruction": "a", "input": False, "output": "b"}, "content is not text"),
        ("alpaca", {"instruction": "a", "output": "b", "system": 0}, "content is not text"),
        ("alpaca", {"instruction": "a", "output": "b", "label": False}, "label false: an answer to avoid"),
        ("alpaca", {"instruction": "a", "output": "b", "kto_tag": False}, "kto_tag false: an answer to avoid"),
        ("messages", {"messages": [USER, REPLY], "weight": 0.0}, "weight 0.0: the row is not trained on"),
        ("messages", {"messages": [USER, REPLY], "train": False}, "train false: the row is not trained on"),
        ("messages", {"messages": [USER, REPLY], "images": ["a.png"]}, "image or other non-text content (images)"),
        ("messages", {"messages": [USER, REPLY], "tools": "f"}, "tools are not a list of objects"),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]}
            | {"image": "a.png"},
            "image or other non-text content (image)",
        ),
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
def test_a_row_of_another_format_is_rejected_with_a_reason(source_format, row, why):
    assert reason(row, source_format) == why


CALL = {"name": "weather", "arguments": {"town": "Oslo"}}
CALLING = REPLY | {"content": "", "tool_calls": [{"type": "function", "function": CALL}]}


@pytest.mark.parametrize(
    "turn",
    [
        {"content": None, "tool_calls": [{"type": "function", "function": CALL}]},
        {"content": "", "tool_calls": [{"type": "function", "function": CALL | {"arguments": '{"town": "Oslo"}'}}]},
        {"tool_calls": json.dumps([{"function": CALL | {"description": None}}]), "function_call": None},
        {"content": None, "function_call": CALL | {"arguments": '{"town": "Oslo"}'}},
    ],
)
def test_tool_calls_have_one_form_however_they_are_written(turn):
    made = convert(
        {"messages": [USER, {"role": "assistant", **turn}, {"role": "function", "content": "9"}, REPLY]},
        "messages",
        "f:1",
    )
    assert made.messages == (USER, CALLING, {"role": "tool", "content": "9"}, REPLY)
    assert made.unused == ()


@pytest.mark.parametrize("key", ["tools", "functions"])
def test_descriptions_of_tools_are_kept_with_the_conversation(key):
    function = {"name": "weather", "parameters": {}}
    tool = {"type": "function", "function": function}
    for tools in ([function], [tool], json.dumps([tool]), [tool | {"strict": None}]):
        assert convert(ROWS["messages"] | {key: tools}, "messages", "f:1").tools == (tool,)


@pytest.mark.parametrize(
    ("key", "value"),
    [("weight", 0), ("weight", 0.0), ("loss_weight", 0), ("train", False), ("loss", False), ("masked", True)],
)
def test_a_reply_without_weight_is_left_out_of_the_loss(key, value):
    made = convert({"messages": [USER, REPLY | {key: value}, USER, REPLY]}, "messages", "f:1")
    assert made.messages == (USER, REPLY | {"train": False}, USER, REPLY)
    assert made.unused == ()


def test_a_developer_message_is_the_system_text():
    made = convert({"messages": [{"role": "developer", "content": "S"}, USER, REPLY]}, "messages", "f:1")
    assert made.messages == ({"role": "system", "content": "S"}, USER, REPLY)


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"label": True, "weight": 1, "train": True}, ()),
        ({"label": 0, "score": 0, "chosen": "a", "rejected": "b"}, ("chosen", "label", "rejected", "score")),
        ({"weight": 0.5, "loss": 0.0}, ("loss", "weight")),
        ({"image": "a.png", "reasoning_content": "x"}, ("image", "reasoning_content")),
        ({"images": None, "label": None, "tools": "", "rejected": []}, ()),
        ({"messages": [{"role": "system", "content": "T"}, USER, REPLY], "system": "S"}, ("system",)),
        ({"messages": [{"role": "system", "content": "S"}, USER, REPLY], "system": "S"}, ()),
        ({"system": "S", "instructions": "T"}, ("instructions",)),
        ({"messages": [USER | {"weight": 0}, REPLY | {"weight": 1}]}, ()),
        ({"messages": [USER | {"weight": 1}, REPLY | {"weight": 0.5}]}, ("message.weight",)),
        ({"messages": [USER | {"train": True}, REPLY | {"loss": "no"}]}, ("message.loss", "message.train")),
        ({"messages": [USER | {"images": ["a"], "thinking": "x"}, REPLY]}, ("message.images", "message.thinking")),
        ({"rationale": "x", "sample_weight": 2.0}, ("rationale", "sample_weight")),
        ({"messages": [USER, REPLY | {"tool_call": {"name": "f"}, "cot": "x"}]}, ("message.cot", "message.tool_call")),
        ({"messages": [USER, REPLY | {"train_detail": [{"begin_offset": 0}]}]}, ("message.train_detail",)),
    ],
)
def test_keys_that_other_tools_train_by_are_named_where_the_kit_does_not(row, unused):
    assert convert(ROWS["messages"] | row, "messages", "f:1").unused == unused
    assert row.keys() <= COLUMNS  # tables are read for them


def test_a_label_of_plain_text_is_no_answer_to_avoid():
    made = convert({"text": "A film.", "label": False}, "text", "f:1")
    assert made.unused == ("label",)


def test_rows_in_another_language_are_rejected_and_unlabelled_rows_are_kept():
    row = ROWS["messages"]
    assert reason(row | {"lang": "de"}, lang="en") == reason(TREE, "oasst_trees", lang="de") == "other language"
    assert convert(row, "messages", "f:1", "en").lang == "" and convert(TREE, "oasst_trees", "f:1", "en").lang == "en"


def test_the_group_is_the_tree_the_group_field_or_the_prompt():
    row = ROWS["messages"]
    same, other = row | {"id": 0}, {"messages": [USER | {"content": "Other"}, REPLY]}
    first, second, third = (convert(r, "messages", "f:1") for r in (row, same, other))
    assert first.group == second.group == first.prompt_key() != third.group
    assert second.id == "0"
    assert convert(row | {"group": "g"}, "messages", "f:1").group == "g"
    assert convert(TREE, "oasst_trees", "f:1").group == "t"


def test_the_prompt_key_covers_everything_before_the_first_reply():
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
def test_any_row_is_converted_or_rejected(source_format, data):
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
