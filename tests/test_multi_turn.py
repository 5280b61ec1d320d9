"""Many games at once, each turn an example: who is asked what, with which random numbers, and in which rows."""

import jax
import numpy as np
import pytest
from conftest import byte_tokenizer

from nca_jax.data.chat import ChatFormat, pack_view
from nca_jax.domains import make_domain
from nca_jax.errors import UserError
from nca_jax.multi_turn import Player, own_tokens, transcript
from nca_jax.rollout import Rollout, Sampling, example_keys

R = 3
MOVES = {10: "[right]", 11: "[down]", 12: "no idea", 13: "[up]"}
DOMAIN = make_domain("frozenlake", size=4, holes=2, max_turns=7, train_boards=20, validation_boards=4, test_boards=4)
CHAT = ChatFormat(byte_tokenizer())


class FakeSampler:
    """Answers with a move drawn from the row's key alone. Inactive rows answer nothing."""

    def __init__(self):
        self.calls = []

    def __call__(self, params, prefix, prompt_BxP, prompt_length_B, active_B, key_B, sampling):
        prompts = [tuple(row[:n].tolist()) for row, n in zip(prompt_BxP, prompt_length_B, strict=True)]
        self.calls.append((np.asarray(active_B), prompts, prefix, prompt_BxP.shape))
        draw = jax.vmap(lambda key: jax.random.choice(key, np.array(sorted(MOVES))))(key_B)
        response_BxR = np.stack([np.asarray(draw), np.zeros(len(draw), int), np.full(len(draw), 99)], axis=1)
        mask_BxR = (np.arange(R) < 2) & active_B[:, None]
        return Rollout(response_BxR, mask_BxR, np.zeros(mask_BxR.shape), np.asarray(draw) == 13)


def player(sample, context=None, rows=8, **changes) -> Player:
    ids = [
        CHAT.encode(context.apply(messages) if context else messages)
        for example in DOMAIN.examples("train")
        for messages in (DOMAIN.messages(example), DOMAIN.last_messages(example))
    ]
    settings = {
        "sample": sample,
        "encode": lambda params, prefix_C: ("encoded", params, len(prefix_C)),
        "decode": lambda ids: MOVES[int(ids[0])],
        "sampling": Sampling(0.5, 0.9),
        "rows": rows,
        "devices": 1,
        "length_multiple": 32,
        "max_prompt_tokens": 4000,
    }
    return Player(DOMAIN, CHAT, context, pack_view(ids).prefix_C, **settings | changes)


def play(count=8, seed=0, index=None, **changes):
    sample = FakeSampler()
    keys = example_keys(seed, 3, np.arange(count) if index is None else np.array(index))
    examples = DOMAIN.examples("train")[:count] if index is None else [DOMAIN.examples("train")[i] for i in index]
    episodes, turns = player(sample, **changes).play("weights", examples, keys)
    return episodes, turns, sample


@pytest.mark.parametrize("context", [None, DOMAIN.context], ids=["no_context", "with_context"])
def test_each_turn_is_asked_with_its_whole_history(context):
    episodes, turns, sample = play(context=context)
    assert all(episode.over for episode in episodes)
    assert max(len(episode.turns) for episode in episodes) >= 3
    assert [len(e.turns) for e in episodes] == [sum(t.game == g for t in turns) for g in range(8)]
    asked = [p for active, prompts, *_ in sample.calls for p, on in zip(prompts, active, strict=True) if on]
    prefix = CHAT.encode(context.apply(turns[0].messages) if context else turns[0].messages)[: sample.calls[0][2][2]]
    assert len(prefix) > 100
    for turn, own in zip(turns, asked, strict=True):
        made = episodes[turn.game].turns[turn.number - 1]
        assert turn.messages == [{"role": "user", "content": made.observation}]
        expected = CHAT.render(context.apply(turn.messages) if context else turn.messages)
        assert CHAT.decode([*prefix, *own]) == expected
        assert made.response == MOVES[int(turn.response_R[0])]
        assert turn.mask_R.tolist() == [True, True, False]
        assert turn.truncated == (turn.response_R[0] == 13)


def test_a_game_that_is_over_is_not_asked_again_and_rows_shrink():
    episodes, _, sample = play()
    active = [int(call[0].sum()) for call in sample.calls]
    assert active == [sum(len(e.turns) >= number for e in episodes) for number in range(1, len(active) + 1)]
    assert active[0] == 8 > active[-1]
    sizes = [call[3][0] for call in sample.calls]
    assert sizes == [next(s for s in (2, 8) if s >= n) for n in active]
    assert all(call[3][1] % 32 == 0 for call in sample.calls)


def test_a_game_is_the_same_alone_and_among_others():
    """Whatever the other games, the rows and the order: only seed, environment and turn matter."""
    together, _, _ = play()
    keys = example_keys(0, 3, np.arange(8))
    for game in (0, 5, 7):
        example = DOMAIN.examples("train")[game]
        (alone,), _ = player(FakeSampler(), rows=1).play("weights", [example], keys[game : game + 1])
        assert transcript(alone) == transcript(together[game])
    chunked, _, sample = play(rows=3)
    assert [transcript(e) for e in chunked] == [transcript(e) for e in together]
    assert {call[3][0] for call in sample.calls} <= {1, 3}
    other, _, _ = play(seed=1)
    assert [transcript(e) for e in other] != [transcript(e) for e in together]


def test_turns_of_a_game_have_keys_of_their_own():
    keys = example_keys(0, 3, np.arange(1))
    answers = set()
    for number in range(1, 30):
        turn_key = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        ((response_R, _, _),) = player(FakeSampler(), rows=1).sample_rows("weights", [], [(1, 2)], turn_key)
        answers.add(int(response_R[0]))
    assert answers == set(MOVES)


def test_rows_stay_divisible_by_the_devices():
    _, _, sample = play(devices=4)
    assert {call[3][0] for call in sample.calls} == {8}
    _, _, sample = play(devices=2)
    assert {call[3][0] for call in sample.calls} == {2, 8}


def test_a_prompt_beyond_the_limit_names_the_game():
    longest = len(CHAT.encode(DOMAIN.messages(DOMAIN.examples("train")[0])))
    with pytest.raises(UserError, match=r"game [0-9a-f]{12} has \d+ tokens, .*max_prompt_tokens"):
        play(max_prompt_tokens=longest + 10)


def test_a_known_prefix_is_not_encoded_again():
    sample = FakeSampler()
    keys = example_keys(0, 3, np.arange(2))
    player(sample).play("weights", DOMAIN.examples("train")[:2], keys, ["known"])
    assert {tuple(call[2]) for call in sample.calls} == {("known",)}


def test_a_prompt_that_begins_otherwise_is_refused():
    assert own_tokens((1, 2, 3), (1, 2)) == (3,)
    with pytest.raises(UserError, match="splits the same beginning"):
        own_tokens((1, 3, 3), (1, 2))
