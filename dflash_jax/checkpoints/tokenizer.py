"""Text to token ids and back, whatever file the tokenizer came from."""

from __future__ import annotations

import codecs
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from tokenizers.decoders import ByteLevel, DecodeStream

from dflash_jax.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@runtime_checkable
class Detokenizer(Protocol):
    """Turns tokens into text as they come. Each token costs the same, however many came before."""

    def push(self, token: int) -> str:
        """The text that the token makes final; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What was held back. The detokenizer is spent."""
        ...


class Tokenizer:
    """A tokenizer with its special tokens and chat template."""

    def __init__(self, backend: PreTrainedTokenizerFast):
        self._backend = backend

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included. A model may have more, never used."""
        return len(self._backend)

    @property
    def eos_token_id(self) -> int | None:
        """The token that the tokenizer's files name as the end of a text, if they do."""
        return self._backend.eos_token_id

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat` can be used."""
        return self._backend.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with what the tokenizer puts around every text (a BOS, if anything)."""
        return self._backend.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without the special tokens among them."""
        text = self._backend.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation up to where the assistant is to speak.

        Args:
          messages: each with `role` and `content`, as the chat template knows them.

        Raises:
          RequestError: the tokenizer has no chat template, or the template rejects the messages.
        """
        if not self.has_chat_template:
            raise RequestError(
                "messages need a chat template, and the model's tokenizer has none; give the prompt as text"
            )
        import jinja2

        try:
            text = self._backend.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template rejects the messages ({error})") from error
        return cast(str, text)

    def apply_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the assistant is to speak; see `chat_text`."""
        # The template writes a BOS itself where the model wants one.
        return self._backend.encode(self.chat_text(messages), add_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental detokenizer; its pieces join to what `decode` gives."""
        backend = self._backend.backend_tokenizer
        if isinstance(backend.decoder, ByteLevel):
            return _ByteDetokenizer(self._backend)
        return _StreamDetokenizer(self)


class _ByteDetokenizer:
    """For byte-level vocabularies, where a token is some bytes of UTF-8 wherever it stands."""

    def __init__(self, backend: PreTrainedTokenizerFast):
        self._backend = backend
        added = backend.added_tokens_decoder
        self._special = frozenset(token for token in added if added[token].special)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        if token in self._special:
            return ""
        return self._utf8.decode(token_bytes(cast("str | None", self._backend.convert_ids_to_tokens(token))))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _StreamDetokenizer:
    """For the rest, where a token's text may depend on its neighbours."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []

    def push(self, token: int) -> str:
        text = self._stream.step(self._tokenizer._backend.backend_tokenizer, token)
        self._held = [] if text else [*self._held, token]
        return text or ""

    def finish(self) -> str:
        return self._tokenizer.decode(self._held)


def token_bytes(token: str | None) -> bytes:
    """Bytes of a byte-level vocabulary's token; none for an id past the vocabulary.

    GPT-2's `bytes_to_unicode` writes every byte as a printable character. A token with any other
    character is an added one, written as it is.
    """
    if token is None:
        return b""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_table() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_table()


def import_transformers() -> ModuleType:
    """transformers, which takes a second to import that a model without a tokenizer need not wait for."""
    # It would advise every user of this package to install torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face directory, None if it has no tokenizer files.

    Raises:
      CheckpointError: the files are there but broken.
    """
    if not any((directory / name).is_file() for name in _FILES):
        return None
    try:
        backend = import_transformers().AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises whatever its parsers do
        raise CheckpointError(f"the tokenizer files in {directory} cannot be read ({error})") from error
    return Tokenizer(cast("PreTrainedTokenizerFast", backend))
