"""A hostile template ends soon, in one clear error, with little memory; and its process ends with the reader's."""

# ruff: noqa: E501

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bytescale.common.errors import DataError
from bytescale.data.tokens import chat
from bytescale.data.tokens.chat import ChatTemplate, Rendered
from bytescale.data.tokens.messages import conversation_of
from tests.data.chats import CHATML
from tests.helpers.effort import one_of

RECORD = conversation_of({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]})
NINES = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
ENDS = "{% endfor %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(x='x') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
HOSTILE = {
    "loops": NINES + ENDS,
    "loops that write": NINES + "x" + ENDS,
    "loops that filter": NINES + "{{ 'a' | upper | lower | title }}" + ENDS,
    "a huge range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "a list of a huge range": "{{ range(99999) | list | length }}" * 3 + "{{ range(10 ** 10) | list | length }}",
    "a sum of ranges": "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "a repeated text": "{{ 'x' * 10 ** 12 }}",
    "a repeated text that is not written": "{% set a = 'x' * 10 ** 12 %}",
    "a repeated list": "{% set a = [1] * 10 ** 11 %}",
    "a repeated tuple": "{% set a = (1, 2) * 10 ** 11 %}",
    "a text of many parts": "{% set a = ('x' * 10 ** 8) ~ ('y' * 10 ** 9) %}{{ a * 9 }}",
    "a tower of powers": "{% set a = 10 ** (10 ** 10) %}",
    "a power that is not constant": "{% set a = (messages | length) ** (10 ** 11) %}",
    "a written power": "{{ 7 ** (7 ** (7 ** 7)) }}",
    "products of large numbers": "{% set ns = namespace(x=3) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a large number in decimals": "{% set a = 9 ** (9 ** 7) %}{{ a | string | length }}",
    "a shift by powers of floats": "{{ 1e308 ** 2 }}{% set a = 10 ** (10 ** 9) %}",
    "doubling a text": DOUBLING,
    "doubling with ~": DOUBLING.replace("ns.x + ns.x", "ns.x ~ ns.x"),
    "doubling a list": DOUBLING.replace("'x'", "[1]"),
    "doubling by joining": DOUBLING.replace("ns.x + ns.x", "[ns.x, ns.x] | join"),
    "doubling by replacing": DOUBLING.replace("ns.x + ns.x", "ns.x | replace('x', 'xx')"),
    "doubling by formatting": DOUBLING.replace("ns.x + ns.x", "'%s%s' | format(ns.x, ns.x)"),
    "doubling by str.format": DOUBLING.replace("ns.x + ns.x", "'{0}{0}'.format(ns.x)"),
    "doubling a block": DOUBLING.replace("{% set ns.x = ns.x + ns.x %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "doubling by JSON": DOUBLING.replace("ns.x + ns.x", "[ns.x, ns.x] | tojson"),
    "a recursive macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "a recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a nested list": "{% set ns = namespace(x=[]) %}{% for a in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "the repr of a nested list": "{% set ns = namespace(x=[]) %}{% for a in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "batch": "{{ range(9999999) | batch(1, 'x') | list | length }}{{ [1] | batch(10 ** 11, 'x') | list | length }}",
    "slice": "{{ [1] | slice(10 ** 11) | list | length }}",
    "indent": "{{ ('a\n' * 10 ** 7) | indent(10 ** 5) | length }}",
    "wordwrap": "{{ ('a ' * 10 ** 8) | wordwrap(1) | length }}",
    "center": "{{ 'a' | center(10 ** 12) }}",
    "ljust": "{{ 'a'.ljust(10 ** 12) }}",
    "zfill": "{{ 'a'.zfill(10 ** 11) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) * 100 }}",
    "format": "{{ '%1000000000d' | format(1) * 100 }}",
    "str.format": "{{ '{:>100000000000}'.format(1) }}",
    "format with a width": "{{ '%*d' | format(2000000000, 1) }}",
    "urlize": "{{ ('http://a.b ' * 10 ** 7) | urlize | length }}",
    "striptags": "{{ ('<' * 10 ** 8) | striptags }}{{ ('<!--' * 10 ** 7) | striptags }}",
    "lipsum": "{% for a in range(99999) %}{{ lipsum(n=9999) }}{% endfor %}",
    "a cycler and a joiner": "{% set c = cycler(1, 2) %}" + NINES + "{{ c.next() }}" + ENDS,
    "sorting": "{% for a in range(99999) %}{{ range(99999) | sort(reverse=true) | first }}{% endfor %}",
    "groups": "{% for a in range(99999) %}{{ range(99999) | map('string') | groupby(0) | length }}{% endfor %}",
    "a date": "{{ strftime_now('%1000000000d') * 1000 }}{{ strftime_now('%A' * 10 ** 9) }}",
    "a count of texts": "{% for a in range(99999) %}{{ ('a' * 10 ** 8).count('aab') }}{% endfor %}",
    "an error as long as a book": "{{ raise_exception('x' * 10 ** 8) }}",
    "much text": "{{ 'x' * 10 ** 8 }}",
}  # fmt: skip


def raise_errors(template: ChatTemplate) -> None:
    for found in template.render([RECORD]):
        if isinstance(found, DataError):
            raise found


@pytest.mark.parametrize("name", one_of(list(HOSTILE), "a repeated text"))
def test_a_hostile_template_is_refused(name: str) -> None:
    template, begun = ChatTemplate(HOSTILE[name] + CHATML), time.process_time()
    most_before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    started = time.monotonic()
    with pytest.raises(
        DataError, match=r"The chat template (refuses the conversation \(|works too long|ends)"
    ) as caught:
        raise_errors(template)
    assert len(str(caught.value)) < 1000
    assert time.monotonic() - started < 60, "on a busy machine"
    assert time.process_time() - begun < 2, "of the reader itself"
    most_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # a child counts from what its parent had
    assert most_kib <= max(most_before, own, 1.5 * 2**20), "of all children so far, those of other tests included"
    (found,) = ChatTemplate(CHATML).render([RECORD])
    assert isinstance(found, Rendered), "another template is not held up"


def test_a_killed_process_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One conversation of many ends the process: the others are rendered all the same."""
    bad = conversation_of({"messages": [{"role": "user", "content": "end"}, {"role": "assistant", "content": "ok"}]})
    template = ChatTemplate("{% if messages[0].content == 'end' %}" + NINES + ENDS + "{% endif %}" + CHATML)
    kinds = [type(found) for found in template.render([RECORD, bad, RECORD])]
    assert kinds == [Rendered, DataError, Rendered]


def test_the_process_is_started_once_and_fast_and_ends_with_the_reader(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from bytescale.data.tokens import chat\n"
        "from tests.data.test_template_sandbox import RECORD, CHATML\n"
        "assert 'jinja2' not in sys.modules, 'only the sandbox needs it'\n"
        "started = time.perf_counter()\n"
        "template = chat.ChatTemplate(CHATML)\n"
        "template.check()\n"
        "seconds = time.perf_counter() - started\n"
        "sandbox = chat._sandbox_of(template._as_json, template.name, __import__('os').getpid())\n"
        "first = sandbox._process.pid\n"
        "list(template.render([RECORD, RECORD]))\n"
        "assert sandbox._process.pid == first\n"
        "print(first, seconds, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        process_id, seconds = reader.stdout.readline().split()
        modules = Path(f"/proc/{process_id}/maps").read_text()
        reader.send_signal(signal.SIGKILL)
    assert "torch" not in modules
    assert "numpy" not in modules
    assert float(seconds) < 3, "0.2 s on an idle machine"
    deadline = time.monotonic() + 10
    while Path(f"/proc/{process_id}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{process_id}/stat").read_text().split()[2] == "Z":
            break  # it has ended; nobody has asked for its exit code
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{process_id}").exists()


def test_a_fork_has_a_process_of_its_own() -> None:
    template = ChatTemplate(CHATML)
    list(template.render([RECORD]))
    key = (template._as_json, template.name)
    assert chat._sandbox_of(*key, os.getpid()) is not chat._sandbox_of(*key, os.getpid() + 1)
