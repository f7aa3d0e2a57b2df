"""Tokenizers from GGUF metadata: byte-level BPE ('gpt2') and SentencePiece BPE ('llama')."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from dflash_jax.checkpoints.tokenizer import Tokenizer, import_transformers
from dflash_jax.errors import CheckpointError, cut, quote, reason

# gguf.TokenType
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
# Whose tokens texts and templates mean when they write one that several ids have.
_ROLES = ("bos", "eos", "eot", "eom", "padding", "unknown")
_MERGES = "tokenizer.ggml.merges"
_TEMPLATE, _TEMPLATE_NAMES = "tokenizer.chat_template", "tokenizer.chat_templates"
# 256,000 pieces of 60 characters; a real vocabulary's are a tenth as long.
_MAX_PIECES = 1 << 30
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


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """What a GGUF file says of its vocabulary, checked.

    Attributes:
      names: the string of each id; made distinct where several ids have the same.
      kinds: the gguf.TokenType of each id.
      mark: what made strings distinct, to be taken out again in decoding; None where all were.
      metadata: the file's metadata, by key.
      file: for messages.
    """

    names: list[str]
    kinds: list[int]
    mark: str | None
    metadata: Mapping[str, Any]
    file: Path

    def token_id(self, role: str, default: int | None = None) -> int | None:
        """The id that the metadata has for a role, such as "bos". Raises CheckpointError for one out of range."""
        return _token_id(self.metadata, role, len(self.names), self.file, default)

    @property
    def plain(self) -> dict[str, int]:
        """Ids by string, of those strings that a text may become."""
        return {name: index for index, name in enumerate(self.names) if self.mark is None or self.mark not in name}


def read_tokenizer(metadata: Mapping[str, Any], file: Path) -> Tokenizer | None:
    """The tokenizer that a GGUF file's metadata describes, None if it describes none.

    Several ids may have the same string. Each decodes to it; a text becomes the one that has a role (BOS, EOS and so
    on), else the last, as in llama.cpp.

    Args:
      metadata: the file's metadata, by key.
      file: for messages.

    Raises:
      CheckpointError: a kind of tokenizer that this package cannot build, or metadata that are not a tokenizer's.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or "tokenizer.ggml.tokens" not in metadata:
        return None
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{file} has a tokenizer of kind {quote(kind)}, but only 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece BPE) can be read from GGUF; use the model's Hugging Face directory instead"
        )
    vocabulary = _read_vocabulary(metadata, file)
    templates = _chat_templates(metadata, file)
    roles = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {f"{name}_token": vocabulary.token_id(role) for name, role in roles.items()}
    named = {name: vocabulary.names[index] for name, index in found.items() if index is not None}
    try:
        backend = (_byte_level if kind == "gpt2" else _sentencepiece)(vocabulary)
        return Tokenizer(
            import_transformers().PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=templates, **named)
        )
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises Exception itself, such as for a merge of unknown tokens
        raise CheckpointError(f"the tokenizer in {file} cannot be built ({reason(error)})") from error


def _chat_templates(metadata: Mapping[str, Any], file: Path) -> str | dict[str, str] | None:
    """The chat template, or where others have names, all of them by name; the one without is "default"."""
    found = {key: value for key, value in metadata.items() if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")}
    listed = metadata.get(_TEMPLATE_NAMES) or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise CheckpointError(f"{_TEMPLATE_NAMES} in {file} is {quote(listed)}, but it must be a list of names")
    for key in (*found, *(f"{_TEMPLATE}.{name}" for name in listed if name != "default")):
        if not isinstance(found.get(key), str):
            raise CheckpointError(f"{cut(key)} in {file} is {quote(found.get(key))}, but it must be a text")
    default = found.pop(_TEMPLATE, None)
    if not found:
        return default
    named = {key.removeprefix(f"{_TEMPLATE}."): template for key, template in found.items()}
    return named if default is None else {**named, "default": default}


def _read_vocabulary(metadata: Mapping[str, Any], file: Path) -> _Vocabulary:
    tokens = _strings(metadata, "tokenizer.ggml.tokens", file)
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens) or not all(type(kind) is int for kind in kinds):
        raise CheckpointError(
            f"tokenizer.ggml.token_type in {file} is {quote(kinds)}, but it must be {len(tokens)} integers"
        )
    roles = {_token_id(metadata, role, len(tokens), file) for role in _ROLES}
    names, mark = _distinct(tokens, roles)
    return _Vocabulary(names, kinds, mark, metadata, file)


def _strings(metadata: Mapping[str, Any], key: str, file: Path) -> list[str]:
    values = metadata[key]
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{key} in {file} is {quote(values)}, but it must be an array of texts")
    return values


