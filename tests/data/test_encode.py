import re
from datetime import datetime

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kit.config.models import load_tokenizer
from kit.data.encode import Encoder, agrees_with_template
from kit.data.sources import open_source
from kit.errors import InputError, KitError
from tests.llama31 import llama31  # noqa: F401 - a fixture

EOT = 128009
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs", "Co"], exclude_characters="\ufdd0\ufdd1"), min_size=1)
CONTENTS = st.lists(ANY_TEXT.filter(str.strip), min_size=2, max_size=4)
MARKS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + CONTENT + '<|im_end|>' }}{% endfor %}"


@pytest.fixture(scope="module")
def smol(smollm2):
    return Encoder(load_tokenizer(str(smollm2)))


@pytest.fixture(scope="module")
def llama(llama31):  # noqa: F811
    return Encoder(load_tokenizer(str(llama31)))


@pytest.fixture(scope="module")
def fast(llama31):  # noqa: F811
    pytest.importorskip("gigatoken", reason="the optional engine gigatoken is not installed")
    return Encoder(load_tokenizer(str(llama31)), engine="gigatoken")


def chat(*contents):
    return [{"role": "assistant" if i % 2 else "user", "content": c} for i, c in enumerate(contents)]


def counted(encoder, messages):
    encoded = encoder([messages])[0]
    return encoder.tokenizer.decode(encoded.ids[encoded.in_loss])


def oracle(messages):
    """What Llama 3.1's template makes of replies, written from its text: stripped content and the end token."""
    return "".join(m["content"].strip() + "<|eot_id|>" for m in messages if m["role"] == "assistant")


def with_template(smollm2, template):
    tokenizer = load_tokenizer(str(smollm2))
    tokenizer.chat_template = template
    return tokenizer


def test_the_loss_counts_every_reply_and_its_end_token_and_nothing_else(smol):
    # Three replies: only the last was trained in axolotl#1761. Pad equals EOS here: huggingface/trl#1623.
    assert smol.tokenizer.pad_token_id == smol.tokenizer.eos_token_id
    messages = chat("Hi", "Hello.", "And?", "Yes.", "So?", "Bye.")
    assert counted(smol, messages) == "Hello.<|im_end|>Yes.<|im_end|>Bye.<|im_end|>"


def test_labels_never_count_the_first_token(smol):
    everything = Encoder(smol.tokenizer, loss="all")([chat("Hi", "Hello.")])[0]
    assert everything.labels.tolist() == [-100, *everything.ids[1:].tolist()]


@given(CONTENTS)
@example(["\x04 x", "\x04"])  # bytes that SmolLM2's vocabulary has no token for
@example([" \n x", "\n\n y \n"])
@settings(deadline=None)
def test_ids_equal_smollm2s_own_rendering(smol, contents):
    messages = chat(*contents)
    assert agrees_with_template(smol, messages, smol([messages])[0])


@given(CONTENTS, st.booleans())
@example(["e\u0301 \u00e9", "\u1100\u1161"], False)
@settings(deadline=None)
def test_ids_and_mask_equal_llama_31s_own_rendering(llama, contents, system):
    messages = [{"role": "system", "content": "Be brief."}] * system + chat(*contents)
    assert agrees_with_template(llama, messages, llama([messages])[0])
    if not any("<|" in content for content in contents):
        assert counted(llama, messages) == oracle(messages)


def test_real_conversations_give_llama_31s_ids_and_the_mask_that_its_template_cannot(llama, real_trees):
    # The stock template has no {% generation %}: TRL 1.16 raises, others mask nothing or all (marin#7237).
    found = [c.messages for _, c in open_source(str(real_trees)).read("en", lambda row, reason: None)]
    encoded = llama(found)
    assert len(found) == 100
    assert all(agrees_with_template(llama, m, e) for m, e in zip(found, encoded, strict=True))
    assert [counted(llama, m) for m in found] == [oracle(m) for m in found]
    assert round(np.mean([len(e.ids) for e in encoded]), 1) == 448.4  # the mean behind 5,125 conversations, 36 steps


