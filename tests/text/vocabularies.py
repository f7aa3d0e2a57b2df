"""Small tokenizers of every kind of decoder."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_jax.checkpoints import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁a", "▁b", "a", "é", "€", "▁▁", "\N{REPLACEMENT CHARACTER}", "▁\N{REPLACEMENT CHARACTER}", ".", "'s"]
WORDS += ["<0xZZ>", "<0x1>", "😀"]
SPECIAL = ["<s>", "</s>", "<|im_end|>"]


def byte_level(template: str | None = None) -> PreTrainedTokenizerFast:
    """The 256 bytes, three special tokens and an added one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(["naïve →"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template)


def byte_fallback(decoder: decoders.Decoder | None) -> PreTrainedTokenizerFast:
    """SentencePiece's way: words with their spaces, and 256 tokens for the bytes of whatever else there is."""
    vocab = {piece: index for index, piece in enumerate(["<unk>", *BYTES, *WORDS])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def _sequence(*parts: decoders.Decoder) -> decoders.Decoder:
    return decoders.Sequence(list(parts))


_SPACES = decoders.Replace("▁", " ")

DECODERS = {
    "llama": _sequence(_SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)),
    "gemma": _sequence(_SPACES, decoders.ByteFallback(), decoders.Fuse()),
    "two-spaces": _sequence(_SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)),
    "no-fuse": _sequence(_SPACES, decoders.ByteFallback()),
    "strip-at-the-end": _sequence(_SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 1)),
    "metaspace": decoders.Metaspace(),
    "fallback-metaspace": _sequence(decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")),
    "wordpiece": decoders.WordPiece(),
    "bpe": decoders.BPEDecoder(suffix="▁"),
    "ctc": decoders.CTC(pad_token="a", word_delimiter_token="▁"),
    "bytes-in-a-sequence": _sequence(decoders.ByteLevel(), decoders.Fuse()),
    "none": None,
}

EVERY = {
    "byte-level": Tokenizer(byte_level()),
    **{name: Tokenizer(byte_fallback(decoder)) for name, decoder in DECODERS.items()},
}
"""Tokenizers by the kind of their decoder."""

BYTES_ANYWHERE = ("byte-level", "llama", "gemma", "two-spaces", "no-fuse")
"""Those whose tokens are the same bytes wherever they stand."""
