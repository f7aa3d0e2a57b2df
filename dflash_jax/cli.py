"""The command line: parses, calls, prints.

Each command imports what it needs when it is called, so that `--help` does not wait for JAX.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal, Optional

import typer

from dflash_jax.errors import DflashError

app = typer.Typer(
    name="dflash-jax",
    help="LLM generation in JAX by DFlash and DFlash 2 speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_Set = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads it at run time
    typer.Option("--set", metavar="A.B=VALUE", help="Replace a value of the config; may be repeated."),
]


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
        from dflash_jax.jobs.compile_cache import enable_compile_cache
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
    from dflash_jax.engine.config import EngineConfig, parse
    from dflash_jax.jobs.inspect import inspect_checkpoint, print_inspection

    sizes = {"page_size": page_size, "max_model_len": max_model_len, "max_slots": max_slots, "dtype": dtype}
    engine = parse(EngineConfig, sizes, "inspect")
    print_inspection(inspect_checkpoint(path, draft=draft, k=k, engine=engine, mask_token_id=mask_token_id))


def main() -> None:
    """Runs the command line; what a user did wrong is one sentence on stderr and exit code 2."""
    try:
        app()
    except DflashError as error:
        print(f"dflash-jax: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
