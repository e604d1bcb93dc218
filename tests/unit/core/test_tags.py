"""Filters match the tags that the original's filters match."""

from pathlib import Path

import pytest
from disk import NoSync
from hypothesis import example, given
from hypothesis import strategies as st
from zbus_cases import reference_matches

from qewqew_core import BadArgument, Message, Topic
from qewqew_core.formats import tags
from qewqew_core.formats.tags import Filter

# What the original answered, in three versions of it alike.
TABLE = [
    ("a plain level matches itself", "abc", "abc", True),
    ("a plain filter is no prefix", "abc", "abc.def", False),
    ("a star is one level", "abc.*", "abc.def", True),
    ("a star is not no level", "abc.*", "abc", False),
    ("a star is not two levels", "abc.*", "abc.d.e", False),
    ("a hash is no level", "abc.#", "abc", True),
    ("a hash is two levels", "abc.#", "abc.d.e", True),
    ("a hash alone matches any tag", "#", "abc", True),
    ("a hash alone matches no untagged message", "#", None, False),
    ("a star alone matches a tag of one level", "*", "abc", True),
    ("a star alone matches no untagged message", "*", None, False),
    ("a star alone matches no tag of two levels", "*", "a.b", False),
    ("the empty filter matches a tag", "", "abc", True),
    ("the empty filter matches an untagged message", "", None, True),
    ("a separator alone is the empty filter", ";", "abc", True),
    ("the second pattern matches", "a;b", "b", True),
    ("blanks before a pattern count", " a", "a", False),
    ("blanks before a level count", "a. b", "a.b", False),
    ("what follows a hash is ignored", "abc.#.def", "abc.x", True),
    ("a star comes first", "*.def", "abc.def", True),
    ("a hash comes first", "#.def", "xyz", True),
    ("a dot at the end of the filter is dropped", "abc.", "abc", True),
    ("a dot at the end of the tag is dropped", "abc", "abc.", True),
    ("an empty level in between is a level", "abc..def", "abc..def", True),
    ("a star is an empty level", "abc.*.def", "abc..def", True),
    ("an empty level at the start is a level", ".abc", ".abc", True),
    ("a star is an empty level at the start", "*.abc", ".abc", True),
    ("a dot has no levels", ".", ".", True),
    ("no levels match no level", ".", "abc", False),
    ("two dots have no levels either", ".", "..", True),
    ("a plus is no wildcard", "+", "abc", False),
    ("a plus is no wildcard for a level", "abc.+", "abc.def", False),
    ("case counts", "ABC", "abc", False),
    ("a hash matches a tag without levels", "#", ".", True),
    ("two hashes are no level", "a.#.#", "a", True),
    ("a star is not the level that was dropped", "a.*", "a.", False),
    ("a star before a hash is one level", "a.*.#", "a", False),
    ("a hash is no level, whatever follows", "a.#.c", "a", True),
    ("blanks are the empty filter", "   ", "abc", True),
    ("an empty second pattern matches nothing", "#;", None, False),
]


def slot(tag: str | None, stale: bytes = b"") -> bytes:
    """The 128 bytes of a tag in a message; behind a text there may be what is left of a longer one."""
    data = (tag or "").encode()
    return (bytes((len(data),)) + data + stale).ljust(128, b"\0")[:128]


