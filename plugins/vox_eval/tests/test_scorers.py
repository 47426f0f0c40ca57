"""What the built-in scorers give, and how a scorer is found."""

from __future__ import annotations

import math
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vox_core.errors import BackendError, PluginError
from vox_eval import Example, Output, Score, Scorer, ScorerSpec, UnusableScorer, hookimpl, options
from vox_eval.scorer import find_scorer, options_of
from vox_eval.scorers import last_number


def scorer(name: str, **given: Any) -> Scorer:
    found, package = find_scorer(ScorerSpec(name, given, Path()))
    assert package.startswith("vox-ml-eval ")
    return found


def score(name: str, answer: str, *ideal: str, **given: Any) -> float:
    found = scorer(name, **given)
    example = Example("id", {}, ideal=ideal)
    found.check(example)
    return found.score(example, Output(answer, [])).value


@pytest.mark.parametrize(
    ("name", "answer", "ideal", "given", "expected"),
    [
        ("exact", " Paris\n", ["Paris "], {}, 1),
        ("exact", "paris", ["Paris"], {}, 0),
        ("exact", "STRASSE", ["no", "straße"], {"ignore_case": True}, 1),
        ("exact", "In Paris", ["Paris"], {}, 0),
        ("contains", "In Paris.", ["Rome", "Paris"], {}, 1),
        ("contains", "In paris.", ["Paris"], {}, 0),
        ("contains", "In paris.", ["Paris"], {"ignore_case": True}, 1),
        ("regex", "On 2024-05-01.", [r"\d{4}-\d\d-\d\d"], {}, 1),
        ("regex", "yes", ["^Yes$"], {}, 0),
        ("regex", "yes", ["^Yes$"], {"ignore_case": True}, 1),
        ("numeric", "First 3, then 42.", ["42"], {}, 1),
        ("numeric", "42, or 43?", ["42"], {}, 0),
        ("numeric", "about 1,234.50", ["1234.5"], {}, 1),
        ("numeric", "3.15", ["3.14"], {"tolerance": 0.02}, 1),
        ("numeric", "3.17", ["3.14"], {"tolerance": 0.02}, 0),
        ("numeric", "990", ["1000"], {"relative_tolerance": 0.01}, 1),
        ("numeric", "989", ["1000"], {"relative_tolerance": 0.01}, 0),
        ("numeric", "none", ["1"], {}, 0),
    ],
)
def test_an_answer_against_the_right_ones(name, answer, ideal, given, expected) -> None:
    assert score(name, answer, *ideal, **given) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-3", -3),
        ("10-3", 3),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("5.", 5),
        ("1,234,567", 1234567),
        ("1,23", 23),
        ("x2", 2),
        ("See Phase3", 3),
        ("type e5", 5),
        ("1e5e3", 3),
        ("\u22125", -5),
        ("e.", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text, number) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("name", "ideal", "fault"),
    [
        ("exact", [], 'no "ideal"'),
        ("regex", ["a(b"], r"no regular expression: 'a\(b'"),
        ("numeric", ["two"], "no number: 'two'"),
    ],
)
def test_a_row_that_cannot_be_scored_is_refused_before(name, ideal, fault) -> None:
    with pytest.raises(ValueError, match=fault):
        score(name, "x", *ideal)


@pytest.mark.parametrize(
    ("name", "ideal", "why"),
    [
        ("exact", ["a", "5"], "equal to '5'"),
        ("exact", ["a", "b"], "not equal to 'a' or 'b'"),
        ("numeric", ["6"], "5: not equal to '6'"),
    ],
)
def test_a_score_says_why(name, ideal, why) -> None:
    example = Example("id", {}, ideal=tuple(ideal))
    assert scorer(name).score(example, Output("5", [])).why == why


@pytest.mark.parametrize("name", ["contains", "regex"])
def test_a_blank_right_answer_is_refused(name) -> None:
    with pytest.raises(ValueError, match="blank"):
        scorer(name).check(Example("id", {}, ideal=("a", " ")))


# --- log-probabilities ----------------------------------------------------------------------------


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize(("normalise", "best"), [("none", "no"), ("bytes", "certainly")])
def test_the_most_likely_choice(normalise, best) -> None:
    example = Example("id", {}, ideal=(best,), choices=("yes", "no", "certainly"))
    output = Output("", [floats(-1, -2), floats(-2), floats(-1, -1, -1)])
    found = scorer("choice", normalise=normalise).score(example, output)
    assert (found.value, found.answer) == (1, best)


def test_bytes_count_in_utf_8() -> None:
    example = Example("id", {}, ideal=("éé",), choices=("éé", "abc"))
    output = Output("", [floats(-3.4), floats(-3)])
    assert scorer("choice", normalise="bytes").score(example, output).value == 1


def test_bits_per_byte_and_perplexity() -> None:
    found = scorer("perplexity")
    outputs = [Output("", [floats(-1, -2), floats(-3)]), Output("", [floats(-4)])]
    scores = [
        found.score(Example("id", {}, text=text), output)
        for text, output in zip(("né", "abcdefg"), outputs, strict=True)
    ]
    assert [each.weight for each in scores] == [3, 7]
    bits = sum(each.value * each.weight for each in scores) / 10
    assert bits == pytest.approx(10 / math.log(2) / 10)
    assert found.metrics(outputs) == {"perplexity": pytest.approx(math.exp(10 / 4))}
    assert not found.higher_is_better


