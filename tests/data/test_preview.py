import html
import json

import pytest

from kit.data.dataset import Dataset, prepare
from kit.data.preview import IN_LOSS_STYLE
from kit.errors import InputError

EMOJI = "Ja \U0001f389\U0001f469\u200d\U0001f680! \u4f60\u597d \u0645\u0631\u062d\u0628\u0627 \u043f\u0440\u0438 <b>"


@pytest.fixture
def chats(recipe, tmp_path):
    rows = [
        {"id": f"{i}", "messages": [
            {"role": "user", "content": f"\u3053\u3093\u306b\u3061\u306f {i}?"},
            {"role": "assistant", "content": f"{EMOJI} {i}"},
        ]}
        for i in range(9)
    ]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {
        "data.source": str(tmp_path / "chats.jsonl"),
        "data.lang": "",
        "data.eval_fraction": 0.0,
        "data.seq_len": 320,
    }
    return prepare(recipe.override(**source))


def test_every_script_and_emoji_is_shown_exactly(chats):
    shown = chats.preview()
    text = "".join(span.text for span in shown.spans)
    assert "\ufffd" not in text and "\ufffd" not in str(shown)
    assert text.count("\u3053\u3093\u306b\u3061\u306f") == shown.documents == text.count(EMOJI)
    assert shown.shown == shown.tokens


def test_the_loss_is_marked_exactly(chats):
    shown = chats.preview()
    marked = [span.text for span in shown.spans if span.in_loss]
    assert len(marked) == shown.documents
    assert all(text.startswith(EMOJI) and text.endswith("<|im_end|>") for text in marked)
    assert sum(span.tokens for span in shown.spans if span.in_loss) == shown.loss_tokens
    page = shown._repr_mimebundle_()["text/html"]
    assert "&lt;b&gt;" in page and "<b>" not in page
    assert page.index("<pre") < page.index(html.escape(EMOJI))  # MathJax skips <pre>
    assert page.count("<hr") == shown.documents - 1
    assert page.count(IN_LOSS_STYLE) == shown.documents


def test_the_end_of_a_preview_never_breaks_a_character(chats):
    for limit in range(1, 60):
        shown = chats.preview(tokens=limit)
        assert limit - 3 <= shown.shown <= limit
        assert "\ufffd" not in "".join(span.text for span in shown.spans), limit


def test_rows_and_splits_are_selected_by_number(recipe):
    made = prepare(recipe)
    rows = made.manifest["splits"]["train"]["rows"]
    assert made.preview(0).spans != made.preview(1).spans
    assert made.preview(rows - 1).row == rows - 1
    assert made.preview(split="eval").split == "eval"
    assert f"row 1 of 0 to {rows - 1}" in str(made.preview(1))
    with pytest.raises(InputError, match=f"Row {rows} of train: choose one from 0 to {rows - 1}"):
        made.preview(rows)
    with pytest.raises(InputError, match="has no split 'test'; it has train and eval"):
        made.preview(split="test")


def test_a_preview_as_text_and_as_json(chats):
    shown = chats.preview()
    assert "\u27e6" in str(shown) and "-" * 40 in str(shown)
    assert json.loads(json.dumps(shown.as_dict()))["spans"][0]["in_loss"] is False


def test_a_folder_opened_by_path_alone_can_be_previewed(chats):
    assert Dataset(chats.path).preview() == chats.preview()
