import copy
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.data.oasst import best_path, join, unusable


def node(key, role, text="t", replies=(), **more):
    return {"message_id": key, "role": role, "text": text, "lang": "en", "replies": list(replies), **more}


def ids(path):
    return [n["message_id"] for n in path]


def flat(message, parent=None):
    """A tree's messages, each with its parent's id, as the .messages.jsonl files have them."""
    yield {k: v for k, v in message.items() if k != "replies"} | {"parent_id": parent}
    for reply in message["replies"]:
        yield from flat(reply, message["message_id"])


def joined(rows):
    rejected = []
    trees = list(join((((0, i), row) for i, row in enumerate(rows, 1)), lambda place, row, why: rejected.append(why)))
    return [tree for _, tree in trees], rejected


def test_the_best_ranked_reply_is_chosen_in_any_order():
    root = node("p", "prompter", replies=[node("b", "assistant", rank=1), node("a", "assistant", rank=0)])
    assert ids(best_path(root)) == ["p", "a"]


@pytest.mark.parametrize("gone", [{"deleted": True}, {"lang": "de"}, {"text": " "}, {"review_result": False}])
def test_without_rank_0_the_next_rank_is_chosen(gone):
    replies = [
        node("a", "assistant", rank=0) | gone,
        node("c", "assistant", rank=2),
        node("b", "assistant", rank=1),
    ]
    assert ids(best_path(node("p", "prompter", replies=replies), "en")) == ["p", "b"]


def test_an_undecided_review_is_not_spam():
    # Open-Assistant's export leaves review_result null unless true or reviewed more than twice.
    assert not unusable(node("p", "prompter", review_result=None))


@pytest.mark.parametrize("rank", [None, float("nan"), "0", -1])
def test_an_unranked_sibling_comes_after_a_ranked_one(rank):
    replies = [node("u", "assistant", rank=rank), node("r", "assistant", rank=3)]
    assert ids(best_path(node("p", "prompter", replies=replies))) == ["p", "r"]


def test_the_longest_branch_is_chosen_without_a_trailing_prompt():
    longer = node("q2", "prompter", replies=[node("a2", "assistant", replies=[node("q3", "prompter")])])
    root = node(
        "p", "prompter", replies=[node("a", "assistant", replies=[node("q1", "prompter", text="x" * 99), longer])]
    )
    assert ids(best_path(root)) == ["p", "a", "q2", "a2"]


def test_a_tree_without_usable_replies_has_no_path():
    assert best_path(node("p", "prompter", replies=[node("a", "assistant", lang="de")]), "en") == []
    assert best_path(node("p", "prompter", deleted=True, replies=[node("a", "assistant")])) == []


def test_a_tree_of_a_hundred_thousand_turns_is_read():
    rows = [
        {"message_id": str(i), "parent_id": str(i - 1) if i else None, "role": ("prompter", "assistant")[i % 2]}
        | {"text": "t"}
        for i in range(100_000)
    ]
    trees, rejected = joined(rows)
    assert len(best_path(trees[0]["prompt"])) == 100_000 and not rejected


def every_path(message):
    """An independent way to the right answer: all paths spelt out, prompters take their best reply."""
    replies = message["replies"]
    if message["role"] == "prompter" and replies:
        rank = [(r["rank"] is None, r["rank"] or 0, r["created_date"], r["message_id"]) for r in replies]
        replies = [replies[rank.index(min(rank))]]
    tails = [tail for reply in replies for tail in every_path(reply)] or [[]]
    return [[message, *tail] for tail in tails]


def expected(root):
    paths = [p[:-1] if p[-1]["role"] == "prompter" else p for p in every_path(root)]
    return min(([-len(p), -sum(len(n["text"]) for n in p), p[-1]["message_id"]], ids(p)) for p in paths if p)[1]


@st.composite
def random_trees(draw):
    """Trees of 1 to 20 messages as parent numbers, with shared ranks, dates and lengths so that ties occur."""
    parents = [draw(st.integers(0, i)) for i in range(draw(st.integers(0, 19)))]
    made = [node("m0", "prompter", rank=None, created_date="")]
    for i, parent in enumerate(parents, 1):
        role = "assistant" if made[parent]["role"] == "prompter" else "prompter"
        more = {"rank": draw(st.sampled_from([None, 0, 1])), "created_date": draw(st.sampled_from(["", "2023"]))}
        made.append(node(f"m{i}", role, draw(st.sampled_from(["a", "bb"])), **more))
        made[parent]["replies"].append(made[-1])
    return made[0]


@given(random_trees())
def test_the_path_is_the_best_of_all_paths(root):
    path = best_path(root)
    assert ids(path) == (expected(root) if root["replies"] else [])
    assert not path or path[-1]["role"] == "assistant"


@given(random_trees(), st.randoms())
def test_the_path_does_not_depend_on_the_order_of_replies(root, chance):
    def shuffle(message):
        chance.shuffle(message["replies"])
        for reply in message["replies"]:
            shuffle(reply)
        return message

    assert ids(best_path(shuffle(copy.deepcopy(root)))) == ids(best_path(root))


@given(random_trees(), st.integers())
def test_messages_in_any_order_are_joined_into_trees(root, seed):
    rows = list(flat(root))
    random.Random(seed).shuffle(rows)
    trees, rejected = joined(rows)
    assert not rejected and len(trees) == 1
    assert ids(best_path(trees[0]["prompt"])) == ids(best_path(root))


def test_messages_outside_of_trees_are_rejected_with_reasons():
    def message(key, parent):
        return {"message_id": key, "parent_id": parent, "role": "prompter", "text": "t"}

    rows = [message("root", None), message("root", None), message("child of nobody", "nobody")]
    rows += [message("its child", "child of nobody"), message("a", "b"), message("b", "a"), message("c", "a"), {}, 5]
    trees, rejected = joined(rows)
    assert [t["message_tree_id"] for t in trees] == ["root"]
    assert sorted(rejected) == sorted(
        ["duplicate id", *["parent is missing"] * 2, *["parents in a circle"] * 3, *["no message id"] * 2]
    )


def test_the_number_0_is_an_identifier():
    rows = [{"message_id": 0, "text": "Hi", "role": "prompter"}, {"message_id": 1, "parent_id": 0, "text": "Hello."}]
    rejected = []
    (tree,) = [tree for _, tree in join(enumerate(rows), lambda *row: rejected.append(row))]
    assert [reply["message_id"] for reply in tree["prompt"]["replies"]] == [1] and not rejected
