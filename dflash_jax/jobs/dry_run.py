"""What a job would do, without loading weights or writing anything."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dflash_jax.checkpoints import resolve
from dflash_jax.errors import visible
from dflash_jax.jobs import summary
from dflash_jax.jobs.config import JobConfig
from dflash_jax.jobs.formats import read_output
from dflash_jax.jobs.inspect import Inspection, inspect_checkpoint, print_inspection
from dflash_jax.jobs.ledger import Ledger
from dflash_jax.jobs.reader import BadLine, read_items
from dflash_jax.progress import plain_console

_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What a job would do.

    Attributes:
      run: input lines that would be run.
      done: those that the output has an answer to.
      bad: those that cannot be read; what only a tokenizer can tell is not looked at.
      models: target and draft.
    """

    run: int
    done: int
    bad: tuple[BadLine, ...]
    models: Inspection


def dry_run(config: JobConfig, *, overwrite: bool = False) -> DryRun:
    """Looks at everything a job names.

    Args:
      config: the job.
      overwrite: as if answers of earlier runs were forgotten.

    Raises:
      ConfigError, CheckpointError: the job cannot be run.
    """
    output = Path(config.output.path)
    ledger = Ledger()
    for result in () if overwrite else read_output(output):
        ledger.add(result)
    answered = ledger.answered
    if answered:
        summary.check_identity(output, summary.read_summary(output), config.identity())
    run, done, bad = 0, 0, []
    for item in read_items(config.input, config.defaults):
        if isinstance(item, BadLine):
            bad.append(item)
        elif str(item.id) in answered:
            done += 1
        else:
            run += 1
    target, draft = config.target, config.draft
    models = inspect_checkpoint(
        resolve(target.path, target.revision, target.file),
        draft=None if draft is None else resolve(draft.path, draft.revision, draft.file),
        k=None if draft is None else draft.k,
        engine=config.engine,
        mask_token_id=None if draft is None else draft.mask_token_id,
        weights=config.target.weights,
        draft_weights=None if draft is None else draft.weights,
    )
    return DryRun(run, done, tuple(bad), models)


def print_dry_run(found: DryRun, config: JobConfig) -> None:
    """Prints it on stdout."""
    print_inspection(found.models)
    console = plain_console()
    console.print(f"{found.run} lines to run, {found.done} answered already, {len(found.bad)} that cannot be run")
    for line in found.bad[:_SHOWN]:
        console.print(f"error: {line.row} {line.line}: {visible(line.error)}", style="red", soft_wrap=True)
    if len(found.bad) > _SHOWN:
        console.print(f"... and {len(found.bad) - _SHOWN} more")
    console.print(visible(f"answers would go to {config.output.path}"), soft_wrap=True)
