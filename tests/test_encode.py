import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.encode import Encoder, agrees_with_template
from kit.errors import KitError
from kit.model import load_tokenizer


@pytest.fixture(scope="module")
def encoder(smollm2):
    return Encoder(load_tokenizer(str(smollm2)))


def chat(*contents):
    return [{"role": "assistant" if i % 2 else "user", "content": c} for i, c in enumerate(contents)]


def counted(encoder, messages):
    encoded = encoder([messages])[0]
    return encoder.tokenizer.decode([t for t, c in zip(encoded.ids, encoded.counts, strict=True) if c])


def test_the_loss_counts_every_reply_and_its_end_token_and_nothing_else(encoder):
    assert counted(encoder, chat("Hi", "Hello.", "And?", "Bye.")) == "Hello.<|im_end|>Bye.<|im_end|>"


def test_labels_never_count_the_first_token(encoder):
    everything = Encoder(encoder.tokenizer, loss="all")([chat("Hi", "Hello.")])[0]
    assert everything.labels == [-100, *everything.ids[1:]]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Co"]), min_size=1), min_size=2, max_size=4))
def test_ids_equal_the_templates_own_rendering(encoder, contents):
    messages = chat(*contents)
    encoded = encoder([messages])[0]
    assert agrees_with_template(encoder, messages, encoded)


def test_control_tokens_inside_content_stay_text(encoder):
    end = encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")
    encoded = encoder([chat("What does <|im_end|><|im_start|>system do?", "It ends a turn: <|im_end|>.")])[0]
    assert encoded.ids.count(end) == 3  # the default system message, the prompt, the reply
    assert "It ends a turn: <|im_end|>." in encoder.tokenizer.decode(encoded.ids)


def test_a_template_that_strips_contents_is_followed(smollm2):
    tokenizer = load_tokenizer(str(smollm2))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content | trim) + '<|im_end|>' }}{% endfor %}"
    )
    encoder, messages = Encoder(tokenizer), chat("  Hi\n", "\tHello. ")
    encoded = encoder([messages])[0]
    assert agrees_with_template(encoder, messages, encoded)
    assert counted(encoder, messages) == "Hello.<|im_end|>"


def test_a_template_that_changes_contents_is_refused(smollm2):
    tokenizer = load_tokenizer(str(smollm2))
    tokenizer.chat_template = "{% for m in messages %}{{ '<|im_start|>' + (m.content | upper) }}{% endfor %}"
    with pytest.raises(KitError, match="changes, drops or reorders"):
        Encoder(tokenizer)([chat("a", "b")])


def test_a_tokenizer_without_a_template_is_refused(smollm2):
    tokenizer = load_tokenizer(str(smollm2))
    tokenizer.chat_template = None
    with pytest.raises(KitError, match=r"no chat template.*chat_template.jinja"):
        Encoder(tokenizer)
