"""Any chat template there is, of the language's own parts, with any messages: a text, or that request's error."""

from __future__ import annotations

import json
import resource
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.checkpoints import Tokenizer
from dflash_jax.errors import RequestError
from tests.text.hurry import in_a_hurry
from tests.text.vocabularies import byte_level

TOKENIZER = Tokenizer(byte_level())

NAMES = st.sampled_from(["messages", "messages[0]", "s", "n", "d", "d.k", "nosuch", "loop", "m", "self", "range(n)"])
CONSTANTS = st.sampled_from(
    ["1", "-1", "10**9", "2.5", "''", "'a'", "'%d'", "'{0}'", "[]", "{}", "none", "true", "'é😀'"]
)
OPERATORS = st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or"])
FILTERS = st.sampled_from(
    """abs batch(3) capitalize center(9) default(1) dictsort escape first float format(1) groupby('x') indent int items
    join last length list lower map('upper') max min pprint random reject replace('a','b') reverse round select slice(2)
    sort string striptags sum title tojson trim truncate(3) unique upper urlencode urlize wordcount wordwrap(1) xmlattr
    nosuch batch(10**9,0) center(10**9) indent(10**9) tojson(indent=10**9)""".split()  # noqa: SIM905
)
TESTS = st.sampled_from(
    """boolean callable defined divisibleby(0) even in(s) iterable mapping none number odd sameas(1) sequence string
    undefined nosuch""".split()  # noqa: SIM905
)
METHODS = st.sampled_from(
    """keys() items() format(s) split() join(s) strip() append(1) get('x') center(n) encode() count(s) __class__ mro()
    rjust(10**9) replace('a',s) update(s) nosuch""".split()  # noqa: SIM905
)


def written(form: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """The form with parts for its `@`s, in order."""
    pieces = form.split("@")
    assert len(pieces) == len(parts) + 1
    return st.tuples(*parts).map(lambda found: pieces[0] + "".join(map("".join, zip(found, pieces[1:], strict=True))))


EXPRESSIONS = st.recursive(
    st.one_of(NAMES, CONSTANTS),
    lambda inner: st.one_of(
        written("(@ @ @)", inner, OPERATORS, inner),
        written("(@ | @)", inner, FILTERS),
        written("(@ is @)", inner, TESTS),
        written("(@).@", inner, METHODS),
        written("@[@]", inner, inner),
        written("(@ if @ else @)", inner, inner, inner),
        *(written(form, inner) for form in ("[@] * n", "range(@)", "raise_exception(@)", "strftime_now(@)", "f(@)")),
    ),
    max_leaves=6,
)
TEMPLATES = st.recursive(
    st.one_of(
        written("{{ @ }}", EXPRESSIONS),
        st.text(max_size=5),
        st.sampled_from(["{%", "}}", "{#", "{% endfor %}", "{% break %}"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        written("{% for m in @ %}@{% endfor %}", EXPRESSIONS, inner),
        written("{% for m in messages recursive %}@{{ loop(messages) }}{% endfor %}", inner),
        written("{% if @ %}@{% endif %}", EXPRESSIONS, inner),
        written("{% set s = @ %}@", EXPRESSIONS, inner),
        written("{% set x %}@{% endset %}{{ x * n }}", inner),
        written("{% macro f(n) %}@{% endmacro %}{{ f(n) }}", inner),
        written("{% filter @ %}@{% endfilter %}", FILTERS, inner),
        written("{% generation %}@{% endgeneration %}", inner),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": VALUES}),
        st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), VALUES, max_size=4),
    ),
    min_size=1,
    max_size=3,
)
SPEAKS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson }}{% endfor %}"


@pytest.fixture(scope="module")
def hurried():
    with in_a_hurry():
        yield


def check_rendered_or_refused(template, messages, tools=None, kwargs=None, goes_on=None):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    try:
        speaks = TOKENIZER.with_chat_template("{{ '' }}" + template)
        tokens = speaks.apply_chat(messages, tools=tools, chat_template_kwargs=kwargs, continue_final_message=goes_on)
    except RequestError as error:
        json.dumps(str(error), ensure_ascii=False).encode()
        assert len(str(error)) < 600 and "\n" not in str(error)
    else:
        assert len(tokens) < 1 << 23
    assert time.perf_counter() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


@given(template=TEMPLATES, messages=MESSAGES, variable=VALUES)
def test_fuzz_any_template_renders_or_is_the_requests_error(hurried, template, messages, variable):
    check_rendered_or_refused(template, messages, kwargs={"s": "abc", "n": 3, "d": variable})


@given(
    messages=st.one_of(MESSAGES, VALUES),
    tools=st.one_of(st.none(), VALUES),
    kwargs=VALUES,
    goes_on=st.one_of(st.none(), VALUES),
)
def test_fuzz_any_messages_render_or_are_the_requests_error(hurried, messages, tools, kwargs, goes_on):
    check_rendered_or_refused(SPEAKS, messages, tools, kwargs, goes_on)
