"""Reading an answer out of a response: the last <answer> tag, and nothing else.

The protocol is that of OPCD (arXiv 2602.12275): a letter, or yes or no, inside the tag; no tag, no answer. What is not
plainly an answer is none: a parser that guesses measures itself.
"""

import re

_LETTER = re.compile(r"(?:\(([A-D])\)|([A-D]))\s*(?:[.):].*)?", re.IGNORECASE | re.DOTALL)
_YES_NO = re.compile(r"(yes|no)[.!]?", re.IGNORECASE)
_CLOSE = "</answer>"


def after_thinking(response: str) -> str | None:
    """What follows the last thinking block; None if one is not closed, for then nothing has been said yet."""
    if response.rfind("<think>") > response.rfind("</think>"):
        return None
    return response.rpartition("</think>")[2]


def last_tag(response: str) -> str | None:
    """The text inside the last complete <answer></answer>, stripped; None if there is none."""
    said = after_thinking(response)
    if said is None:
        return None
    before, closed, _ = said.rpartition(_CLOSE)
    _, opened, inside = before.rpartition("<answer>")
    return inside.strip() if opened and closed else None


def read_letter(response: str) -> str | None:
    """ "A" to "D" of the last tag: `B`, `(b)`, `B. Aspirin` and `b) Aspirin` are B; `Aspirin` and `A or B` are none."""
    found = _LETTER.fullmatch(last_tag(response) or "")
    return (found[1] or found[2]).upper() if found else None


def read_yes_no(response: str) -> str | None:
    """ "yes" or "no" of the last tag, in any case; anything else is none."""
    found = _YES_NO.fullmatch(last_tag(response) or "")
    return found[1].lower() if found else None