@pytest.mark.req("Z8")
@pytest.mark.parametrize(("text", "tag", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_a_filter_matches_what_the_original_s_did(text, tag, expected):
    one = Filter(text)
    assert one.matches(tag) is expected
    assert one.matches_slot(slot(tag)) is expected
    assert one.matches_slot(slot(tag)) is expected  # from memory
    assert one.matches_slot(slot(tag, b".abc.def")) is expected
    assert reference_matches(text, tag) is expected  # so that the comparison below compares with the right thing


@pytest.mark.req("Z8")
def test_a_reader_delivers_what_its_filter_matches_from_the_moment_in_which_it_is_set(tmp_path: Path) -> None:
    with Topic(tmp_path / "t", block_size=2000, _files=NoSync()) as topic, topic.reader("r") as reader:
        topic.append_many(Message(b"", tag=tag) for _, _, tag, _ in TABLE)
        for number, (why, text, _, expected) in enumerate(TABLE):
            reader.set_filter(text)
            reader.seek(number=number)
            assert ([message.number for message in reader][:1] == [number]) is expected, why


TEXTS = st.text(alphabet="ab.*#;+ é", max_size=12)


@given(text=st.none() | TEXTS, tag=st.none() | TEXTS)
@example(text=".;a", tag="..")
@example(text="a.#", tag=".a")
@example(text=";;.", tag=".")
@example(text=" ;a", tag=" ")
def test_any_filter_and_tag_agree_with_the_original_s_rules(text, tag):
    one = Filter(text)
    assert one.matches(tag) is reference_matches(text, tag)
    assert one.matches_slot(slot(tag)) is reference_matches(text, tag)


@given(text=TEXTS, seen=st.lists(TEXTS, min_size=5, max_size=20))
def test_a_filter_that_remembers_few_tags_goes_on_to_answer_right(text, seen):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tags, "_REMEMBERED", 2)
        one = Filter(text)
        for tag in [*seen, *reversed(seen)]:
            assert one.matches_slot(slot(tag)) is reference_matches(text, tag)


@pytest.mark.parametrize("text", ["a" * 127, "é" * 63 + "a", "€" * 42 + "b", "a" + "." * 126])
def test_a_filter_of_127_bytes_is_taken(text):
    assert len(text.encode()) == 127
    assert Filter(text).text == text
    assert Filter(text).matches(text)


@pytest.mark.parametrize("text", ["a" * 128, "é" * 64, "€" * 43, "é" * 127, "a;" * 64, "#" * 259, " " * 127 + "a"])
def test_a_filter_of_more_than_127_bytes_is_refused(text):
    """Bytes count, not characters; the original counted characters, and the text ran over its slot."""
    with pytest.raises(BadArgument, match=rf"filter has {len(text.encode())} bytes of UTF-8, at most 127"):
        Filter(text)


@pytest.mark.parametrize("text", [None, "", " ", "\t\n", " " * 500])
def test_a_blank_filter_is_none(text):
    one = Filter(text)
    assert one.text is None
    assert not one
    assert one.matches(None)
    assert one.matches_slot(slot(None))
    assert one.matches("any.tag")


def test_a_filter_of_separators_keeps_its_text_and_holds_nothing_back():
    one = Filter("; ;")
    assert one.text == "; ;"
    assert not one
    assert one.matches(None)


def test_a_filter_that_matches_no_level_holds_back():
    """Its only pattern has no levels, and still it is one."""
    assert Filter(".")
    assert not Filter(".").matches("a")


@pytest.mark.parametrize(
    ("text", "tag", "expected"),
    [
        ("größe.*", "größe.mm", True),
        ("größe.*", "grösse.mm", False),
        ("*", "日本語", True),
        ("日本.#;b", "日本.東京.渋谷", True),
        ("日本", "日本。東京", False),  # not an ASCII dot
        ("é", "e\u0301", False),  # looks the same; bytes decide
    ],
)
def test_non_ascii_filters_compare_text_as_it_is(text, tag, expected):
    assert Filter(text).matches(tag) is expected
    assert Filter(text).matches_slot(slot(tag)) is expected


def test_a_tag_that_was_cut_within_a_character_matches_as_it_is_read():
    """The original stored the number of characters, so that of `é` it reads back half: U+FFFD for both of us."""
    cut = (b"\x03a.\xc3\xa9").ljust(128, b"\0")
    assert Filter("a.*").matches_slot(cut)
    assert Filter("a.\ufffd").matches_slot(cut)
    assert not Filter("a.é").matches_slot(cut)


def test_a_slot_whose_length_is_too_large_ends_with_the_slot():
    assert Filter("a" * 127).matches_slot(b"\xff" + b"a" * 127)


@pytest.mark.parametrize("text", [5, 0, b"abc", b"", ["a"], "\ud800"], ids=repr)
def test_a_filter_that_is_no_text_is_refused(text):
    with pytest.raises(BadArgument, match="filter"):
        Filter(text)
