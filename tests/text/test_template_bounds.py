"""Chat templates are programs of strangers: whatever they do is one request's error, soon and in bounded memory."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_jax.errors import RequestError
from dflash_jax.text import render as rendering
from dflash_jax.text.render import render
from tests.text.hurry import in_a_hurry

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CONTEXT = {"messages": [{"role": "user", "content": "hi"}], "s": "abc", "n": 3, "d": {"k": [1, {"x": None}]}, "t": True}
HI = "<user>hi"


def refusal(template: str) -> str:
    """The reason that a template is refused for; the next rendering goes well."""
    with pytest.raises(RequestError) as refused:
        render(template, CONTEXT)
    assert render(CHAT, CONTEXT) == HI
    assert len(str(refused.value)) < 600
    return str(refused.value)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ messages[0].content.items() }}", "no attribute 'items'"),
        ("{{ messages[0].content | dictsort }}", "AttributeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ range(10 ** 12) }}", "OverflowError"),
        ("{{ messages['a'].b }}", "has no attribute"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
        ("{{ raise_exception('only users') }}", r"\(only users\)"),
        ("{{ raise_exception('a\n\nb' ~ '\ud800') }}", r"\(a b\?\)"),
        ("{% for %}", "at line 1 of the template"),
        ("{% include 'other' %}", "no loader"),
        ("{{ s | nosuch }}", "nosuch"),
    ],
)
def test_whatever_a_template_raises_is_the_requests_error(template, reason):
    assert re.search(reason, refusal(template))


BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 'x' * 3000000000 }}",
    "{{ (messages * 1000000000) | length }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ s.center(10 ** 10) }}",
    "{{ (s * 1000000).replace('a', s * 1000000) }}",
    "{{ s.join([s] * 1000000000) }}",
    "{{ ([s * 1000000] * 1000000) | join }}",
    "{{ s | indent(10 ** 10) }}",
    "{{ d | tojson(indent=10 ** 10) }}",
    "{{ [1] | batch(10 ** 10, 0) | list }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ lipsum(100000, min=10000, max=20000) }}",
    "{{ raise_exception('y' * 500000000) }}",
    "{{ strftime_now('%Y' * 10000000) | length * strftime_now('%Y' * 1000000000) | length }}",
]


@pytest.fixture
def hurried():
    """Renderings may take a tenth of the time they have in earnest."""
    with in_a_hurry():
        yield


@pytest.mark.parametrize("template", BOMBS)
def test_time_memory_and_length_are_bounded(hurried, template):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    refusal(template)
    assert time.perf_counter() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ s.format.__globals__ }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(s) }}",
        "{{ '{0.__class__}'.format_map({'0': s}) }}",
        "{{ (s | attr('format'))('{0.__class__}') }}{{ s | attr('__class__') }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ joiner.__class__.__base__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = s %}{{ ns }}",
        "{{ dict.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% import 'os' as os %}",
        "{% extends '/etc/passwd' %}",
        "{{ open('/etc/passwd') }}",
        "{{ import('os') }}",
    ],
)
def test_the_sandbox_holds(template):
    try:
        text = render(template, CONTEXT)
    except RequestError as error:
        text = str(error)
    assert not re.search("<(class|function|code|module|built-in|os)|root:|object at", text)
    assert render(CHAT, CONTEXT) == HI


def test_the_time_it_may_take_in_earnest_is_a_few_seconds():
    start = time.perf_counter()
    assert "takes more than 2 seconds" in refusal(BOMBS[0])
    # Of the processor's; a busy machine takes longer for them, but not longer than ten times that.
    assert time.perf_counter() - start < 30


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks at the process through /proc")
def test_the_process_of_the_templates_knows_none_of_the_environment_and_dies_with_its_pipe(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    rendering._process._end()
    assert render(CHAT, CONTEXT) == HI
    process = rendering._process._process
    assert process is not None
    assert b"SECRET" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert os.getsid(process.pid) != os.getsid(0)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=10) == 0
    rendering._process._process = None
    assert render(CHAT, CONTEXT) == HI


def test_a_process_that_was_killed_costs_one_request():
    assert render(CHAT, CONTEXT) == HI
    process = rendering._process._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(RequestError, match="by signal 9"):
        render(CHAT, CONTEXT)
    assert render(CHAT, CONTEXT) == HI


def test_an_interruption_leaves_nothing_of_the_request_behind(monkeypatch):
    assert render(CHAT, CONTEXT) == HI
    process = rendering._process._process
    assert process is not None and process.stdout is not None

    def interrupted(size):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(process, "stdout", _Pipe(process.stdout, interrupted))
        with pytest.raises(KeyboardInterrupt):
            render("another", CONTEXT)
    assert render(CHAT, CONTEXT) == HI


class _Pipe:
    def __init__(self, pipe, read):
        self.read, self.close = read, pipe.close


def test_a_fork_does_not_speak_through_its_parents_pipes():
    code = (
        "import os\n"
        "from dflash_jax.text.render import render\n"
        "assert render('{{ a }}', {'a': 'parent'}) == 'parent'\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(render('{{ a }}', {'a': 'child'}) != 'child')\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert render('{{ a }}', {'a': 'parent'}) == 'parent'\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=300)


def test_an_ordinary_template_takes_less_than_a_few_milliseconds():
    render(CHAT, CONTEXT)
    start = time.perf_counter()
    for _ in range(200):
        render(CHAT, CONTEXT)
    assert (time.perf_counter() - start) / 200 < 0.01


def test_long_conversations_pass():
    messages = [{"role": "user", "content": "x" * 1_000_000}] * 4
    assert len(render(CHAT, {"messages": messages})) == 4 * (1_000_000 + len("<user>"))


def test_templates_may_use_what_those_of_published_models_use():
    template = (
        "{%- set ns = namespace(found=false) -%}"
        "{% for m in messages %}{% if loop.last %}{% set ns.found = true %}{% continue %}{% endif %}no{% endfor %}"
        "{{ ns.found }}|{% generation %}{{ messages[0]['content'].split('i')[0] }}{% endgeneration %}|"
        "{{ [1] | tojson(indent=1) }}|{{ strftime_now('%Y')|length }}|{{ 'é<&' | tojson }}|{{ dict(a=1).a }}"
    )
    assert render(template, CONTEXT) == 'True|h|[\n 1\n]|4|"é<&"|1'