# --- finding one ----------------------------------------------------------------------------------


@options
class Even(Scorer):
    minimum: int = 0

    def score(self, example: Example, output: Output) -> Score:
        return Score(float(len(output.text) % 2 == 0))


class Plugin:
    @hookimpl
    def vox_scorer(self, spec: ScorerSpec) -> Scorer:
        return Even(**spec.options)


class Nothing:
    pass


class Broken:
    @hookimpl
    def vox_scorer(self, spec: ScorerSpec) -> Scorer:
        raise RuntimeError("no luck")


@pytest.fixture
def installed(monkeypatch):
    """`installed(even=Plugin)`: an entry point for each name, whose object is an instance."""

    def install(**plugins: Any) -> None:
        entries = [
            SimpleNamespace(
                name=name.removesuffix("_"),
                load=plugin,
                dist=SimpleNamespace(name=f"dist-{name}", version="1.2"),
                value="module",
            )
            for name, plugin in plugins.items()
        ]
        built_in = entry_points(group="vox_eval.plugins")
        found = [*built_in, *entries]
        monkeypatch.setattr("vox_eval.scorer.entry_points", lambda group: found)

    return install


def find(name: str, **given: Any) -> tuple[Scorer, str]:
    return find_scorer(ScorerSpec(name, given, Path()))


def test_a_scorer_of_a_package(installed) -> None:
    installed(even=Plugin, odd=Broken)
    found, package = find("even", minimum=3)
    assert (options_of(found), package) == ({"minimum": 3}, "dist-even 1.2")


def test_a_package_that_nobody_asks_for_is_not_loaded(installed) -> None:
    installed(even=Plugin, odd=lambda: pytest.fail("loaded"))
    find("even")


@pytest.mark.parametrize(
    ("name", "given", "fault"),
    [
        ("exakt", {}, "there is no scorer 'exakt'; did you mean exact?"),
        ("evn", {}, "there is no scorer 'evn'; did you mean even?"),
        ("zzz", {}, "there is no scorer 'zzz'; there are choice, .*, regex"),
        ("even", {"minimum": "x"}, "scorer 'even': minimum: input should be a valid integer"),
        ("numeric", {"tolerance": -1}, "scorer 'numeric': tolerance: input should be greater"),
        ("numeric", {"slack": 1}, "scorer 'numeric': slack: unknown option"),
        ("choice", {"normalise": "words"}, "scorer 'choice': normalise: input should be 'none'"),
    ],
)
def test_a_scorer_that_a_suite_cannot_use(installed, name, given, fault) -> None:
    installed(even=Plugin)
    with pytest.raises(UnusableScorer, match=fault.replace("?", r"\?")):
        find(name, **given)


def _unimportable() -> None:
    raise ImportError("no module")


@pytest.mark.parametrize(
    ("plugins", "name", "error", "code"),
    [
        ({"even": _unimportable}, "even", BackendError, "B004"),
        ({"even": Broken}, "even", PluginError, "X001"),
        ({"even": Nothing}, "even", PluginError, "X001"),
        ({"even": Plugin, "even_": Plugin}, "even", BackendError, "B014"),
        ({"exact": Plugin}, "exact", BackendError, "B014"),
    ],
)
def test_a_package_with_a_broken_scorer(installed, plugins, name, error, code) -> None:
    installed(**plugins)
    with pytest.raises(error) as caught:
        find(name)
    assert caught.value.code == f"VOX-{code}"


# Of sacrebleu 2.6.0: sentence_chrf(answer, [ideal], word_order=...).score / 100, for 0 and 2.
CHRF = [
    ("The cat sat on the mat.", "The cat is on the mat.", 0.6717273492330232, 0.6943695278069348),
    ("Paris", "Paris", 1.0, 1.0),
    ("paris", "Paris", 0.5433333333333333, 0.4527777777777778),
    ("", "x", 0.0, 0.0),
    ("ab", "abc", 0.6363636363636362, 0.4242424242424242),
    ("It's 5 o'clock, isn't it?", "It is five o'clock.", 0.3808830458367517, 0.30881514899942486),
    ("Größe zählt nicht!", "Die Größe zählt doch nicht.", 0.5116966196536448, 0.47794227498613945),
    ('"Yes," he said', "'Yes', he said.", 0.41651945344083613, 0.39761539354364733),
    ("x", "yz", 0.0, 0.0),
    ("a b c d e f g", "g f e d c b a", 0.16666666666666663, 0.25),
]


@pytest.mark.parametrize(("answer", "ideal", "chrf", "chrf_2"), CHRF)
def test_similarity_is_sacrebleus_chrf(answer, ideal, chrf, chrf_2) -> None:
    assert score("similarity", answer, "Q", ideal) == pytest.approx(chrf, abs=1e-12)
    assert score("similarity", answer, ideal, word_order=2) == pytest.approx(chrf_2, abs=1e-12)