def test_bos_stands_once_and_ids_are_the_published_ones(llama):
    # OpenRLHF#393 printed the ids of "test" with the system block removed from the template, where BOS was doubled.
    tokenizer = load_tokenizer(llama.tokenizer.name_or_path)
    block = re.compile(r'\{\{- "<\|start_header_id\|>system<\|end_header_id\|>.*?"<\|eot_id\|>" \}\}', re.DOTALL)
    tokenizer.chat_template = block.sub("", tokenizer.chat_template)
    asked = [128000, 128006, 882, 128007, 271, 1985, EOT, 128006, 78191, 128007, 271]
    encoded = Encoder(tokenizer)([chat("test", "ok")])[0]
    assert encoded.ids.tolist()[:11] == asked
    assert encoded.ids.tolist().count(128000) == 1
    assert encoded.ids[-1] == EOT  # no header of a next reply follows (transformers#32252)


def test_the_report_tells_what_the_template_adds(llama):
    # 25 tokens: BOS, the system header and the dates; 5 for each header and end token of two messages.
    assert llama([chat("Hi", "Hello.")])[0].template_tokens == 25 + 2 * 5 + 1


def test_a_template_that_asks_for_today_gets_the_same_day_on_any_day(smollm2):
    template = "{{ 'Today: ' + strftime_now('%d %b %Y') }}" + MARKS.replace("CONTENT", "m.content")
    encoder = Encoder(with_template(smollm2, template))
    text = encoder.tokenizer.decode(encoder([chat("Hi", "Hello.")])[0].ids)
    assert text.startswith("Today: 26 Jul 2024") and f"{datetime.now():%Y}" != "2024"


@pytest.mark.parametrize("name", ["smol", "llama"])
def test_control_tokens_inside_content_stay_text(request, name):
    # transformers#29279: they became real ones.
    encoder = request.getfixturevalue(name)
    end = {"smol": "<|im_end|>", "llama": "<|eot_id|>"}[name]
    encoded = encoder([chat(f"What does {end}<|im_start|>system do?", f"It ends a turn: {end}.")])[0]
    ends = encoder.tokenizer.convert_tokens_to_ids(end)
    assert encoded.ids.tolist().count(ends) == 3  # the default system message, the prompt, the reply
    assert f"It ends a turn: {end}." in encoder.tokenizer.decode(encoded.ids[encoded.in_loss])


def test_plain_text_is_counted_whole_between_the_bos_that_the_tokenizer_adds_and_eos(smol, llama):
    document = [{"role": "text", "content": " Line <|eot_id|>\n"}]
    assert llama.tokenizer.decode(llama([document])[0].ids) == "<|begin_of_text|> Line <|eot_id|>\n<|eot_id|>"
    assert llama([document])[0].ids.tolist().count(EOT) == 1  # the one in the text is text
    assert counted(smol, document) == " Line <|eot_id|>\n<|im_end|>"


def test_plain_text_needs_no_chat_template(smollm2):
    encoder = Encoder(with_template(smollm2, None))
    assert counted(encoder, [{"role": "text", "content": "x"}]) == "x<|im_end|>"
    with pytest.raises(KitError, match=r"no chat template.*chat_template.jinja"):
        encoder([chat("a", "b")])


def test_a_template_that_strips_contents_is_followed(smollm2):
    encoder = Encoder(with_template(smollm2, MARKS.replace("CONTENT", "(m.content | trim)")))
    messages = chat("  Hi\n", "\tHello. ")
    assert agrees_with_template(encoder, messages, encoder([messages])[0])
    assert counted(encoder, messages) == "Hello.<|im_end|>"


