"""Compiling constraints: what is accepted, how it is refused, and that no grammar harms the process."""

import json
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax import EngineConfig, StructuredOutputsParams
from tokenspeed_jax.engine import grammar_compiler
from tokenspeed_jax.engine.grammar import Grammar
from tokenspeed_jax.engine.grammar_compiler import GrammarCompiler, grammars_of
from tokenspeed_jax.errors import ConfigError, InvalidRequest
from tokenspeed_jax.options import CommandLine, Configuration
from tokenspeed_jax.text import Tokenizer
from tokenspeed_jax.weights import open_checkpoint

TINY = str(Path(__file__).parents[1] / "golden" / "tiny" / "llama")
EOS = 1


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_checkpoint(TINY, revision=None, progress=False).tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 520, (EOS,))


def accepts(tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether a text, token by token and then the end, is what the grammar wants."""
    matcher = grammar.matcher()
    ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    return all(matcher.accept(token) for token in ids) and matcher.is_complete


def refusal(compiler: GrammarCompiler, **constraint: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(StructuredOutputsParams(**constraint))  # type: ignore[arg-type]
    return refused.value


printable = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None)
@given(st.lists(printable, min_size=1, max_size=4), printable)
def test_a_choice_is_its_texts_and_nothing_else(
    compiler: GrammarCompiler, tokenizer: Tokenizer, texts: list[str], other: str
) -> None:
    grammar = compiler.compile(StructuredOutputsParams(choice=tuple(texts)))
    for text in texts:
        assert accepts(tokenizer, grammar, text)
    assert accepts(tokenizer, grammar, other) == (other in texts)


expressions = st.recursive(
    st.sampled_from(["a", "b", "[ab]", "/", r"\\", r"\n", "é"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        inner.map(lambda part: f"(?:{part})*"),
        inner.map(lambda part: f"(?:{part}){{1,3}}"),
    ),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(expressions, st.text("ab/\\\né", max_size=5))
def test_an_expression_matches_the_whole_text_as_pythons_does(
    compiler: GrammarCompiler, tokenizer: Tokenizer, expression: str, text: str
) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex=expression))
    assert accepts(tokenizer, grammar, text) == (re.fullmatch(expression, text) is not None)


def test_json_objects_schemas_and_grammars_accept_what_they_describe(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for form in (schema, json.dumps(schema)):
        grammar = compiler.compile(StructuredOutputsParams(json=form))
        assert accepts(tokenizer, grammar, '{"a": 12}')
        assert accepts(tokenizer, grammar, json.dumps({"a": 1}, indent=4))
        assert not accepts(tokenizer, grammar, '{"a": "x"}')
        assert not accepts(tokenizer, grammar, '{"a":' + " " * 60 + "1}"), "blanks have an end"
    grammar = compiler.compile(StructuredOutputsParams(json_object=True))
    assert accepts(tokenizer, grammar, '{"x": [1, {"y": null}]}')
    assert not accepts(tokenizer, grammar, "[1]")
    assert accepts(tokenizer, compiler.compile(StructuredOutputsParams(json=True)), "[1]")
    grammar = compiler.compile(StructuredOutputsParams(grammar='start: "a" num\nnum: /[0-9]+/'))
    assert accepts(tokenizer, grammar, "a12")
    assert not accepts(tokenizer, grammar, "12")


def test_a_front_part_ends_with_its_text_or_its_special_token(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex="[0-9]+", begins_after="</think>"))
    for front in ("</think>", "so </thin </think>", "two\n\nlines 7</think>"):
        assert accepts(tokenizer, grammar, front + "42")
        assert not accepts(tokenizer, grammar, front + "x")
    assert not accepts(tokenizer, grammar, "42")
    grammar = compiler.compile(StructuredOutputsParams(regex="[0-9]+", begins_after="on<pad>"))
    assert accepts(tokenizer, grammar, "<pad>what on<pad>42")
    assert not accepts(tokenizer, grammar, "<pad>what on<pad>x")
    error = refusal(compiler, regex="[0-9]+", begins_after="<pad>x")
    assert error.parameter == "structured_outputs.begins_after"


@pytest.mark.parametrize(
    ("constraint", "field", "where"),
    [
        ({"json": '{"type": "object",\n "a": }'}, "json", "line 2, column 7"),
        ({"json": {"type": "strin"}}, "json", "strin"),
        ({"json": {"properties": {"a": {"if": {}, "then": {}}}}}, "json", "if"),
        ({"json": "[1]"}, "json", "schema"),
        ({"json": False}, "json", "schema"),
        ({"json": {"type": "string", "pattern": "(a"}}, "json", "pattern|regex"),
        ({"json": {"$ref": "#/nowhere"}}, "json", "nowhere"),
        ({"regex": "a(b"}, "regex", "unclosed"),
        ({"regex": "(?=a)b"}, "regex", "look"),
        ({"grammar": 'start: "a" nothing'}, "grammar", r"nothing"),
        ({"grammar": 'start: "a"\nb: ((("x")'}, "grammar", r"2\("),
        ({"grammar": "{}"}, "grammar", "1"),
    ],
)
def test_a_bad_constraint_is_refused_with_its_field_and_place(
    compiler: GrammarCompiler, constraint: dict, field: str, where: str
) -> None:
    error = refusal(compiler, **constraint)
    assert error.parameter == f"structured_outputs.{field}"
    assert str(error).startswith(f"structured_outputs.{field} ")
    assert re.search(where, str(error)), str(error)
    assert len(str(error)) < 1000


HOSTILE = {
    "nested parentheses of a regex": {"regex": "(" * 100_000 + "a" + ")" * 100_000},
    "nested parentheses of a grammar": {"grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000},
    "nested arrays of a schema": {"json": '{"items":' * 20_000 + "{}" + "}" * 20_000},
    "repetition, late": {"grammar": 'start: "x" /[a-c]{40}/ A\nA: /(a{1000}){1000}/'},
    "alternatives of alternatives": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"{i}-{j}": {}}} for j in range(10)]} for i in range(10)]}
    },
    "nested repetition": {"regex": "((((a{1000}){1000}){1000}){1000}){1000}"},
    "huge repetition": {"json": {"type": "string", "minLength": 10**9}},
    "many states": {"regex": "(a|b)*a(a|b){5000}"},
    "a chain of references": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "rules without an end": {"grammar": "start: a\na: b\nb: a"},
    "many rules": {
        "grammar": "start: a0\n" + "\n".join(f'a{i}: "x" | a{i + 1}' for i in range(9_000)) + '\na9000: "y"'
    },
    "many properties": {"json": {"properties": {f"p{i}": {"enum": list(range(20))} for i in range(500)}}},
    "a large multiple": {"json": {"type": "integer", "multipleOf": 9_999_991}},
    "multiples of multiples": {"json": {"type": "integer", "allOf": [{"multipleOf": 99_991}, {"multipleOf": 99_989}]}},
    "a large multiple in a grammar": {"grammar": 'start: %json {"type": "integer", "multipleO\\u0066": 9999991}'},
    "a multiple of many digits": {"json": {"type": "number", "multipleOf": 1e300}},
    "zero bytes": {"regex": "\0"},
    "a remote reference": {"json": {"$ref": "https://example.com/schema.json"}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_stay_within_their_limits(compiler: GrammarCompiler, name: str) -> None:
    # On a thread, as a server compiles: its stack is smaller than the main one.
    ended = []

    def run() -> None:
        try:
            matcher = compiler.compile(StructuredOutputsParams(**HOSTILE[name])).matcher()  # type: ignore[arg-type]
            for token in (64, 65, 66):
                matcher.inner.compute_bitmask()
                matcher.accept(token)
            ended.append("compiled")
        except InvalidRequest as error:
            ended.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(15)
    assert ended, "it hangs"


def test_ordinary_multiples_are_served(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    steps = {"a": 5, "b": 0.01, "c": 2.5, "d": 100}
    properties = {name: {"type": "number", "multipleOf": step} for name, step in steps.items()}
    grammar = compiler.compile(StructuredOutputsParams(json={"properties": properties}))
    assert accepts(tokenizer, grammar, '{"a": 15, "b": 0.07, "c": 7.5, "d": 300}')
    assert not accepts(tokenizer, grammar, '{"a": 16}')


def test_a_compilation_without_an_end_is_left_to_itself(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()
    monkeypatch.setattr(grammar_compiler, "_MAX_COMPILE_SECONDS", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_prototype", lambda _: ends.wait(30))
        for attempt in range(2):
            assert "takes more than" in str(refusal(compiler, regex=f"endless{attempt}"))
        assert "try again later" in str(refusal(compiler, regex="endless"))
    ends.set()
    monkeypatch.setattr(grammar_compiler, "_MAX_COMPILE_SECONDS", 20.0)
    deadline = time.monotonic() + 10
    while not all(left.done() for left in grammar_compiler._LEFT) and time.monotonic() < deadline:
        time.sleep(0.01)
    compiler.compile(StructuredOutputsParams(regex="after"))


def test_a_panic_of_llguidance_is_a_refusal(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def panic(*_: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(compiler, "_prototype", panic)
    error = refusal(compiler, regex="panic")
    assert error.parameter == "structured_outputs.regex"
    assert "index out of bounds" in str(error)


def test_compiled_grammars_are_kept_up_to_a_number(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "_MAX_KEPT", 2)
    first = compiler.compile(StructuredOutputsParams(regex="first"))
    assert compiler.compile(StructuredOutputsParams(regex="first")) is first
    compiler.compile(StructuredOutputsParams(regex="second"))
    assert compiler.compile(StructuredOutputsParams(regex="first")) is first, "used last, kept longest"
    compiler.compile(StructuredOutputsParams(regex="third"))
    assert compiler.compile(StructuredOutputsParams(regex="first")) is first
    compiler.compile(StructuredOutputsParams(regex="fourth"))
    compiler.compile(StructuredOutputsParams(regex="fifth"))
    assert compiler.compile(StructuredOutputsParams(regex="first")) is not first


def test_a_grammar_that_was_costly_is_refused_from_then_on(compiler: GrammarCompiler) -> None:
    params = StructuredOutputsParams(regex="costly")
    running = compiler.compile(params).matcher()
    compiler.compile(params).cost.error = "too many states"
    error = refusal(compiler, regex="costly")
    assert "too many states" in str(error)
    assert running.cost.error == "too many states", "its other samples end too"


@pytest.mark.parametrize("option", ["--grammar-backend", "--guided-decoding-backend"])
def test_the_backend_goes_by_the_names_that_sglang_and_vllm_give_it(option: str) -> None:
    line = CommandLine("x", "", Configuration(EngineConfig, positional="model"))
    assert line.parse([TINY, option, "guidance"]).of(EngineConfig).grammar_backend == "llguidance"
    with pytest.raises(SystemExit):
        line.parse([TINY, option, "xgrammar"])


def test_backends_that_cannot_be_had_are_refused_at_start_or_with_the_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(backend: str, some_tokenizer: Tokenizer | None, eos: tuple[int, ...]) -> str:
        config = EngineConfig(model=TINY, grammar_backend=backend)  # type: ignore[arg-type]
        grammars = grammars_of(config, some_tokenizer, 512, eos)
        assert not grammars.are_served
        with pytest.raises(InvalidRequest) as refused:
            grammars.compile(StructuredOutputsParams(regex="a"))
        assert refused.value.parameter == "structured_outputs"
        return str(refused.value)

    assert "grammar_backend none" in reason("none", tokenizer, (EOS,))
    assert "no tokenizer" in reason("auto", None, (EOS,))
    assert "end-of-sequence" in reason("auto", tokenizer, ())
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "pip install llguidance" in reason("auto", tokenizer, (EOS,))
    with pytest.raises(ConfigError, match="pip install llguidance"):
        reason("llguidance", tokenizer, (EOS,))
