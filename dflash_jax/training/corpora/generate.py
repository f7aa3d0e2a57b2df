"""Text for training, written by the target itself through the engine.

Each conversation takes two requests. In the first, the target writes the user's message: the prompt is the chat
template up to that message, and its first words. In the second, it answers the message, at a temperature that
it will be drafted at. Conversation i depends only on the seed and i, so an interrupted run continues where it
stopped and gives the same text.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from dflash_jax.checkpoints import load_target
from dflash_jax.engine import Engine, Models
from dflash_jax.errors import ConfigError
from dflash_jax.progress import Bar
from dflash_jax.signals import Stop
from dflash_jax.streams import open_file
from dflash_jax.training.corpora.config import CorpusConfig
from dflash_jax.training.corpora.conversations import Conversation, repair
from dflash_jax.training.corpora.writer import ConversationWriter
from dflash_jax.training.manifest import difference, flatten, read_manifest, write_manifest
from dflash_jax.training.precision import rounded
from dflash_jax.writing import sole_writer


def writing_engine(config: CorpusConfig) -> Engine:
    """The engine that writes a corpus.

    Raises:
      ConfigError, CheckpointError: the target cannot be loaded.
    """
    target = load_target(**config.target.arguments(), dtype=config.engine.dtype)
    models = Models(rounded(target.params, config.dtype), target.config)
    return Engine(models, config.engine, tokenizer=config.target.configure_tokenizer(target.tokenizer))


def generate_corpus(
    engine: Engine,
    config: CorpusConfig,
    on_dropped: Callable[[str], None] = lambda reason: None,
    stop: Stop | None = None,
) -> Iterator[Conversation]:
    """Writes the conversations that the output file lacks, yielding each as it is written.

    Args:
      engine: with the target and its tokenizer.
      config: what to write.
      on_dropped: is told the reason for each conversation that is dropped.
      stop: ends it after the current step when it becomes true.

    Raises:
      ConfigError: the target has no chat template, a file named in the config cannot be used, the output is another
        process's or was written with other settings, or nothing could be written.
    """
    if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
        raise ConfigError(f"target.path {config.target.path!r} has no chat template, so it cannot ask or answer")
    writer = ConversationWriter(engine, config, on_dropped)
    output = Path(config.output)
    with _writable(output) as file, sole_writer(output, f"the corpus {output}"):
        done = repair(output)
        _check_manifest(output, config, begun=bool(done))
        pending = iter(index for index in range(config.conversations) if index not in done)
        found = bool(done)
        while not stop:
            while _wants_more(engine) and (index := next(pending, None)) is not None:
                writer.start(index)
            if not engine.has_work:
                break
            for conversation in writer.step():
                _write(file, conversation, output)
                found = True
                yield conversation
    if not found and not stop:
        raise ConfigError(f"no conversation was written to {output}: {writer.first_dropped}")


def _writable(output: Path) -> BinaryIO:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return open_file(output, "ab")
    except OSError as error:
        raise ConfigError(f"output {output} cannot be written ({error.strerror}); it must be a file") from None


def _write(file: BinaryIO, conversation: Conversation, output: Path) -> None:
    """Hands a conversation to the system; what is not whole on a full disk is cut off by the next run."""
    try:
        data = conversation.to_json().encode() + b"\n"
        while data:
            data = data[os.write(file.fileno(), data) :]
    except OSError as error:
        raise ConfigError(
            f"output {output} cannot be written ({error.strerror}); what was written before stays, and the same "
            "command writes the rest"
        ) from None


def write_corpus(config: CorpusConfig, stop: Stop) -> None:
    """`generate_corpus` for the command line: shows how far it is and says what was written.

    Raises:
      Stopped: `stop` became true before the corpus was whole.
    """
    written = tokens = 0
    dropped: list[str] = []
    with Bar("writing", config.conversations, each="conversation") as bar:
        bar.doing(f"loading {config.target.path}")
        engine = writing_engine(config)
        for conversation in generate_corpus(engine, config, dropped.append, stop):
            written, tokens = written + 1, tokens + len(conversation.tokens) - conversation.prompt_len
            bar.at(written)
    print(f"{written} conversations with {tokens} tokens of answers written to {config.output}")
    if dropped:
        print(f"{len(dropped)} conversations were dropped; the first: {dropped[0]}")
    stop.check("; run the same command again for the rest")


def _wants_more(engine: Engine) -> bool:
    return len(engine.host.waiting) < max(1, engine.config.max_slots // 2)


def _check_manifest(output: Path, config: CorpusConfig, begun: bool) -> None:
    """Records beside a corpus what its text depends on. Raises ConfigError if it was begun with other settings."""
    file, settings = output.with_name(f"{output.name}.json"), _settings(config)
    if begun and file.exists() and (changed := difference(read_manifest(file), settings)):
        raise ConfigError(f"{output} was written with other settings ({changed}); give another output")
    write_manifest(file, settings)


def _settings(config: CorpusConfig) -> dict[str, object]:
    """Everything that the text of a conversation depends on; files by their content."""
    fields = config.model_dump(mode="json", exclude={"output", "conversations", "engine"})
    if config.prompts is not None or config.instructions is not None:
        fields = {name: value for name, value in fields.items() if not name.startswith("question_")}
    for name in ("starters", "prompts", "instructions"):
        if fields[name] is not None:
            fields[name] = _content(fields[name])
    fields["source_corpora"] = [_content(path) for path in fields["source_corpora"]]
    return {**flatten(fields), "engine.dtype": config.engine.dtype}


def _content(path: str) -> str:
    found, size = hashlib.sha256(), 0
    with open_file(path) as file:
        while piece := file.read(1 << 20):
            found.update(piece)
            size += len(piece)
    return f"{size} bytes with SHA-256 {found.hexdigest()}"
