"""What the bundled prompts are screened for: English, and fit for a default that anybody may run.

A word filter is blunt; it costs some harmless prompts and that is fine here. Users' own data is not screened.
"""

from __future__ import annotations

import re

_LETTERS = re.compile(r"[A-Za-z']+")
_FUNCTION_WORDS = frozenset(
    _LETTERS.findall(
        "a about all an and any are as at be but by can could do does for from had has have how i if in into is it its "
        "just like many me more most my no not of on one or our out please she should so some that the their them then "
        "there they this to up use want was we were what when where which who why will with would write you your"
    )
)
_ASCII_SHARE = 0.98
_FUNCTION_WORD_SHARE = 0.2

# Stems; `\b` on the left only where a longer word may follow.
_CRUDE = re.compile(
    r"\b(sex|porn|nud[ei]|naked|erotic|nsfw|hentai|fetish|incest|rap(e|ed|ist|ing)\b|fuck|shit|bitch|asshole|ass\b|"
    r"dick\b|cock\b|penis|vagina|boob|breast|tits?\b|slut|whore|cum\b|orgasm|horny|lewd|lingerie|panties|underwear|"
    r"diaper|fart|poop|pee\b|piss|belly|obes|anthro\b|inflat(ed|ing|ion) (big|belly)|big inflated|fattest|pregnan|seduc|kiss|bubble bath|teen\b|hooker|stripp|virgin|"
    r"damn|crap\b|hell\b|bastard|retard|nigg|fag|suicid|kill (myself|yourself|her|him)|murder|tortur|gore\b|"
    r"drunk|weed\b|cocaine|heroin|meth\b|nazi|hitler|terroris|slave|trump|biden|obama|clinton|xi jinping|racis|hang(ed|ing) (him|her))",
    re.IGNORECASE,
)
_PERSONAL = re.compile(
    r"@|https?:|www\.|\d{3}[-. ]?\d{4}\b|"
    r"\b(names?|username|snapchat|instagram|facebook|phone number|address)\b",
    re.IGNORECASE,
)
_ADDRESSED = re.compile(r"\b([Hh]i+|[Hh]ey+|[Hh]ello|[Aa]gain|[Mm]orning|[Tt]hanks|[Tt]his is)\b,? [A-Z][a-z]+")
_OTHER_LANGUAGE = re.compile(
    r"\b(arabic|bengali|chinese|dutch|french|german|hindi|italian|japanese|korean|malayalam|persian|polish|portuguese|"
    r"russian|spanish|tamil|turkish|urdu|vietnamese)\b",
    re.IGNORECASE,
)


def is_english(text: str) -> bool:
    """Mostly ASCII, with as many English function words as prose has, and no word of another language.

    The last also drops harmless mentions, for the sake of "write a poem in Arabic".
    """
    found = _LETTERS.findall(text.lower())
    ascii_share = sum(character.isascii() for character in text) / max(len(text), 1)
    known = sum(word in _FUNCTION_WORDS for word in found)
    english = known >= 2 and known >= _FUNCTION_WORD_SHARE * len(found)
    return english and ascii_share >= _ASCII_SHARE and _OTHER_LANGUAGE.search(text) is None


def is_crude(text: str) -> bool:
    """Whether the text touches a subject that a default data set does without."""
    return _CRUDE.search(text) is not None


def is_personal(text: str) -> bool:
    """Whether the text may hold a name, an address or a number of a person."""
    return _PERSONAL.search(text) is not None or _ADDRESSED.search(text) is not None
