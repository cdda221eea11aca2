"""Chat templates: what Hugging Face gives them is there, what could do harm is not."""

import time

import pytest

from tokenspeed_jax.errors import CheckpointError, InvalidRequest
from tokenspeed_jax.text import template_sandbox
from tokenspeed_jax.text.chat_template import ChatTemplate, template_source
from tokenspeed_jax.text.template_sandbox import RenderingTooLong, brief_renderings

HELLO = [{"role": "user", "content": "hi"}]


def render(source, messages=HELLO, **variables):
    variables.setdefault("add_generation_prompt", True)
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **variables)


def test_messages_special_tokens_and_variables_are_there():
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}{{ style }}"
    )
    assert render(source, style="!") == "<s>[user]hi>!"
    assert render(source, add_generation_prompt=False) == "<s>[user]hi"


def test_blocks_leave_no_lines_behind():
    assert render("{% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_loop_controls_generation_tag_json_and_time():
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ tools is none }}") == "True"


def test_names_of_variables_are_found_as_whole_words():
    template = ChatTemplate("{% if tools %}{{ my_style }}{% endif %}", {})
    assert template.mentions("tools")
    assert not template.mentions("tool")
    assert not template.mentions("style")


def test_refusal_of_the_template_reaches_the_caller():
    with pytest.raises(InvalidRequest, match="roles must alternate") as error:
        render("{{ raise_exception('roles must alternate') }}")
    assert error.value.parameter == "messages"


@pytest.mark.parametrize("source", ["{{ messages[5].content }}", "{{ 'a' + 1 }}", "{{ undefined_name.x }}"])
def test_template_that_fails_on_the_messages_is_a_refusal(source):
    with pytest.raises(InvalidRequest, match="does not take these messages"):
        render(source)


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ render.__globals__ }}"]
)
def test_sandbox_holds(source):
    with pytest.raises(InvalidRequest):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) | list %}{% for a in r %}{% for b in r if b < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in [[[], []]] * 40 recursive %}{{ loop([[1] * 90] * 90) }}{{ loop([a]) }}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}", "{{ [0] * 10 ** 12 }}", "{{ 10 ** (10 ** 10) }}", "{{ 9.9 ** 999 }}",
        "{{ '%999999999d' % 1 }}", "{{ '%*d' % (999999999, 1) }}", "{{ '{:999999999}'.format(1) }}",
        "{{ 'a'.center(10 ** 12) }}", "{{ 'a'.ljust(10 ** 12) }}",
    ],
)  # fmt: skip
def test_template_without_an_end_is_ended(source):
    start = time.process_time()
    with pytest.raises(InvalidRequest, match="does not take these messages"):
        render(source)
    assert time.process_time() - start < 10


def test_steps_are_counted_for_each_rendering_alone(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MOST_STEPS", 5)
    template = ChatTemplate("{% for m in messages %}{{ loop.index }}/{{ loop.length }} {% endfor %}", {})
    for _ in range(3):
        assert template.render(HELLO * 3, add_generation_prompt=True) == "1/3 2/3 3/3 "
    with pytest.raises(InvalidRequest, match="more than 5 steps"):
        template.render(HELLO * 9, add_generation_prompt=True)


def test_a_rendering_that_has_to_be_brief_is_cut_off_and_can_start_again():
    template = ChatTemplate("{% for a in range(30000) %}{% if loop.last %}{{ a }}{% endif %}{% endfor %}", {})
    start = time.thread_time()
    with pytest.raises(RenderingTooLong), brief_renderings(0.002):
        template.render(HELLO, add_generation_prompt=True)
    assert time.thread_time() - start < 0.2
    assert template.render(HELLO, add_generation_prompt=True) == "29999"
    with brief_renderings(60.0):
        assert template.render(HELLO, add_generation_prompt=True) == "29999"


def test_ordinary_repetition_and_formatting_still_work():
    assert render("{{ '-' * 3 }}{{ 2 ** 8 }}{{ '%s!' % 'a' }}{{ '{:>3}'.format(1) }}{{ 7 % 4 }}") == "---256a!  13"


def test_template_that_does_not_parse_is_an_error_of_the_checkpoint():
    with pytest.raises(CheckpointError, match="does not parse"):
        render("{% for %}")


def test_source_is_the_file_else_the_default_entry():
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert template_source({"chat_template": named}, None) == "D"
    assert template_source({"chat_template": "S"}, None) == "S"
    assert template_source({"chat_template": "S"}, "F") == "F"
    assert template_source({"chat_template": named[:1]}, None) is None
    assert template_source({}, None) is None
