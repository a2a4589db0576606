import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.config.models import load_tokenizer
from kit.config.recipe import Recipe
from kit.data.conversations import Conversation
from kit.data.encode import Encoder
from kit.data.fit import fit
from kit.data.ledger import Ledger

TURN = st.tuples(*[st.integers(1, 40).map(lambda n: "word " * n)] * 2)


@pytest.fixture(scope="module")
def smol(smollm2):
    return Encoder(load_tokenizer(str(smollm2)))


@given(
    st.lists(TURN, min_size=1, max_size=6), st.booleans(), st.sampled_from(["truncate", "split", "drop"]),
    st.integers(48, 160),
)  # fmt: skip
@settings(deadline=None)
def test_every_token_is_kept_or_dropped_with_a_reason(smol, turns, system, overlong, size):
    messages = [{"role": "system", "content": "Be brief."}] * system
    for asked, replied in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": replied}]
    recipe = Recipe.load("demo", **{"data.overlong": overlong, "data.seq_len": size})
    found, ledger = Conversation("c", "c", tuple(messages)), Ledger()
    whole = smol([messages])[0]
    kept = list(fit(found, whole, smol, recipe.data, ledger))
    ledger.close(sum(len(document.ids) for document in kept))
    assert ledger.read_tokens == len(whole.ids) + ledger.repeated_tokens
    begin = whole.ids[:3].tolist()  # <|im_start|>system and what follows
    for document in kept:
        assert len(document.ids) <= size and document.ids[:3].tolist() == begin
        assert document.in_loss[1:].any()
        assert document.ids[np.flatnonzero(document.in_loss)[-1]] == 2  # <|im_end|>
    if overlong == "split" and not ledger.dropped:
        assert sum(int(d.in_loss.sum()) for d in kept) == int(whole.in_loss.sum())  # no reply is lost or trained twice
