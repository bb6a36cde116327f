"""What ``vllm-hook demo steer`` can bring about, and the rules that say whether a text does it.

The rules are simple on purpose: anyone can check them by eye.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Record = Mapping[str, str]

CAPITALS_SHARE = 0.8
FRENCH_SHARE = 0.8
#: Fewer stop words than this say nothing about a language.
LEAST_STOP_WORDS = 3
SHORT_WORDS = 10
ITEM = re.compile(r"(?:(?:^|\s)1[.)]|^\s*[-*•])\s+[*_]*[^\W\d_]", re.MULTILINE)

#: Frequent words that are of one of the two languages only.
_FRENCH = """le la les un une des du de et est sont que qui dans pour pas vous nous il elle ils elles ce cette
ces au aux avec par plus ou où se sur leur leurs mais être avoir comme votre vos très aussi ont peut je tu ne
en son sa ses été était fait l' d' c' n' s' j' qu'"""
_ENGLISH = """the of and is are that which in for not you we it he she they this these with by more or as at
from to be have has was were your their its can will but also an into them if when there what"""
FRENCH_WORDS, ENGLISH_WORDS = frozenset(_FRENCH.split()), frozenset(_ENGLISH.split())


def is_capitals(text: str) -> bool:
    """At least 80 % of the letters are capitals (and there are letters)."""
    letters = [c for c in text if c.isalpha()]
    return bool(letters) and sum(c.isupper() for c in letters) >= CAPITALS_SHARE * len(letters)


def is_french(text: str) -> bool:
    """At least 80 % of the stop words are French ones, of at least 3."""
    words = re.findall(r"[a-zà-ÿœ]+'?", text.lower().replace("’", "'"))
    french = sum(w in FRENCH_WORDS for w in words)
    english = sum(w in ENGLISH_WORDS for w in words)
    return french + english >= LEAST_STOP_WORDS and french >= FRENCH_SHARE * (french + english)


def is_list(text: str) -> bool:
    """A list item with a word: "1." at the start of a line or after a space, or a bullet at the start."""
    return bool(ITEM.search(text))


def is_short(text: str) -> bool:
    """One to ten words."""
    return 0 < len(text.split()) <= SHORT_WORDS


@dataclass(frozen=True)
class Behaviour:
    """``answers(record)``: the same answer with the behaviour and without, for pairs by example; None:
    the pair is the question with ``instruction`` and without.
    """

    name: str
    title: str
    rule: str
    shows: Callable[[str], bool]
    instruction: str
    answers: Callable[[Record], tuple[str, str]] | None
    #: Where --rebuild looks; outside, a coarser search found less.
    layers: tuple[int, ...]
    must_end: bool = False

    def shown(self, text: str, ended: bool) -> bool:
        """``ended``: the model ended the answer itself, rather than the limit on tokens."""
        return self.shows(text) and (ended or not self.must_end)


BEHAVIOURS = {
    b.name: b
    for b in (
        Behaviour(
            "list",
            "answer with a list",
            "the answer has a list item with a word (1. or a bullet)",
            is_list,
            "Answer with a numbered list.",
            None,
            (16, 18, 20),
        ),
        Behaviour(
            "capitals",
            "answer in capital letters",
            "at least 80 % of the letters are capitals",
            is_capitals,
            "Answer in capital letters only.",
            lambda r: (r["answer"].upper(), r["answer"]),
            (20, 22, 24),
        ),
        Behaviour(
            "french",
            "answer in French",
            "at least 80 % of the French and English stop words are French, of at least 3",
            is_french,
            "Answer in French.",
            lambda r: (r["french"], r["answer"]),
            (12, 14, 16),
        ),
        Behaviour(
            "short",
            "answer very briefly",
            "the answer ends within 10 words",
            is_short,
            "Answer in at most five words.",
            None,
            (12, 16, 20),
            must_end=True,
        ),
    )
}