def test_a_template_that_changes_contents_is_refused(smollm2):
    encoder = Encoder(with_template(smollm2, MARKS.replace("CONTENT", "(m.content | upper)")))
    with pytest.raises(KitError, match="changes, drops or reorders"):
        encoder([chat("a", "b")])


def test_a_conversation_that_the_template_changes_or_refuses_is_told_apart_from_the_others(smollm2):
    loud = "(m.content if 'shout' not in m.content else m.content | upper)"
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    encoder = Encoder(with_template(smollm2, refuse + MARKS.replace("CONTENT", loud)))
    system = [{"role": "system", "content": "s"}, *chat("a", "b")]
    told = [encoded.refused for encoded in encoder([chat("a", "b"), chat("shout", "b"), system])]
    assert told == ["", "changed by the chat template", "refused by the chat template: no system role"]


def test_a_tokenizer_that_cuts_or_pads_does_not_do_so_here(smol, smollm2):
    tokenizer = load_tokenizer(str(smollm2))
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    messages = chat("Hi", "one two three four five six seven eight")
    assert Encoder(tokenizer)([messages])[0].ids.tolist() == smol([messages])[0].ids.tolist()


def trained(normalizer, pre_tokenizer, decoder, model, trainer):
    """A small tokenizer of another kind, with ChatML."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, pre_tokenizer, decoder
    tokenizer.train_from_iterator(["the cat sat on the mat and the caf\u00e9 was closed"] * 9, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = MARKS.replace("CONTENT", "m.content")
    return fast


KINDS = {
    "composing, as Qwen": lambda control: trained(
        normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), models.BPE(),
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=control, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    ),
    "SentencePiece-style": lambda control: trained(
        None, pre_tokenizers.Metaspace(prepend_scheme="never"), decoders.Metaspace(prepend_scheme="never"),
        models.Unigram(), trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>", *control], unk_token="<unk>"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_is_exact_on_other_kinds_of_tokenizers(kind):
    encoder = Encoder(KINDS[kind](["<|im_start|>", "<|im_end|>"]))
    messages = chat("the cafe\u0301 sat", "the cat  cafe\u0301 closed")  # a letter and its accent as two characters
    assert agrees_with_template(encoder, messages, encoder([messages])[0])
    reply = counted(encoder, messages)
    assert reply.endswith("closed<|im_end|>") and reply.replace(" ", "").startswith("thecatcaf")


def test_gigatoken_gives_the_same_ids_and_mask(llama, fast, real_trees):
    found = [c.messages for _, c in open_source(str(real_trees)).read("en", lambda row, reason: None)]
    for messages, one, other in zip(found, llama(found), fast(found), strict=True):
        assert one.ids.tolist() == other.ids.tolist(), messages
        assert one.labels.tolist() == other.labels.tolist()
    assert fast.engine.uncompared == 0  # at least 256 texts were compared


@given(CONTENTS)
@settings(deadline=None)
def test_gigatoken_agrees_on_any_text(llama, fast, contents):
    messages = chat(*contents, "<|eot_id|>")
    assert fast([messages])[0].labels.tolist() == llama([messages])[0].labels.tolist()


def test_an_engine_that_differs_is_found_at_the_first_text_and_named(fast, llama31):  # noqa: F811
    wrong = Encoder(load_tokenizer(str(llama31)), engine="gigatoken")

    class Reversed:
        def encode(self, text):
            return fast.engine.gigatoken.encode(text)[::-1]

    wrong.engine.gigatoken = Reversed()
    with pytest.raises(KitError, match=r"gigatoken differs from tokenizers on .*Prepare with engine tokenizers"):
        wrong([chat("one two", "three four")])


def test_a_tokenizer_that_gigatoken_does_not_know_is_refused(smollm2):
    pytest.importorskip("gigatoken", reason="the optional engine gigatoken is not installed")
    with pytest.raises(InputError, match=r"cannot take this tokenizer .*use engine tokenizers"):
        Encoder(load_tokenizer(str(smollm2)), engine="gigatoken")
