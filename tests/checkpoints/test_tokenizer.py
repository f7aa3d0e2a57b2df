import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.checkpoints.tokenizer import load_tokenizer
from dflash_jax.errors import CheckpointError, RequestError

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<s>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
)


def byte_level(template=TEMPLATE):
    """A vocabulary of the 256 bytes and two special tokens, 256 and 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["naïve →"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)


TOKENIZER = Tokenizer(byte_level())


@given(st.text())
def test_text_survives(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_chat_is_encoded_up_to_where_the_assistant_speaks():
    ids = TOKENIZER.apply_chat([{"role": "user", "content": "hi"}])
    assert ids == [256, *TOKENIZER.encode("hi!")]
    assert TOKENIZER.has_chat_template
    assert TOKENIZER.vocab_size == 259


def test_chat_that_cannot_be_is_refused():
    with pytest.raises(RequestError, match=r"chat template rejects the messages \(no tools\)"):
        TOKENIZER.apply_chat([{"role": "tool", "content": "hi"}])
    with pytest.raises(RequestError, match="has none"):
        Tokenizer(byte_level(template=None)).apply_chat([{"role": "user", "content": "hi"}])


def test_tokenizer_of_a_directory(golden, tmp_path):
    byte_level().save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "grüß dich"}]
    assert loaded.apply_chat(messages) == TOKENIZER.apply_chat(messages)
    assert load_tokenizer(golden / "recall-target") is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer files in .* cannot be read"):
        load_tokenizer(tmp_path)
