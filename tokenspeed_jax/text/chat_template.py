"""Rendering of a checkpoint's chat template, in a sandbox."""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from tokenspeed_jax.errors import CheckpointError, InvalidRequest
from tokenspeed_jax.text.template_sandbox import TemplateSandbox

_FAILURES = (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError)
"""What a template's own operations raise."""


class ChatTemplate:
    """A Jinja template that turns messages into the text of a prompt.

    Templates come from checkpoints, so they run in a sandbox: no attribute that starts with an underscore, no change to
    what they are given, a bound on their steps. They find there what Hugging Face gives them: `raise_exception`,
    `strftime_now`, a `tojson` filter that keeps text readable, loop controls and the `generation` tag.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles the template.

        Args:
            special_tokens: names such as `bos_token` and their text.

        Raises:
            CheckpointError: the template does not parse.
        """
        environment = self._sandbox = TemplateSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._special_tokens = dict(special_tokens)
        self._words = frozenset(re.findall(r"\w+", source))
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template does not parse: {error}") from error

    def mentions(self, variable: str) -> bool:
        """Whether the template has the name of a variable in it, without which it cannot use it."""
        return variable in self._words

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **variables: Any) -> str:
        """The prompt's text.

        Args:
            add_generation_prompt: end with the header of the assistant's turn.
            variables: further values that the template may use, such as `tools`.

        Raises:
            InvalidRequest: the template refused the messages, or failed on them.
        """
        context = {**self._special_tokens, "tools": None, "documents": None, **variables}
        self._sandbox.begin()
        try:
            return self._template.render(
                context, messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, *_FAILURES) as error:
            raise InvalidRequest(
                f"the chat template does not take these messages: {error}", parameter="messages"
            ) from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance-overridable set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def template_source(tokenizer_config: Mapping[str, Any], file_text: str | None) -> str | None:
    """The template of a checkpoint: its `chat_template.jinja`, else the (default) one of `tokenizer_config.json`."""
    if file_text is not None:
        return file_text
    entry = tokenizer_config.get("chat_template")
    if isinstance(entry, list):
        entry = {item["name"]: item["template"] for item in entry}.get("default")
    return entry
