"""The command line: parses, calls, prints.

Each command imports what it needs when it is called, so that `--help` does not wait for JAX.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal, Optional, TypeVar

import typer

from dflash_jax.errors import DflashError

if TYPE_CHECKING:
    from pydantic import BaseModel

app = typer.Typer(
    name="dflash-jax",
    help="LLM generation in JAX by DFlash and DFlash 2 speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_bench = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(_bench, name="bench")

_Set = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads it at run time
    typer.Option("--set", metavar="A.B=VALUE", help="Replace a value of the config; may be repeated."),
]


_Settings = TypeVar("_Settings", bound="BaseModel")


def _read(settings: type[_Settings], config: str, set_: list[str] | None) -> _Settings:
    from dflash_jax.settings import parse, read_settings

    return parse(settings, read_settings(config, set_ or ()), config)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        import importlib.metadata

        print(f"dflash-jax {importlib.metadata.version('dflash_jax')}")
        raise typer.Exit


@app.command()
def generate(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="The job; see docs/job.md.")],
    set_: _Set = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Forget answers of earlier runs.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing while it runs.")] = False,
) -> None:
    """Generate for a file of prompts. Run again, it does only what is missing."""
    from dflash_jax.jobs.signals import stop_on_signals

    with stop_on_signals() as stop:
        from dflash_jax.compile_cache import enable_compile_cache
        from dflash_jax.jobs.config import load_job
        from dflash_jax.jobs.generate import run_job
        from dflash_jax.jobs.screen import Screen

        job = load_job(config, set_ or ())
        enable_compile_cache()
        screen = Screen(samples=job.report.samples, quiet=quiet)
        found = run_job(job, overwrite=overwrite, stop=stop, screen=screen)
    screen.outcome(found)
    if stop.signal is not None:
        print(f"dflash-jax: stopped by {stop.signal.name}; run the same command again for the rest", file=sys.stderr)
        raise typer.Exit(128 + stop.signal)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A directory, a .gguf file, wheel:NAME==VERSION, or a hub id.")],
    draft: Annotated[Optional[str], typer.Option(help="A draft to go with it.")] = None,  # noqa: UP045
    k: Annotated[Optional[int], typer.Option(help="Tokens to draft in a round.")] = None,  # noqa: UP045
    page_size: Annotated[int, typer.Option(help="Tokens in a page.")] = 16,
    max_model_len: Annotated[int, typer.Option(help="Longest prompt and output together.")] = 512,
    max_slots: Annotated[int, typer.Option(help="Requests in flight at once.")] = 8,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of weights and pages.")] = "float32",
    mask_token_id: Annotated[Optional[int], typer.Option(help="For drafts that name none.")] = None,  # noqa: UP045
) -> None:
    """Tell what a checkpoint is, its sizes, and the memory that serving it takes."""
    from dflash_jax.engine.config import EngineConfig
    from dflash_jax.jobs.inspect import inspect_checkpoint, print_inspection
    from dflash_jax.settings import parse

    sizes = {"page_size": page_size, "max_model_len": max_model_len, "max_slots": max_slots, "dtype": dtype}
    engine = parse(EngineConfig, sizes, "inspect")
    print_inspection(inspect_checkpoint(path, draft=draft, k=k, engine=engine, mask_token_id=mask_token_id))


@_bench.command()
def ladder(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="Target, draft and engine; a job's will do.")],
    concurrency: Annotated[str, typer.Option(help="Requests in flight, rung by rung.")] = "1,2,4,8,16,32",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens each request makes.")] = 64,
    requests_per_slot: Annotated[int, typer.Option(min=1, help="Requests of a rung for each slot, at least.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Times each way is timed; the best counts.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of random prompts and of sampling.")] = 0,
    out: Annotated[str, typer.Option(metavar="DIR", help="For ladder.json and ladder.png.")] = "runs/ladder",
    set_: _Set = None,
) -> None:
    """Measure speculation on and off at growing concurrency; see docs/ladder.md."""
    from rich.console import Console

    from dflash_jax.compile_cache import enable_compile_cache
    from dflash_jax.jobs.ladder import Load, failures, run_ladder
    from dflash_jax.jobs.ladder_config import load_ladder, parse_rungs
    from dflash_jax.jobs.ladder_report import ladder_table, write_ladder

    settings, rungs = load_ladder(config, set_ or ()), parse_rungs(concurrency)
    enable_compile_cache()
    load = Load(prompt_tokens, output_tokens, requests_per_slot, repeats, seed)
    found = run_ladder(settings, rungs, load, note=lambda text: print(text, file=sys.stderr))
    figures, plot = write_ladder(out, found)
    Console(highlight=False).print(ladder_table(found))
    print(f"prompts: {found['prompts']['source']}\nfigures: {figures}\nplot: {plot}")
    if failed := failures(found):
        print(f"dflash-jax: {failed} requests failed; {figures} says why", file=sys.stderr)
        raise typer.Exit(1)


data = typer.Typer(help="Text for training, written by the target.", no_args_is_help=True)
app.add_typer(data, name="data")


@data.command("generate")
def data_generate(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="The corpus; see docs/training.md.")],
    set_: _Set = None,
) -> None:
    """Let the target write conversations. Run again, it writes only what is missing."""
    from dflash_jax.compile_cache import enable_compile_cache
    from dflash_jax.training.corpora.config import CorpusConfig
    from dflash_jax.training.corpora.generate import write_corpus

    corpus = _read(CorpusConfig, config, set_)
    enable_compile_cache()
    write_corpus(corpus)


@data.command("pack")
def data_pack(
    corpora: Annotated[list[str], typer.Argument(help="Files that `data generate` wrote.")],
    directory: Annotated[str, typer.Argument(help="Where the shards go.")],
) -> None:
    """Write corpora as shards that training reads, without repetitions."""
    from dflash_jax.training.corpora.packing import pack_corpus

    conversations, tokens = pack_corpus(corpora, directory)
    print(f"{conversations} conversations, {tokens} tokens, in {directory}")


@data.command("shortlist")
def data_shortlist(
    directory: Annotated[str, typer.Argument(help="Shards that `data pack` wrote.")],
    file: Annotated[str, typer.Argument(help="Where the list goes, as JSON.")],
    tokens: Annotated[int, typer.Option(help="How many.", min=1)] = 8192,
) -> None:
    """Write the most frequent tokens of sequences, for `draft.shortlist`."""
    from dflash_jax.checkpoints.shortlist import write_shortlist
    from dflash_jax.training.data.dataset import most_frequent

    found, share = most_frequent(directory, tokens)
    write_shortlist(file, found)
    print(f"{len(found)} tokens, {share:.1%} of those in {directory}, in {file}")


@data.command("features")
def data_features(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="The training run.")],
    set_: _Set = None,
) -> None:
    """Compute the target's features of a run's data ahead of it; what is there already stays."""
    from dflash_jax.compile_cache import enable_compile_cache
    from dflash_jax.progress import Bar
    from dflash_jax.training import TrainConfig
    from dflash_jax.training.run.setup import build_features

    run = _read(TrainConfig, config, set_)
    enable_compile_cache()
    with Bar("computing features", 0) as bar:
        build_features(run, lambda done, total: bar.at(done, total=total))


@app.command()
def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="The run; see docs/training.md.")],
    set_: _Set = None,
) -> None:
    """Train a drafter. Run again, it goes on from the newest checkpoint."""
    from dflash_jax.compile_cache import enable_compile_cache
    from dflash_jax.training import TrainConfig, run_training

    run = _read(TrainConfig, config, set_)
    enable_compile_cache()
    run_training(run)


@app.command()
def export(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="The training run.")],
    directory: Annotated[str, typer.Argument(help="Where the draft goes.")],
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights.")] = "bfloat16",
    set_: _Set = None,
) -> None:
    """Export a run's newest checkpoint in Hugging Face layout."""
    from dflash_jax.training import TrainConfig, export_draft

    step = export_draft(_read(TrainConfig, config, set_), directory, dtype)
    print(f"step {step} exported to {directory}")


@app.command()
def average(
    drafts: Annotated[list[str], typer.Argument(metavar="DRAFT...", help="Drafts that were trained from one another.")],
    directory: Annotated[str, typer.Argument(help="Where their mean goes.")],
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights.")] = "bfloat16",
) -> None:
    """Write the mean of drafts' weights in Hugging Face layout."""
    from dflash_jax.training import average_drafts

    average_drafts(drafts, directory, dtype)
    print(f"the mean of {len(drafts)} drafts is in {directory}")


def main() -> None:
    """Runs the command line; what a user did wrong is one sentence on stderr and exit code 2."""
    try:
        app()
    except DflashError as error:
        print(f"dflash-jax: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        # Where nobody said more about a file, the system's own reason is the sentence.
        print(
            f"dflash-jax: {error.filename or 'a file'} cannot be read or written ({error.strerror or error})",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
