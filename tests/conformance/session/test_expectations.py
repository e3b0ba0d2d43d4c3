"""The file of expected failures: what is refused, what it matches, and how it is written anew."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from conformance.session.expectations import (
    Expectation,
    ExpectationError,
    check,
    file_of,
    parse,
    read,
    updated,
    written,
)
from conformance.session.verdicts import Verdict

IDS = ["COMM-ORDER", "COMM-VALUE", "LIFE-INIT"]
GOOD = """version = 1

[[expected]]
id = "COMM-ORDER"
reason = "It is known."
link = "https://example.com/issues/1"
"""


def entry(id: str, reason: str = "It is known.", link: str = "https://example.com/1") -> str:
    return f'\n[[expected]]\nid = "{id}"\nreason = "{reason}"\nlink = "{link}"\n'


def refused(text: str, message: str) -> None:
    with pytest.raises(ExpectationError, match=f"^{re.escape(message)}"):
        check(parse(text, "e.toml"), IDS)


def test_an_entry_is_found_by_the_requirement() -> None:
    text = GOOD + entry("LIFE-*", "Nor this.", "http://example.com/2")
    assert check(parse(text, "e.toml"), IDS) == {
        "COMM-ORDER": Expectation("COMM-ORDER", "It is known.", "https://example.com/issues/1"),
        "LIFE-INIT": Expectation("LIFE-*", "Nor this.", "http://example.com/2"),
    }


def test_a_file_may_be_empty_but_for_its_version() -> None:
    assert check(parse("version = 1", "e.toml"), IDS) == {}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version = 1", "", "e.toml: there is no version; this suite reads version = 1"),
        ("version = 1", "version = 2", "e.toml: version = 2; this suite reads version = 1"),
        ("version = 1", "version = true", "e.toml: version = True; this suite"),
        ("version = 1", "verson = 1", "e.toml: unknown key 'verson': did you mean 'version'?"),
        ("[[expected]]", "[[expect]]", "e.toml: unknown key 'expect': did you mean 'expected'?"),
        ("[[expected]]", "[expected]", "e.toml: expected is no list of entries"),
        ("version = 1", "version = 1\nexpected = [3]\n#", "e.toml: not TOML: "),
        ("link =", "url =", "e.toml:3: entry 1 (COMM-ORDER): unknown key 'url': there is id, reas"),
        (
            "reason",
            "reson",
            "e.toml:3: entry 1 (COMM-ORDER): unknown key 'reson': did you mean 're",
        ),
        ('reason = "It is known."', "", "e.toml:3: entry 1 (COMM-ORDER): no reason"),
        ("It is known.", " ", "e.toml:3: entry 1 (COMM-ORDER): its reason is empty"),
        ('link = "https://example.com/issues/1"', "", "e.toml:3: entry 1 (COMM-ORDER): no link"),
        ('"https://example.com/issues/1"', "7", "e.toml:3: entry 1 (COMM-ORDER): link = 7 is not"),
        (
            "https://example.com/",
            "#",
            "e.toml:3: entry 1 (COMM-ORDER): link = '#issues/1' is not a",
        ),
        ("https:", "mailto:", "e.toml:3: entry 1 (COMM-ORDER): link = 'mailto://example.com/issu"),
        (
            "example.com/",
            "[bad",
            "e.toml:3: entry 1 (COMM-ORDER): link = 'https://[badissues/1' is",
        ),
        (
            "example.com/",
            ":80/",
            "e.toml:3: entry 1 (COMM-ORDER): link = 'https://:80/issues/1' is",
        ),
        (
            "link =",
            "intermittent = 1\nlink =",
            "e.toml:3: entry 1 (COMM-ORDER): intermittent = 1 is not true or false",
        ),
        ("It is known", " todo", "e.toml:3: entry 1 (COMM-ORDER): it still says TODO"),
        ('id = "COMM-ORDER"', "", "e.toml:3: entry 1: no id"),
        ('"COMM-ORDER"', "3", "e.toml:3: entry 1: id = 3 is not a text"),
        ("It is known", "TODO", "e.toml:3: entry 1 (COMM-ORDER): it still says TODO"),
        ("https:", "TODO https:", "e.toml:3: entry 1 (COMM-ORDER): it still says TODO"),
        (
            "COMM-ORDER",
            "COMM-ODER",
            "e.toml:3: entry 1 (COMM-ODER): matches no requirement; the nearest is COMM-ORDER",
        ),
        ("COMM-ORDER", "GROUP-*", "e.toml:3: entry 1 (GROUP-*): matches no requirement; the neare"),
        ("COMM-ORDER", "comm-order", "e.toml:3: entry 1 (comm-order): matches no requirement"),
    ],
)
def test_a_bad_file_is_refused(old: str, new: str, message: str) -> None:
    assert old in GOOD
    refused(GOOD.replace(old, new, 1), message)


def test_what_is_not_toml_is_refused_with_the_line() -> None:
    refused(GOOD + "reason =\n", "e.toml: not TOML: Invalid value (at line 7, column 9)")


@pytest.mark.parametrize(
    "value", ["[" * 5000 + "]" * 5000, "9" * 5000, "1979-13-32", "{a=" * 5000], ids=len
)
def test_what_python_cannot_read_is_refused_too(value: str) -> None:
    with pytest.raises(ExpectationError, match="not TOML: "):
        parse(f"{GOOD}more = {value}\n", "e.toml")


@pytest.mark.parametrize("second", ["COMM-ORDER", "COMM-*", "*"])
def test_a_requirement_has_one_entry(second: str) -> None:
    refused(
        GOOD + entry(second),
        f"e.toml:8: entry 2 ({second}): COMM-ORDER is expected already: "
        "e.toml:3: entry 1 (COMM-ORDER)",
    )


def test_an_entry_written_inline_is_named_by_its_number() -> None:
    refused('version = 1\nexpected = [{id = "X-Y"}]', "e.toml: entry 1 (X-Y): no reason")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExpectationError, match=r"e\.toml: cannot be read: No such file"):
        read(tmp_path / "e.toml")
    with pytest.raises(ExpectationError, match="cannot be read: Is a directory"):
        read(tmp_path)
    (tmp_path / "e.toml").write_bytes(b"\xff")
    with pytest.raises(ExpectationError, match=r"e\.toml: not UTF-8: invalid start byte"):
        read(tmp_path / "e.toml")


@pytest.mark.parametrize("module", ["conformance", "conformance.mutants"])
def test_a_backend_names_its_file_by_path_or_below_a_package(module: str, tmp_path: Path) -> None:
    assert file_of(None) is None
    assert file_of(tmp_path / "e.toml") == tmp_path / "e.toml"
    assert file_of(str(tmp_path / "e.toml")) == tmp_path / "e.toml"
    folder = Path(__file__).parents[3] / module.replace(".", "/")
    assert file_of(f"{module}:below/e.toml") == folder / "below" / "e.toml"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (
            "e.toml",
            "its expectations are 'e.toml': write Path(__file__).with_name('e.toml'), or 'pac",
        ),
        (Path("a/e.toml"), "its expectations are 'a/e.toml': write Path(__file__).with_name('e.t"),
        ("nowhere:e.toml", "its expectations are 'nowhere:e.toml': there is no package nowhere"),
        ("no.where:e.toml", "its expectations are 'no.where:e.toml': there is no package no.wh"),
        ("json.decoder:e.toml", "its expectations are 'json.decoder:e.toml': there is no package"),
    ],
)
def test_a_file_that_depends_on_where_pytest_starts_is_refused(
    named: str | Path, message: str
) -> None:
    with pytest.raises(ExpectationError, match=f"^{re.escape(message)}"):
        file_of(named)


# ---- Writing -------------------------------------------------------------------------------------

PASS, FAIL, SKIPPED, NOT = Verdict.PASS, Verdict.FAIL, Verdict.SKIPPED, Verdict.NOT_SUPPORTED


def old(*ids: str) -> list[Expectation]:
    return [Expectation(id, f"reason of {id}", f"https://example.com/{id}") for id in ids]


def after(
    entries: list[Expectation], order: Verdict, value: Verdict, init: Verdict
) -> list[Expectation]:
    verdicts = dict(zip(IDS, (order, value, init), strict=True))
    failed = {id for id, verdict in verdicts.items() if verdict in (FAIL, Verdict.WAIVED)}
    return updated(entries, verdicts, failed)


def test_what_failed_is_new_and_to_be_explained() -> None:
    for each, id in zip(after([], PASS, FAIL, FAIL), IDS[1:], strict=True):
        assert (each.id, each.todo) == (id, True)
        with pytest.raises(ExpectationError, match="it still says TODO"):
            check([each], IDS)


def test_what_failed_again_keeps_its_entry_and_what_passes_loses_it() -> None:
    assert after(old("COMM-ORDER", "COMM-VALUE"), Verdict.WAIVED, PASS, PASS) == old("COMM-ORDER")
    assert after(old("COMM-ORDER"), NOT, PASS, PASS) == []
    assert after(old("GONE-AWAY", "GONE-*"), PASS, PASS, PASS) == []


def test_an_intermittent_entry_stays() -> None:
    entries = [dataclasses.replace(each, intermittent=True) for each in old("COMM-*")]
    assert after(entries, PASS, PASS, PASS) == entries
    assert after(entries, NOT, NOT, PASS) == []


def test_of_what_was_left_out_nothing_is_known() -> None:
    assert after(old("COMM-ORDER"), SKIPPED, PASS, PASS) == old("COMM-ORDER")


def test_a_glob_stays_if_all_of_it_failed() -> None:
    assert after(old("COMM-*"), Verdict.WAIVED, FAIL, PASS) == old("COMM-*")
    assert after(old("COMM-*"), Verdict.WAIVED, NOT, PASS) == old("COMM-*")


def test_a_glob_of_which_some_pass_becomes_the_rest() -> None:
    (left,) = after(old("COMM-*"), PASS, Verdict.WAIVED, PASS)
    assert left == Expectation("COMM-VALUE", "reason of COMM-*", "https://example.com/COMM-*")


def test_entries_are_written_in_the_order_of_the_requirements() -> None:
    found = after(old("LIFE-INIT", "COMM-VALUE"), FAIL, FAIL, FAIL)
    assert [each.id for each in found] == IDS
    assert [each.todo for each in found] == [True, False, False]
    assert after(found, FAIL, FAIL, FAIL) == found  # and stay so


def test_a_new_entry_shows_what_happened() -> None:
    todo, known = Expectation("COMM-ORDER", "TODO", "TODO"), old("COMM-VALUE")[0]
    errors = {"COMM-ORDER": "AssertionError: 1\n\x1b[0m2", "COMM-VALUE": "ValueError: 2"}
    text = written([todo, known], errors)
    assert "[[expected]]\n# AssertionError: 1\nid = " in text
    assert "ValueError" not in text
    assert parse(text, "e.toml") == [todo, known]


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(
    st.lists(
        st.builds(Expectation, id=texts, reason=texts, link=texts, intermittent=st.booleans())
    ),
    texts,
)
def test_what_is_written_is_read_again(entries: list[Expectation], error: str) -> None:
    text = written(entries, dict.fromkeys([entry.id for entry in entries], error))
    tomllib.loads(text)
    assert parse(text, "e.toml") == entries
