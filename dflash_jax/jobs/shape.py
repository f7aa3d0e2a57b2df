"""What the config says of an input's records: how their columns are called, and the template of their prompts."""

from __future__ import annotations

from dflash_jax.jobs.config import InputFile
from dflash_jax.jobs.formats.base import Record
from dflash_jax.jobs.template import fill, names_in

_PROMPTS = ("prompt", "messages", "prompt_token_ids")


class Shape:
    """What an input's settings make of its records."""

    def __init__(self, settings: InputFile | None):
        """Takes `columns` and `template` of the settings; None stands for neither."""
        self._columns = {} if settings is None else settings.columns
        self._template = None if settings is None else settings.template
        self._named = {*self._columns.values(), *(names_in(self._template) if self._template is not None else ())}

    def rename(self, record: Record) -> Record:
        """A record with the values of columns under the keys that `input.columns` gives them."""
        if not self._columns:
            return record
        return {**record, **{key: record.get(column) for key, column in self._columns.items()}}

    def fill(self, record: Record) -> Record:
        """A record with the prompt that the template makes of it, and without the columns that the settings name.

        Raises:
          RequestError: the template names what the record has not.
        """
        kept = {key: value for key, value in record.items() if key not in self._named or key in self._columns}
        if self._template is None:
            return kept
        return {**{key: value for key, value in kept.items() if key not in _PROMPTS}, **fill(self._template, record)}
