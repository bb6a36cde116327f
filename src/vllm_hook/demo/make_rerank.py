"""``rerank.jsonl``: 60 questions about made-up places, each with ten graded texts, from a seed.

Grade 2 answers the question, two times of three in the question's words and else in others; grade 1 is
about the same matter and place and leaves the answer open; grade 0 is hard: the same place and some of
the question's words without the matter, the same place on other matters, and the answer for other
places of the kind. Every text is filled up to nearly the same length with a sentence that says nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

KINDS = ("museum", "aquarium", "observatory", "castle", "botanical garden", "planetarium")
NAMES = (
    *("Harlow", "Velden", "Ostrey", "Brannock", "Tillby", "Quenford", "Marrowdale", "Selwick"),
    *("Pendrake", "Lowmere", "Ashcombe", "Thornwick", "Kesterly", "Dunraven", "Fairholt", "Wexbury"),
    *("Calderin", "Morvane", "Ellingham", "Stavely", "Rookhope", "Nethercott", "Birchanger", "Oakhampton"),
)
PEOPLE = ("Ines Farrow", "Tomas Beck", "Ruth Okada", "Lars Winther", "Amara Doyle", "Pavel Strand")
STREETS = ("Lantern Row", "Copper Lane", "Weir Street", "Plover Road", "Chapel Walk", "Granary Square")
#: One of these ends a text; the one that fits its length best is taken.
FILLERS = (
    "So it says on the board.",
    "The town's paper wrote so.",
    "A leaflet from the tourist office says so.",
    "This was in the newsletter that came in spring.",
    "A sign in the hall, not far from the stairs, says the same.",
    "The woman at the desk said it twice, and a leaflet has it as well.",
    "It can be read on the board by the stairs, and in the leaflet that lies there.",
)
LENGTH = 140


@dataclass(frozen=True)
class Matter:
    """One thing to ask: the question, an answer in its words and one in others (grade 2), a text that
    leaves it open (1), a decoy (0)."""

    question: str
    answers: tuple[str, str]
    open: str
    decoy: str


MATTERS = (
    Matter(
        "When does the {place} open on weekdays?",
        (
            "On weekdays the {place} opens at {hour}.",
            "From Monday to Friday guests can come into the {place} from {hour} onwards.",
        ),
        "The {place} keeps shorter hours at the weekend than in the week.",
        "An open gate beside the {place} leads to a yard that is swept on weekdays.",
    ),
    Matter(
        "How much does a ticket for the {place} cost?",
        (
            "A ticket for the {place} costs {price} crowns, and half of that for children.",
            "Adults pay {price} crowns at the entrance of the {place}.",
        ),
        "Groups of ten and more get a fifth off the usual fee at the {place}.",
        "A ticket for the {place} is printed on blue paper and not replaced at any cost.",
    ),
    Matter(
        "In which year was the {place} founded?",
        (
            "The {place} was founded in the year {year} by two sisters.",
            "The first guests came to the {place} in the spring of {year}.",
        ),
        "The {place} celebrated its hundredth birthday some time ago with a parade.",
        "The {place} prints a calendar in which each year has a page that was well founded.",
    ),
    Matter(
        "Who manages the {place} today?",
        (
            "Since last autumn the {place} is managed by {person}.",
            "{person} has been the head of the {place} since last autumn.",
        ),
        "A new head of the {place} was appointed last autumn after a long search.",
        "The {place} manages without a car park today, so people who come walk.",
    ),
    Matter(
        "Where is the {place} located?",
        (
            "The {place} is located at {number} {street}, opposite the old mill.",
            "The address of the {place} is {number} {street}, beside the baker.",
        ),
        "The {place} lies a short walk from the railway station.",
        "Where things are lost in the {place}, they are located within a week.",
    ),
    Matter(
        "Which bus goes to the {place}?",
        (
            "The bus of line {number} goes to the {place} every twenty minutes.",
            "Take line {number} from the square and get off at the {place}.",
        ),
        "The {place} can be reached by public transport from the main square.",
        "A bus that goes round the schools, which children like, is paid for by the {place}.",
    ),
    Matter(
        "How many visitors does the {place} have in a year?",
        (
            "In a year the {place} has about {number} thousand visitors.",
            "The {place} counts some {number} thousand guests in twelve months.",
        ),
        "The {place} drew far more people this season than in the one before.",
        "How long visitors stay in the {place} has changed in a year: many have lunch there.",
    ),
    Matter(
        "Are dogs allowed in the {place}?",
        (
            "Dogs are allowed in the {place} if they are kept on a lead.",
            "Pets have to wait outside the {place}; only guide animals may come in.",
        ),
        "The {place} has rules for animals, which hang at the entrance.",
        "Two bronze dogs stand in the {place}; nobody is allowed to climb on them.",
    ),
    Matter(
        "What is the telephone number of the {place}?",
        (
            "The telephone number of the {place} is {phone}.",
            "The office of the {place} can be rung up on {phone}.",
        ),
        "The office of the {place} answers calls in the morning only.",
        "A number of guests left a telephone in the {place} last month.",
    ),
    Matter(
        "Why is the {place} shut this month?",
        (
            "The {place} is shut this month because its roof is being renewed.",
            "The {place} has had a burst pipe and cannot let anybody in before the first.",
        ),
        "The {place} will welcome guests again as soon as the work is finished.",
        "This month the {place} shut its accounts with a small profit.",
    ),
)


def queries(seed: int = 0) -> list[dict[str, Any]]:
    """60 records ``{"id", "query", "documents": [{"text", "grade"}, ..]}``, ten documents each."""
    rng = random.Random(seed)
    records = []
    for i, (kind, matter) in enumerate((k, m) for k in KINDS for m in MATTERS):
        name, *others = rng.sample(NAMES, 4)
        place = f"{name} {kind}"
        rest = rng.sample([m for m in MATTERS if m is not matter], 4)
        both = matter.answers if i % 3 else matter.answers[::-1]
        documents = [(both[0], place, 2), (matter.open, place, 1), (matter.decoy, place, 0)]
        documents += [(both[1], place, 2)] if i % 4 == 0 else [(rest[3].open, place, 0)]
        documents += [(rng.choice(m.answers), place, 0) for m in rest[:3]]
        documents += [(rng.choice(matter.answers), f"{other} {kind}", 0) for other in others]
        texts = [{"text": _filled(_values(t, p, rng)), "grade": grade} for t, p, grade in documents]
        rng.shuffle(texts)
        question = matter.question.format(place=place)
        records.append({"id": f"rerank-{i:02d}", "query": question, "documents": texts})
    return records


def _values(template: str, place: str, rng: random.Random) -> str:
    return template.format(
        place=place,
        hour=rng.choice(("half past eight", "nine", "a quarter to ten", "ten", "eleven")),
        price=rng.randrange(6, 30),
        year=rng.randrange(1820, 1960),
        person=rng.choice(PEOPLE),
        number=rng.randrange(11, 99),
        street=rng.choice(STREETS),
        phone=f"0{rng.randrange(200, 999)} {rng.randrange(1000, 9999)}",
    )


def _filled(text: str) -> str:
    filler = min(FILLERS, key=lambda f: abs(len(text) + 1 + len(f) - LENGTH))
    return f"{text} {filler}"
