"""Tokenizers from GGUF metadata: byte-level BPE ('gpt2') and SentencePiece BPE ('llama')."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from dflash_jax.checkpoints.tokenizer import Tokenizer, import_transformers
from dflash_jax.errors import CheckpointError

# gguf.TokenType
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _smollm() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


def _split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


# How a text is cut before merging, by `tokenizer.ggml.pre`, as the models' own tokenizer.json have it.
_PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "qwen2": lambda: _split(_QWEN2),
    "deepseek-r1-qwen": lambda: _split(_QWEN2),
    "llama-bpe": lambda: _split(_LLAMA3),
    "llama-v3": lambda: _split(_LLAMA3),
    "llama3": lambda: _split(_LLAMA3),
}
_BEGINS_WITH_BOS = ("llama-bpe", "llama-v3", "llama3")


def read_tokenizer(metadata: Mapping[str, Any], file: Path) -> Tokenizer | None:
    """The tokenizer that a GGUF file's metadata describes, None if it describes none.

    Args:
      metadata: the file's metadata, by key.
      file: for messages.

    Raises:
      CheckpointError: a kind of tokenizer that this package cannot build.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or "tokenizer.ggml.tokens" not in metadata:
        return None
    if kind == "gpt2":
        backend = _byte_level(metadata, file)
    elif kind == "llama":
        backend = _sentencepiece(metadata, file)
    else:
        raise CheckpointError(
            f"{file} has a tokenizer of kind {kind!r}, but only 'gpt2' (byte-level BPE) and 'llama' (SentencePiece "
            "BPE) can be read from GGUF; use the model's Hugging Face directory instead"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {
        f"{role}_token": tokens[metadata[key]]
        for role, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
        if key in metadata
    }
    return Tokenizer(
        import_transformers().PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template=metadata.get("tokenizer.chat_template"), **named
        )
    )


def _byte_level(metadata: Mapping[str, Any], file: Path) -> Backend:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file} has tokenizer.ggml.pre {pre!r}, but it must be one of {', '.join(_PRE_TOKENIZERS)}; "
            "use the model's Hugging Face directory instead"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _BEGINS_WITH_BOS))
    if "qwen" in pre:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre]())
    backend.decoder = decoders.ByteLevel()
    return _finish(backend, metadata, begins_with_bos=pre in _BEGINS_WITH_BOS)


def _sentencepiece(metadata: Mapping[str, Any], file: Path) -> Backend:
    """SentencePiece BPE with byte fallback: spaces are part of the pieces, scores say which merge comes first."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(
            f"{file} has a 'llama' tokenizer with {0 if scores is None else len(scores)} scores for {len(tokens)} "
            "tokens; each token needs one (tokenizer.ggml.scores)"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges(vocab, scores)
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    return _finish(backend, metadata, begins_with_bos=True)


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best piece first; equal pieces in the order of their parts."""
    found = []
    for piece, index in vocab.items():
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        parts = [(left, right) for left, right in halves if left in vocab and right in vocab]
        found += [(-scores[index], index, vocab[left], vocab[right], left, right) for left, right in parts]
    return [(left, right) for *_, left, right in sorted(found)]


def _finish(backend: Backend, metadata: Mapping[str, Any], *, begins_with_bos: bool) -> Backend:
    """Adds the special tokens, and the BOS before a text where the model wants one."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _UNUSED):
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", begins_with_bos):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return backend
