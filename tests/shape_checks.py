"""How annotations are checked at run time in tests; jaxtyping's import hook calls `check`."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

# As for static checkers, an int is a float.
_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function):
    """The function with its arguments and result checked; constructors are let through.

    Pytrees are rebuilt with all kinds of leaves - numbers, names of axes, leaves of one slot - so what
    a dataclass of arrays says of its fields holds where functions take it, not in every tree of its form.
    """
    return function if function.__name__ == "__init__" else _checked(function)
