"""What can be asked of an engine: a request is refused at once if it can never be served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.engine.grammars import Grammars
from dflash_jax.engine.pages import PagePool, pages_for
from dflash_jax.engine.processors.bad_words import MAX_LENGTH
from dflash_jax.engine.prompts import Prompt
from dflash_jax.engine.request import Request, SamplingParams
from dflash_jax.errors import RequestError, quote
from dflash_jax.models.config import TargetConfig
from dflash_jax.text.chat import read_chat


def tokenize(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Token ids of a prompt.

    Raises:
      RequestError: it is text or messages, and there is no tokenizer or no chat template for it.
    """
    if isinstance(prompt, np.ndarray | jax.Array) and prompt.ndim == 1:
        prompt = prompt.tolist()
    kinds = {type(part) for part in prompt} if isinstance(prompt, Sequence) else set()
    if not isinstance(prompt, str) and kinds and all(issubclass(kind, int | np.integer) for kind in kinds):
        return tuple(int(token) for token in prompt)  # type: ignore[arg-type]
    if isinstance(prompt, Sequence) and not prompt:
        return ()
    is_chat = isinstance(prompt, Mapping) or (bool(kinds) and all(issubclass(kind, Mapping) for kind in kinds))
    if not isinstance(prompt, str) and not is_chat:
        raise RequestError(
            f"the prompt is {quote(prompt)}; it must be text, a list of token ids, or a list of messages, "
            "which may be the `messages` of a mapping"
        )
    if tokenizer is None:
        raise RequestError("the prompt is text, but the model has no tokenizer; give token ids instead")
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    return tuple(tokenizer.encode_chat(read_chat(prompt)))  # type: ignore[arg-type]


def make_request(
    request_id: str,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    *,
    target: TargetConfig,
    max_model_len: int,
    pool: PagePool,
    tokenizer: Tokenizer | None,
    grammars: Grammars | None = None,
) -> Request:
    """A request that the engine can serve.

    Args:
      request_id: its id.
      prompt: token ids.
      sampling: how to answer.
      target: the model that answers.
      max_model_len: longest prompt and output together.
      pool: the page pool it will live in.
      tokenizer: makes output text, if there is one.
      grammars: of structured output, if there is a tokenizer.

    Raises:
      RequestError: it can never be served; the message has the numbers.
    """
    if not prompt:
        raise RequestError("the prompt is empty; it must have at least one token")
    outside = [token for token in prompt if not 0 <= token < target.vocab_size]
    if outside:
        raise RequestError(f"prompt token {outside[0]} is outside the vocabulary of {target.vocab_size} tokens")
    room = max_model_len - len(prompt)
    if room <= 0:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, which leaves no room to answer in "
            f"engine.max_model_len {max_model_len}"
        )
    if sampling.stop and tokenizer is None:
        raise RequestError("stop strings need a tokenizer, and the model has none; use stop_token_ids instead")
    own = () if sampling.ignore_eos else target.eos_token_ids
    special = [] if tokenizer is None else [tokenizer.special_id(stop) for stop in sampling.stop]
    of_strings = [token for token in special if token is not None and token < target.vocab_size]
    stop_tokens = tuple(dict.fromkeys((*own, *sampling.stop_token_ids, *of_strings)))
    strange = [token for token in stop_tokens if token >= target.vocab_size]
    if strange:
        raise RequestError(f"stop token {strange[0]} is outside the vocabulary of {target.vocab_size} tokens")
    bad_words = _bad_words(sampling, tokenizer)
    request = Request(request_id, prompt, sampling, stop_tokens, min(sampling.max_tokens, room), bad_words)
    if request.is_processed:
        _check_allowed(request, target.vocab_size)
    _check_structured(request, grammars)
    needed = pages_for(request.longest, pool.page_size)
    if needed > pool.num_pages:
        raise RequestError(
            f"the request may grow to {request.longest} tokens, which is {needed} pages of {pool.page_size}, but "
            f"the whole pool has {pool.num_pages} (engine.num_pages)"
        )
    return request


def _bad_words(sampling: SamplingParams, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the bad words, each alone and after a space.

    Raises:
      RequestError: there is no tokenizer, or one of them is too long.
    """
    if not sampling.bad_words:
        return ()
    if tokenizer is None:
        raise RequestError("sampling.bad_words needs a tokenizer, and the model has none; use logit_bias instead")
    sequences: dict[tuple[int, ...], None] = {}
    for word in sampling.bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            tokens = tuple(tokenizer.encode_alone(text))
            if len(tokens) > MAX_LENGTH:
                raise RequestError(
                    f"sampling.bad_words has {quote(word)}, which is {len(tokens)} tokens; at most {MAX_LENGTH} can be"
                )
            if tokens:
                sequences[tokens] = None
    return tuple(sequences)


def _check_allowed(request: Request, vocab_size: int) -> None:
    """Refuses a request whose parameters name tokens that there are not, or leave none to begin with."""
    sampling = request.sampling
    named = {
        "logit_bias": [token for token, _ in sampling.biases],
        "allowed_token_ids": sampling.allowed_token_ids or (),
    }
    for name, tokens in named.items():
        outside = [token for token in tokens if token >= vocab_size]
        if outside:
            raise RequestError(
                f"sampling.{name} has token {outside[0]}, which is outside the vocabulary of {vocab_size} tokens"
            )
    forbidden = {tokens[0] for tokens in request.bad_words if len(tokens) == 1}
    if sampling.min_tokens:
        forbidden.update(request.stop_tokens)
    allowed = sampling.allowed_token_ids
    if (len(forbidden) >= vocab_size) if allowed is None else forbidden.issuperset(allowed):
        raise RequestError(
            "sampling.allowed_token_ids, bad_words and min_tokens together forbid every token; at least one must be "
            "allowed at the beginning"
        )


def _check_structured(request: Request, grammars: Grammars | None) -> None:
    """Refuses a structured output that cannot be followed, or that nothing would end."""
    structured = request.sampling.structured_outputs
    if structured is None:
        return
    if grammars is None:
        raise RequestError("sampling.structured_outputs needs a tokenizer, and the model has none")
    if not request.stop_tokens:
        raise RequestError(
            "sampling.structured_outputs needs a token to end with, and the request has none; leave ignore_eos out, or "
            "give stop_token_ids"
        )
    assert isinstance(structured, tuple), "parameters keep it as a kind and a text"
    grammars.check(structured)
