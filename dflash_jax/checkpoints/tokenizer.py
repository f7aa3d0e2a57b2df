"""Text to token ids and back, whatever file the tokenizer came from."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from dflash_jax.errors import CheckpointError, RequestError, reason
from dflash_jax.text.chat import Chat, ChatTemplate
from dflash_jax.text.detokenizer import Detokenizer, Vocabulary, is_panic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Detokenizer", "Tokenizer", "import_transformers", "load_tokenizer"]

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

_log = logging.getLogger(__name__)


class Tokenizer:
    """A tokenizer with its special tokens and chat template."""

    def __init__(self, backend: PreTrainedTokenizerFast):
        self._backend = backend
        self._vocabulary = Vocabulary(backend)
        self._chat = ChatTemplate(backend.chat_template, _special_tokens(backend))
        self._noted_bos = False

    @property
    def backend(self) -> PreTrainedTokenizerFast:
        """transformers' tokenizer, for libraries that take one."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included. A model may have more, never used."""
        return len(self._backend)

    @property
    def eos_token_id(self) -> int | None:
        """The token that the tokenizer's files name as the end of a text, if they do."""
        eos = self._backend.eos_token
        return None if eos is None else self._id_of(eos)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat` can be used."""
        return self._chat.usable

    def with_chat_template(self, template: str | None, kwargs: Mapping[str, Any] | None = None) -> Tokenizer:
        """The same tokenizer with another chat template, or other variables for it.

        Args:
          template: the name of one of the model's templates, a Jinja text, or the path of a file of one; None is
            the model's own.
          kwargs: variables of every rendering, such as `enable_thinking`; a conversation's own win.

        Raises:
          ConfigError: there is no such template.
        """
        other = copy.copy(self)
        other._chat = self._chat.override(template, kwargs or {})
        return other

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with what the tokenizer puts around every text (a BOS, if anything).

        A text that begins with the BOS already, as one that was made with a chat template does, gets no other.

        Raises:
          RequestError: the text is no Unicode text.
        """
        ids = self._encode(text, add_special_tokens=True)
        bos = self._backend.bos_token_id
        if bos is not None and ids[:2] == [bos, bos] and self._encode(text, add_special_tokens=False) == ids[1:]:
            if not self._noted_bos:
                _log.warning(
                    "a prompt begins with %r, which the tokenizer adds to every text; it is kept once",
                    self._backend.bos_token,
                )
            self._noted_bos = True
            return ids[1:]
        return ids

    def encode_alone(self, text: str) -> list[int]:
        """Token ids of a text and of nothing around it."""
        return self._encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, with or without the special tokens among them. Ids past the vocabulary have no text."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([*map(detokenizer.push, ids), detokenizer.finish()])

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool | None = None,
    ) -> str:
        """The text of a conversation up to where the assistant is to answer, or to continue its message.

        Args:
          messages, tools, continue_final_message: see `Chat`.
          chat_template_kwargs: further variables of the template.

        Raises:
          RequestError: the tokenizer has no chat template, or the template rejects the messages.
        """
        return self.render_chat(Chat(messages, tools, chat_template_kwargs or {}, continue_final_message))

    def render_chat(self, chat: Chat) -> str:
        """The text of a conversation; see `chat_text`."""
        return self._chat.render(chat)

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool | None = None,
    ) -> list[int]:
        """Token ids of a conversation up to where the assistant answers or continues; see `chat_text`."""
        return self.encode_chat(Chat(messages, tools, chat_template_kwargs or {}, continue_final_message))

    def encode_chat(self, chat: Chat) -> list[int]:
        """Token ids of a conversation; see `chat_text`."""
        # The template writes a BOS itself where the model wants one.
        return self._encode(self.render_chat(chat), add_special_tokens=False)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental detokenizer; its pieces join to what `decode` gives."""
        return self._vocabulary.detokenizer(skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """A token's own text, a special one's too; incomplete characters are U+FFFD, ids past the vocabulary empty."""
        return self._vocabulary.text(token)

    def special_id(self, text: str) -> int | None:
        """The special token that a text is exactly, if it is one."""
        token = self._id_of(text)
        return token if token in self._vocabulary.special else None

    def _id_of(self, piece: str) -> int | None:
        """The token that the vocabulary writes so; transformers takes the unknown token for any other."""
        token = self._backend.convert_tokens_to_ids(piece)
        return token if isinstance(token, int) and self._vocabulary.piece(token) == piece else None

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError:
            # The tokenizer's words for a string that is not one in Rust.
            raise RequestError(
                "the prompt has half of a surrogate pair, which is no character; it must be Unicode text"
            ) from None
        except BaseException as error:
            # A panic in Rust is no Exception, and is about this text alone; an interruption by the user is neither.
            if not is_panic(error):
                raise
            raise RequestError(f"the tokenizer cannot encode the prompt ({reason(error)})") from None


def _special_tokens(backend: PreTrainedTokenizerFast) -> dict[str, str]:
    """`bos_token` and its like, as chat templates name them."""
    return {name: str(token) for name, token in backend.special_tokens_map.items() if not isinstance(token, list)}


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
