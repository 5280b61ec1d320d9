"""What all sides are fed: token ids, written once by the driver. numpy only, since every environment imports this."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

HEADER = 20  # tokens of a chat template that lead every prompt of the no-context view
PROMPT = (16, 32)  # tokens of the shortest and the longest prompt after that
FIRST_ID = 3  # below are the special tokens


class Inputs(NamedTuple):
    """One batch in both views; ids are random, since neither time nor agreement depends on what they mean.

    A row of the no-context view is `header_C`, the prompt without its padding, the response; of the with-context view
    `context_C` comes in place of the header.
    """

    header_C: np.ndarray
    context_C: np.ndarray
    prompt_BxP: np.ndarray  # right padded with 0
    prompt_length_B: np.ndarray
    response_BxR: np.ndarray


class Positions(NamedTuple):
    """Where the loss alone is computed: final hidden states of student and teacher [N, D], their head, the tokens."""

    student_NxD: np.ndarray
    teacher_NxD: np.ndarray
    head_VxD: np.ndarray
    token_N: np.ndarray


def make_inputs(vocab_size: int, batch: int, context: int, response: int, seed: int = 0) -> Inputs:
    """A batch whose prompts have lengths between those of PROMPT, the first the longest."""
    rng = np.random.default_rng(seed)

    def ids(*shape: int) -> np.ndarray:
        return rng.integers(FIRST_ID, vocab_size, shape).astype(np.int32)

    length_B = rng.integers(PROMPT[0], PROMPT[1] + 1, batch).astype(np.int32)
    length_B[0] = PROMPT[1]
    prompt_BxP = np.where(np.arange(PROMPT[1]) < length_B[:, None], ids(batch, PROMPT[1]), 0).astype(np.int32)
    return Inputs(ids(HEADER), ids(context), prompt_BxP, length_B, ids(batch, response))


def make_positions(positions: int, width: int, vocab_size: int, seed: int = 0) -> Positions:
    """Logits of about unit variance, and a teacher that is some way off the student."""
    rng = np.random.default_rng(seed)
    student_NxD = rng.standard_normal((positions, width), np.float32)
    teacher_NxD = student_NxD + 0.3 * rng.standard_normal((positions, width), np.float32)
    head_VxD = rng.standard_normal((vocab_size, width), np.float32) * np.float32(width**-0.5)
    return Positions(student_NxD, teacher_NxD, head_VxD, rng.integers(0, vocab_size, positions).astype(np.int32))


def save(path: Path, arrays: Inputs | Positions) -> None:
    """Writes a .npz file that `load_inputs` or `load_positions` reads."""
    np.savez(path, **arrays._asdict())


def load_inputs(path: str) -> Inputs:
    """Reads what `save` wrote."""
    with np.load(path) as file:
        return Inputs(**file)


def load_positions(path: str) -> Positions:
    """Reads what `save` wrote."""
    with np.load(path) as file:
        return Positions(**file)


def prompts(inputs: Inputs, with_context: bool, rows: int | None = None) -> list[list[int]]:
    """The prompts of a view as lists of ids, header or context included, as libraries without a shared prefix take
    them; of the first `rows` rows, or of all."""
    lead = inputs.context_C if with_context else inputs.header_C
    lengths = inputs.prompt_length_B[:rows]
    return [[*lead.tolist(), *row[:n].tolist()] for row, n in zip(inputs.prompt_BxP, lengths, strict=False)]


def digest(rows: Iterable[Sequence[int]]) -> str:
    """Of the tokens of rows and where each row ends: two sides that report the same were fed the same."""
    sha = hashlib.sha256()
    for row in rows:
        sha.update(np.asarray([len(row), *row], np.int64).tobytes())
    return sha.hexdigest()[:16]
