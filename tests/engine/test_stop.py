"""When samples end and what of their text is shown, against a reference that sees the whole text at once."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.engine.stop import StopChecker, StopMatcher, StopUpdate

EOS = 99


class Pieces:
    """A detokenizer whose token i is the i-th of some byte strings; unfinished characters are held back."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._bytes = b""

    def push(self, ids: list[int], /) -> str:
        self._bytes += b"".join(self._pieces[token] for token in ids)
        for cut in range(len(self._bytes), -1, -1):
            try:
                text = self._bytes[:cut].decode()
            except UnicodeDecodeError:
                continue
            self._bytes = self._bytes[cut:]
            return text
        raise AssertionError("the empty string always decodes")

    def flush(self) -> str:
        rest, self._bytes = self._bytes, b""
        return rest.decode(errors="replace")


def pieces(*texts: str | bytes) -> Pieces:
    return Pieces([text.encode() if isinstance(text, str) else text for text in texts])


def run(checker: StopChecker, ids: list[int]) -> tuple[str, StopUpdate | None, int]:
    """The joined text, the update that ended the sample, and how many ids it took."""
    text = ""
    for count, token in enumerate(ids, start=1):
        update = checker.push(token)
        text += update.text_delta
        if update.finish_reason is not None:
            return text, update, count
    return text, None, len(ids)


def checker(params: SamplingParams, source: Pieces, max_tokens: int = 1000) -> StopChecker:
    return StopChecker(params, {EOS}, max_tokens, source)


