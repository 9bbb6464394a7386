r"""The questions that Eyas takes out of the `evals` package.

Its samples were made to be marked by a machine: a system message that demands one letter, and a user text. We take
files whose user text can be turned into a self-contained question that wants an answer in words, drop the system
message, and where the text is only material ("Sailing Instructor"), ask our own question about it.

Left out whole, for their licences (LICENSE.md of the package): steganography, text_compression, schelling_point,
theory_of_mind. Left out besides: samples copied from exams, contests, songs, newspapers or other data sets.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator

from eyas.files import value_hash

_ROOT = "evals/registry/data/"
_PER_FILE = 12
_WHOLE = r"(.+)"
# a multiple-choice question without its choices, where it makes sense so ("Which of these" does not)
_STEM = r"((?:(?![Ww]hich of|best describes)[^\n])+\?)\s+\(?[Aa][.):]\s.*"
_QUESTION = r"(.+?\?).*"  # without "Answer Y or N"

# file: (what to take, how to ask)
_FILES = {
    "ab/samples.jsonl": (r"(What is the name .+)", "{}"),
    "aba_mrpc_true_false/samples.jsonl": (
        _WHOLE,
        'Is this statement about the ethics of lawyers right? Explain your answer.\n"{}"',
    ),
    "accounting_audit/samples.jsonl": (_STEM, "{}"),
    "algebra_word_problems/samples.jsonl": (_WHOLE, "{}"),
    "beam_analysis/beam-analysis.jsonl": (_WHOLE, "{}"),
    "bigrams/samples.jsonl": (_WHOLE, "Go on with this story in a few sentences: {}"),
    "born_first/born_first.jsonl": (_QUESTION, "{}"),
    "cissp-study-questions/samples.jsonl": (_STEM, "{}"),
    "counterfactual-reasoning/counterfactual_reasoning_samples.jsonl": (_WHOLE, "{}"),
    "cricket_situations/samples.jsonl": (r"(.+?)\??", "{}?"),
    "crontab/samples.jsonl": (_WHOLE, "Write a crontab line for this and explain each field: {}"),
    "css-selectors/verbal.jsonl": (_WHOLE, "Write a CSS selector for this and explain it: {}"),
    "escher_sentences/samples.jsonl": (r".*?\?\s+(.+?[.?!])\s+Answer.*", "Does this sentence make sense? {}"),
    "event_categories/samples.jsonl": (_WHOLE, "What does this line of a system log mean? {}"),
    "fcc_amateur_extra/samples.jsonl": (_STEM, "{}"),
    "finger-tracking/samples.jsonl": (_WHOLE, "{}"),
    "food/samples.jsonl": (r".*\?\s+(.+)", "What is {}, and how do people eat it?"),
    "GPT-model-text-detection/samples.jsonl": (_WHOLE, "Sum up this text in one sentence: {}"),
    "infiniteloop-match/infiniteloop-match.jsonl": (_WHOLE, "What does this code do, and does it ever end?\n{}"),
    "internal_representations/samples.jsonl": (_WHOLE, "{}"),
    "logic-statements/logic-statements.jsonl": (r"(Is the following .+?\.)\s+Format.*", "{} Explain why or why not."),
    "math-derivatives/questions.jsonl": (_WHOLE, "{}"),
    "multistep-word-problems/samples.jsonl": (_WHOLE, "{}"),
    "numerical-cabbala-casanova/samples.jsonl": (r"Question:\s*(.+?)\n.*", "{}"),
    "ph_calculation/samples.jsonl": (_WHOLE, "{}"),
    "probability_questions/probability_questions.jsonl": (_WHOLE, "{}"),
    "proofreader/samples.jsonl": (_WHOLE, "Correct the spelling in this text: {}"),
    "rock-climbing/samples.jsonl": (_WHOLE, "Which kind of climbing hold is this? {}"),
    "security_guide/samples.jsonl": (_WHOLE, "{}"),
    "seo_keywords/samples.jsonl": (r".*?:\s*(.+)", "Write a short introduction to an article with this title: {}"),
    "shared_border/samples.jsonl": (_WHOLE, "{}?"),
    "soc_codes/samples.jsonl": (r".*job title (.+?)'?", "What does somebody do all day whose job is {}?"),
    "test_comp_sci/questions.jsonl": (_STEM, "{}"),
    "utah_real_estate/samples.jsonl": (_STEM, "{}"),
    "which_is_heavier/which_is_heavier.jsonl": (_QUESTION, "{} Explain."),
}


def _user_text(sample: object) -> str | None:
    """The user text of a sample with one user message and no answers."""
    turns = sample.get("input") if isinstance(sample, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    roles = [turn.get("role") for turn in turns]
    if roles.count("user") != 1 or not set(roles) <= {"system", "user"}:
        return None
    content = turns[roles.index("user")].get("content")
    return content if isinstance(content, str) else None


def evals_prompts(wheel: zipfile.ZipFile) -> Iterator[str]:
    """At most 12 questions of each file, chosen by hash, so that no file crowds out the others."""
    for name, (pattern, question) in _FILES.items():
        taken = set()
        for line in wheel.read(_ROOT + name).decode("utf-8").split("\n"):
            text = _user_text(json.loads(line)) if line.strip() else None
            match = re.fullmatch(pattern, text.strip(), re.DOTALL) if text else None
            if match is not None:
                taken.add(question.format(match[1].strip()))
        yield from sorted(taken, key=value_hash)[:_PER_FILE]
