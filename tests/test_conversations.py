import gzip
import json
from collections import Counter

import pytest

from kit.conversations import best_path, read
from kit.errors import InputError


def node(key, role, text="t", replies=(), **more):
    return {"message_id": key, "role": role, "text": text, "lang": "en", "replies": list(replies), **more}


def ids(path):
    return [n["message_id"] for n in path]


def test_the_best_ranked_reply_wins_wherever_it_stands():
    root = node("p", "prompter", replies=[node("b", "assistant", rank=1), node("a", "assistant", rank=0)])
    assert ids(best_path(root)) == ["p", "a"]


def test_where_rank_0_was_deleted_the_next_counts():
    replies = [
        node("a", "assistant", rank=0, deleted=True),
        node("c", "assistant", rank=2),
        node("b", "assistant", rank=1),
    ]
    assert ids(best_path(node("p", "prompter", replies=replies))) == ["p", "b"]


def test_an_unranked_sibling_comes_after_a_ranked_one():
    replies = [node("u", "assistant", rank=None), node("r", "assistant", rank=3)]
    assert ids(best_path(node("p", "prompter", replies=replies))) == ["p", "r"]


def test_the_longest_branch_wins_and_a_trailing_prompt_is_dropped():
    longer = node("q2", "prompter", replies=[node("a2", "assistant", replies=[node("q3", "prompter")])])
    root = node(
        "p", "prompter", replies=[node("a", "assistant", replies=[node("q1", "prompter", text="x" * 99), longer])]
    )
    assert ids(best_path(root)) == ["p", "a", "q2", "a2"]


def test_a_tree_without_a_surviving_reply_gives_nothing():
    assert best_path(node("p", "prompter", replies=[node("a", "assistant", lang="de")]), "en") == []
    assert best_path(node("p", "prompter", deleted=True, replies=[node("a", "assistant")])) == []


def test_the_order_of_replies_does_not_matter():
    replies = [node(k, "assistant", created_date="2023") for k in "cab"]
    paths = {tuple(ids(best_path(node("p", "prompter", replies=order)))) for order in (replies, replies[::-1])}
    assert paths == {("p", "a")}


def test_flat_messages_give_the_same_conversations_as_their_trees(tmp_path, real_trees):
    def flat(message, parent):
        yield {k: v for k, v in message.items() if k != "replies"} | {"parent_id": parent}
        for reply in message.get("replies") or []:
            yield from flat(reply, message["message_id"])

    rows = [json.loads(line) for line in real_trees.read_text().splitlines()]
    lines = [json.dumps(dict(m, message_tree_id=t["message_tree_id"])) for t in rows for m in flat(t["prompt"], None)]
    with gzip.open(tmp_path / "flat.jsonl.gz", "wt") as stream:
        stream.write("\n".join(lines))
    from_trees, from_flat = read(str(real_trees), "en")[0], read(str(tmp_path / "flat.jsonl.gz"), "en")[0]
    assert from_trees == from_flat
    # The same data through an independent implementation: 55 conversations of one exchange, 45 of two.
    assert Counter(len(c.messages) for c in from_trees) == {2: 55, 4: 45}


def test_chat_rows_are_read(tmp_path):
    (tmp_path / "chat.jsonl").write_text(
        '{"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]}\n'
    )
    found, reason = read(str(tmp_path), "")
    assert [m["role"] for m in found[0].messages] == ["user", "assistant"]
    assert "messages" in reason


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"x": 1}\n', "keys x"),
        ("a.jsonl", "{}\n{oops\n", "line 2: not valid JSON"),
        ("a.jsonl", "", "holds no rows"),
        ("a.csv", "", "holds no .jsonl"),
    ],
)
def test_data_of_no_known_format_is_refused_with_what_was_seen(tmp_path, name, text, words):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).write_text(text)
    with pytest.raises(InputError, match=words):
        read(str(tmp_path / "d"))


def test_data_that_is_nowhere_says_where_it_was_looked_for():
    with pytest.raises(InputError, match=r"no such file or folder, and as a hub id .*cache.*Set data.source"):
        read("nobody/nothing")