def _token_id(
    metadata: Mapping[str, Any], role: str, vocab_size: int, file: Path, default: int | None = None
) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    found = metadata.get(key, default)
    if found is not None and (type(found) is not int or not 0 <= found < vocab_size):
        raise CheckpointError(f"{key} in {file} is {quote(found)}, but it must be one of the {vocab_size} tokens")
    return found


def _distinct(tokens: Sequence[str], roles: Collection[int | None]) -> tuple[list[str], str | None]:
    """A string for each id that no other id has, and the mark that made the difference, if one was needed."""
    owner: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if token not in owner or owner[token] not in roles or index in roles:
            owner[token] = index
    if len(owner) == len(tokens):
        return list(tokens), None
    # A noncharacter of Unicode, which no text has any business with.
    free = (chr(code) for code in range(0xFDD0, 0xFDF0))
    mark = next((mark for mark in free if not any(mark in token for token in owner)), None)
    if mark is None:
        raise CheckpointError(
            "the tokenizer has equal tokens, and others with every noncharacter of Unicode, which could tell them apart"
        )
    names = [token if owner[token] == index else f"{token}{mark}{index}{mark}" for index, token in enumerate(tokens)]
    return names, mark


def _decoder(mark: str | None, parts: Sequence[decoders.Decoder]) -> decoders.Decoder:
    """The parts in sequence, after what made equal tokens distinct is taken out."""
    if mark is not None:
        parts = [decoders.Replace(Regex(f"{mark}[0-9]+{mark}"), ""), *parts]
    return parts[0] if len(parts) == 1 else decoders.Sequence(list(parts))


def _byte_level(vocabulary: _Vocabulary) -> Backend:
    metadata, file = vocabulary.metadata, vocabulary.file
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file} has tokenizer.ggml.pre {quote(pre)}, but it must be one of {', '.join(_PRE_TOKENIZERS)}; "
            "use the model's Hugging Face directory instead"
        )
    merges = []
    for merge in _strings(metadata, _MERGES, file) if metadata.get(_MERGES) else []:
        left, space, right = merge.partition(" ")
        if not space:
            raise CheckpointError(
                f"{_MERGES} in {file} has {quote(merge)}, but it must be two tokens with a space between"
            )
        merges.append((left, right))
    vocab = {name: index for index, name in enumerate(vocabulary.names)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _BEGINS_WITH_BOS))
    if "qwen" in pre:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre]())
    backend.decoder = _decoder(vocabulary.mark, [decoders.ByteLevel()])
    return _finish(backend, vocabulary, begins_with_bos=pre in _BEGINS_WITH_BOS)


def _sentencepiece(vocabulary: _Vocabulary) -> Backend:
    """SentencePiece BPE with byte fallback: spaces are part of the pieces, scores say which merge comes first."""
    names, metadata = vocabulary.names, vocabulary.metadata
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(names):
        raise CheckpointError(
            f"{vocabulary.file} has a 'llama' tokenizer with {len(scores) if isinstance(scores, list) else 0} scores "
            f"for {len(names)} tokens; each token needs one (tokenizer.ggml.scores)"
        )
    if not all(type(score) in (int, float) and math.isfinite(score) for score in scores):
        raise CheckpointError(f"tokenizer.ggml.scores in {vocabulary.file} must be finite numbers")
    # Finding the two halves of every piece takes the square of its length.
    if sum(len(name) ** 2 for name in names) > _MAX_PIECES:
        raise CheckpointError(f"the tokens in {vocabulary.file} are too long for SentencePiece's; it must be damaged")
    unknown = names[vocabulary.token_id("unknown", 0) or 0]
    merges = _merges(vocabulary.plain, scores)
    vocab = {name: index for index, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = _decoder(vocabulary.mark, [*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    return _finish(backend, vocabulary, begins_with_bos=True)


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best piece first; equal pieces in the order of their parts."""
    found = []
    for piece, index in vocab.items():
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        parts = [(left, right) for left, right in halves if left in vocab and right in vocab]
        found += [(-scores[index], index, vocab[left], vocab[right], left, right) for left, right in parts]
    return [(left, right) for *_, left, right in sorted(found)]


def _finish(backend: Backend, vocabulary: _Vocabulary, *, begins_with_bos: bool) -> Backend:
    """Adds the special tokens, and the BOS before a text where the model wants one."""
    for name, kind in zip(vocabulary.names, vocabulary.kinds, strict=True):
        if kind in (_CONTROL, _UNUSED):
            backend.add_special_tokens([AddedToken(name, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(name, special=False, normalized=False)])
    bos = vocabulary.token_id("bos")
    if bos is not None and vocabulary.metadata.get("tokenizer.ggml.add_bos_token", begins_with_bos):
        # The token itself may have characters that mean something in a template.
        backend.post_processor = processors.TemplateProcessing(
            single="BOS $A", special_tokens=[{"id": "BOS", "ids": [bos], "tokens": [vocabulary.names[bos]]}]
        )
    return backend
