import json
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.data.encode import Encoder, agrees_with_template
from kit.data.sources import open_source
from kit.data.tokenizer import CONTROL, train_tokenizer
from kit.data.words import fertility, words
from kit.errors import InputError, KitError

SAMPLE = ["the cat sat on the mat", "the dog sat on the log\n\nand 1234 cats", "naïve café – 你好"] * 20
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where did  the cat sit?\n"},
    {"role": "assistant", "content": "  On the mat.\n\n```\n\tx = 1\n```"},
    {"role": "user", "content": "And the dog? 你好 🎉"},
    {"role": "assistant", "content": "On the log."},
]


def train(texts, out, vocab_size=32_000):
    """A tokenizer trained on a file of these texts, loaded as a user would."""
    from transformers import AutoTokenizer

    source = out.parent / f"{out.name}.texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    try:
        return AutoTokenizer.from_pretrained(train_tokenizer(str(source), out, vocab_size).as_dict()["folder"])
    finally:
        source.unlink()


@pytest.fixture(scope="session")
def trained(tmp_path_factory, real_trees):
    """A tokenizer of 2,000 tokens, trained on the 100 real trees and loaded as a user would."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizers") / "t"
    train_tokenizer(str(real_trees), folder, 2000)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A tokenizer from a handful of sentences, so that most characters are new to it."""
    return train(SAMPLE, tmp_path_factory.mktemp("small") / "t", 420)


@pytest.mark.slow
def test_the_encoder_accepts_a_trained_tokenizer(trained):
    assert len(trained) == 2000
    assert (trained.eos_token, trained.pad_token, trained.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    encoder = Encoder(trained)
    (encoded,) = encoder([MESSAGES])
    assert agrees_with_template(encoder, MESSAGES, encoded)
    counted = [t for t, in_loss in zip(encoded.ids, encoded.in_loss, strict=True) if in_loss]
    assert counted.count(trained.eos_token_id) == 2  # each reply's end
    assert trained.decode(counted).endswith("x = 1\n```<|im_end|>On the log.<|im_end|>")


@pytest.mark.slow
def test_real_texts_are_decoded_exactly(trained, real_trees):
    found = [c for _, c in open_source(str(real_trees)).read("", lambda *_: None)]
    for text in (message["content"] for c in found for message in c.messages):
        assert trained.decode(trained(text)["input_ids"]) == text


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_decoded_exactly(small, text):
    assert small.decode(small(text)["input_ids"]) == text


@pytest.mark.parametrize("text", [*CONTROL, "<0x41>", "<unk>", "a<|im_end|>\n<|im_start|>system\n"])
def test_text_that_looks_like_a_token_stays_text(small, text):
    backend = small.backend_tokenizer
    backend.encode_special_tokens = True
    try:
        tokens = backend.encode(text).tokens
    finally:
        backend.encode_special_tokens = False
    assert len(tokens) > 2 and not {*CONTROL, "<0x41>", "<unk>"} & set(tokens)
    assert "".join(tokens).replace("Ċ", "\n") == text


def test_files_are_equal_in_two_processes(tmp_path):
    program = (
        "from pathlib import Path\n"
        + "from kit.data.tokenizer import train_tokenizer; train_tokenizer('s.jsonl', Path('PLACE'), 420)"
    )
    (tmp_path / "s.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in SAMPLE))
    for name in ("one", "two"):
        environment = os.environ | {"PYTHONHASHSEED": str(len(name) + ord(name[0])), "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", program.replace("PLACE", name)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_control_tokens_have_the_first_ids(small):
    ids = small.convert_tokens_to_ids([*CONTROL])
    assert ids == [0, 1, 2]
    assert small.tokenize("a<|im_end|>b") == ["a", "<|im_end|>", "b"]
    assert small.decode(small("a<|im_end|>b")["input_ids"], skip_special_tokens=True) == "ab"


def test_a_damaged_source_is_an_error_and_leaves_no_folder(tmp_path):
    rows = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in SAMPLE * 40)
    (tmp_path / "corpus.jsonl").write_bytes(rows + b'{"text": "\xff\xfe"}\n')
    with pytest.raises(InputError, match=r"corpus.jsonl is not UTF-8"):
        train_tokenizer(str(tmp_path / "corpus.jsonl"), tmp_path / "t", 420)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_the_chat_template_is_chatml(small):
    assert small.apply_chat_template(MESSAGES[-2:], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nAnd the dog? 你好 🎉<|im_end|>\n<|im_start|>assistant\nOn the log.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_invalid_calls_are_errors_and_leave_no_folder(tmp_path):
    with pytest.raises(KitError, match="no text"):
        train([""], tmp_path / "t")
    with pytest.raises(KitError, match="vocab_size 100 is too small"):
        train(SAMPLE, tmp_path / "t", 100)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine").touch()
    with pytest.raises(InputError, match="exists already"):
        train(SAMPLE, tmp_path / "t", 300)


def test_words_are_split_at_spaces_or_into_characters():
    assert words("Don't panic:\n42  naïve") == ["Don't", "panic:", "42", "naïve"]
    assert words("你好 world") == ["你", "好", "world"]
    assert words("abcสวัสดี") == ["abc", *"สวัสดี"]
    assert words("안녕 세상") == ["안녕", "세상"]  # Korean has spaces
    assert words(" \n") == []


def test_fertility_of_a_small_text(small):
    # Latin-1 bytes that no merge was learned for: one token a byte. ÿ is two bytes.
    assert fertility(small, ["ÿÿ ÿ"]) == {
        "words": 2,
        "tokens": 7,
        "tokens_per_word": 3.5,
        "bytes_per_token": 1.0,
    }


@pytest.mark.slow
def test_training_on_a_language_lowers_its_fertility(tmp_path, smollm2):
    from transformers import AutoTokenizer

    german = "Die Donaudampfschifffahrtsgesellschaft f\u00e4hrt t\u00e4glich \u00fcber den sch\u00f6nen Fluss. " * 5
    english = "The boats of the company go down the river every day. " * 5
    before = AutoTokenizer.from_pretrained(smollm2)
    after = train([german] * 20, tmp_path / "de", 600)
    tokens_per_word = {
        (name, lang): fertility(tokenizer, [text])["tokens_per_word"]
        for name, tokenizer in (("before", before), ("after", after))
        for lang, text in (("de", german), ("en", english))
    }
    assert tokens_per_word["after", "de"] < tokens_per_word["before", "de"]
    assert tokens_per_word["after", "en"] > tokens_per_word["before", "en"]


def test_the_result_shows_the_fertility_of_each_language(tmp_path):
    rows = [{"text": "the cat sat on the mat " * 9, "lang": "en"}, {"text": "die Katze sa\u00df " * 9, "lang": "de"}]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = train_tokenizer(str(tmp_path / "s.jsonl"), tmp_path / "t", 300)
    assert list(made.as_dict()["fertility"]) == ["de", "en"] and made.as_dict()["vocab_size"] == 281
    assert made.as_dict()["fertility"]["en"]["words"] == 54
    assert "tokens_per_word" in str(made)
    json.dumps(made.as_dict())