def first_match(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Grows the text by one character at a time: the first end at which a stop string stands, the longest there."""
    for end in range(1, len(text) + 1):
        standing = [stop for stop in stops if text[:end].endswith(stop)]
        if standing:
            longest = max(standing, key=len)
            return end - len(longest), longest
    return None


stop_strings = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True).map(tuple)
cut_text = st.lists(st.text("abc", max_size=4), max_size=8)


@settings(max_examples=400, deadline=None)
@given(cut_text, stop_strings)
@example(["ab", "cd", "e"], ("bcd", "abcde"))
def test_the_match_and_the_text_do_not_depend_on_how_the_text_is_cut(texts: list[str], stops: tuple[str, ...]) -> None:
    whole = "".join(texts)
    match = first_match(whole, stops)
    text, end, _ = run(checker(SamplingParams(stop=stops, max_tokens=None), pieces(*texts)), list(range(len(texts))))
    if match is None:
        assert end is None
    else:
        assert (text, end) == (whole[: match[0]], StopUpdate(end.text_delta if end else "", "stop", match[1]))


@settings(max_examples=400, deadline=None)
@given(cut_text, stop_strings)
def test_text_is_shown_as_soon_as_no_stop_string_can_begin_in_it(texts: list[str], stops: tuple[str, ...]) -> None:
    matcher, shown, pushed = StopMatcher(stops), "", ""
    for text in texts:
        delta, stop = matcher.push(text)
        shown, pushed = shown + delta, pushed + text
        if stop is not None:
            return
        held = pushed[len(shown) :]
        assert pushed.startswith(shown)
        # Held text begins a stop string, and nothing before it does.
        assert held == "" or any(other.startswith(held) for other in stops)
        starts = [i for i in range(len(pushed)) if any(other.startswith(pushed[i:]) for other in stops)]
        assert len(shown) == min(starts, default=len(pushed))


@settings(max_examples=200, deadline=None)
@given(st.text("aé€😀", max_size=8), st.data())
def test_characters_split_over_tokens_come_out_whole(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    stops = ("€😀", "ééa")
    shown, end, _ = run(checker(SamplingParams(stop=stops, max_tokens=None), pieces(*parts)), list(range(len(parts))))
    match = first_match(text, stops)
    assert (end is None) == (match is None)
    if match is not None:
        assert shown == text[: match[0]]
    else:
        assert text.startswith(shown)
        assert "�" not in shown


def test_a_stop_string_across_three_tokens_is_never_shown() -> None:
    params = SamplingParams(stop="\n\nUser:")
    subject = checker(params, pieces("Hello\n", "\nUs", "er: more", "unseen"))
    assert subject.push(0) == StopUpdate("Hello")
    assert subject.push(1) == StopUpdate("")
    assert subject.push(2) == StopUpdate("", "stop", "\n\nUser:")


def test_held_text_is_shown_when_it_turns_out_to_be_no_stop_string() -> None:
    subject = checker(SamplingParams(stop="END"), pieces("a E", "N", "OUGH"))
    assert [subject.push(i).text_delta for i in range(3)] == ["a ", "", "ENOUGH"]


def test_length_releases_held_text_and_an_unfinished_character() -> None:
    subject = checker(SamplingParams(stop="END"), pieces("a E", b"N\xe2\x82"), max_tokens=2)
    assert subject.push(0).text_delta == "a "
    assert subject.push(1) == StopUpdate("EN�", "length", None)


def test_a_stop_string_in_the_last_token_wins_over_length() -> None:
    subject = checker(SamplingParams(stop="END"), pieces("a END b"), max_tokens=1)
    assert subject.push(0) == StopUpdate("a ", "stop", "END")


def test_an_unfinished_character_may_complete_a_stop_string_at_the_end() -> None:
    subject = checker(SamplingParams(stop="x�"), pieces(b"ax\xe2"), max_tokens=1)
    assert subject.push(0) == StopUpdate("a", "stop", "x�")


@pytest.mark.parametrize("token", [EOS, 0])
def test_ending_ids_show_held_text_but_not_their_own(token: int) -> None:
    subject = checker(SamplingParams(stop="END", stop_token_ids=[0]), pieces("<stop>", "a E"))
    assert subject.push(1).text_delta == "a "
    assert subject.push(token) == StopUpdate("E", "stop", None if token == EOS else 0)


def test_an_ending_id_that_is_also_eos_is_reported_as_the_users_own() -> None:
    subject = checker(SamplingParams(stop_token_ids=[EOS]), pieces("a"))
    assert subject.push(EOS) == StopUpdate("", "stop", EOS)


def test_ignore_eos_keeps_its_text_and_goes_on_but_stop_ids_still_end() -> None:
    source = Pieces([b"a"] * EOS + [b"</s>"])
    subject = checker(SamplingParams(ignore_eos=True, stop_token_ids=[7]), source)
    assert subject.push(EOS) == StopUpdate("</s>")
    assert subject.push(7) == StopUpdate("", "stop", 7)


def test_nothing_ends_a_sample_within_min_tokens_but_its_length() -> None:
    params = SamplingParams(min_tokens=3, stop="b", stop_token_ids=[0], max_tokens=9)
    subject = checker(params, Pieces([b"b"] * (EOS + 1)))
    assert [subject.push(token) for token in (5, EOS, 0)] == [StopUpdate("b")] * 3
    assert subject.push(5) == StopUpdate("", "stop", "b")
    subject = checker(params, Pieces([b"b"] * 9), max_tokens=3)
    assert [subject.push(5).finish_reason for _ in range(3)] == [None, None, "length"]


def test_a_stop_string_that_begins_within_min_tokens_does_not_match() -> None:
    subject = checker(SamplingParams(min_tokens=1, stop="ab"), pieces("xa", "b", "ab"))
    assert [subject.push(i) for i in range(3)] == [StopUpdate("xa"), StopUpdate("b"), StopUpdate("", "stop", "ab")]


def test_an_abort_releases_what_was_held() -> None:
    subject = checker(SamplingParams(stop="END"), pieces(b"a EN", b"\xe2"))
    subject.push(0)
    assert subject.flush() == "EN"
    assert subject.flush() == ""


@pytest.mark.parametrize("last", ["length", "stop string", "eos"])
def test_pushing_after_the_end_is_an_error(last: str) -> None:
    subject = checker(SamplingParams(stop="b"), pieces("a", "b"), max_tokens=1 if last == "length" else 9)
    assert subject.push({"length": 0, "stop string": 1, "eos": EOS}[last]).finish_reason is not None
    with pytest.raises(RuntimeError, match="ended"):
        subject.push(0)
    assert subject.flush() == ""


def test_a_negative_max_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        checker(SamplingParams(), pieces(), max_tokens=-1)


def test_without_room_for_a_token_the_first_one_ends_the_sample_unseen() -> None:
    subject = checker(SamplingParams(stop="a", stop_token_ids=[0]), pieces("a"), max_tokens=0)
    assert subject.push(0) == StopUpdate("", "length")
    subject = checker(SamplingParams(), pieces("a"), max_tokens=0)
    assert subject.push(EOS) == StopUpdate("", "length")


def test_what_ended_a_sample_is_in_its_text_when_asked_for() -> None:
    source = Pieces([b"xE", b"ND rest", b"</t>", b"\xe2"] + [b""] * (EOS - 4) + [b"</s>"])
    params = SamplingParams(stop=["END", "rest"], stop_token_ids=[2], include_stop_str_in_output=True)
    subject = checker(params, source)
    assert [subject.push(0), subject.push(1)] == [StopUpdate("x"), StopUpdate("END", "stop", "END")]
    subject = checker(params, source)
    assert [subject.push(0), subject.push(2)] == [StopUpdate("x"), StopUpdate("E</t>", "stop", 2)]
    subject = checker(params, source)
    assert [subject.push(3), subject.push(EOS)] == [StopUpdate(""), StopUpdate("\ufffd</s>", "stop", None)]
    params = dataclasses.replace(params, ignore_eos=True)
    subject = checker(params, source)
    assert [subject.push(0), subject.push(EOS, ends_grammar=True)] == [StopUpdate("x"), StopUpdate("E</s>", "stop")]
    subject = checker(params, source, max_tokens=1)
    assert subject.push(0) == StopUpdate("xE", "length")
