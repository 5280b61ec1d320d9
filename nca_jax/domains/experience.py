"""The command that gathers experience: the model plays, writes down what it has learned, and the best list is kept.

    python -m nca_jax.domains.experience --config=configs/frozenlake.py:self [--output=DIR] [--games=30]

As in OPCD (arXiv 2602.12275): after each game the same model writes one or two items, which are appended; beyond a
number of tokens the oldest are dropped. Games are played on training boards, with the items so far as the context.
Every few rounds the list is tried on the validation games; the version that wins most of them is written to
<output>/context.json, for `--config.context.file=`. Test boards are never touched.

The same command continues what was stopped: everything is in <output>/rounds.jsonl.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from ml_collections import ConfigDict
from tqdm import tqdm

from nca_jax.command import config_label, parse_with_config, set_up_logging
from nca_jax.data.chat import Context
from nca_jax.data.pipeline import training_indices
from nca_jax.domains import make_domain
from nca_jax.domains.answers import after_thinking
from nca_jax.domains.base import Example, Probe, context_file
from nca_jax.domains.games import experience_context
from nca_jax.errors import UserError
from nca_jax.evaluation import make_evaluator
from nca_jax.files import write_json
from nca_jax.games.episode import Episode
from nca_jax.items import NO_CONTEXT, WITH_CONTEXT
from nca_jax.metrics import accuracy
from nca_jax.multi_turn import Player
from nca_jax.rollout import Sampling, example_keys
from nca_jax.session import Session, open_session

_ITEM = re.compile(r"^[ \t]*-[ \t]*EXPERIENCE ITEM:[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
_REFLECT = """\
You have just played this game. All that you were shown, and how it ended:

{observation}

The game is over: {ending}.

What can be learned from it for other games of this kind, on other boards? Write one or two short items that would \
help a player who knows nothing, each on a line of its own that begins with "- EXPERIENCE ITEM: ". Do not repeat what \
is known already."""
_ENDINGS = {
    "won": "it was won",
    "lost": "it was lost",
    "invalid": "it was lost, after two answers in a row that changed nothing",
    "turns": "it was lost, for the turns were used up",
}
# Folded into the keys of reflections, which are drawn in the same rounds as the games.
_REFLECTION = 1 << 21


@dataclasses.dataclass
class Gathering:
    """How experience is gathered; part of what a continued command must have in common."""

    games: int = 30  # [C]
    parallel: int = 1  # games a round, played with the same items [C: 1]
    every: int = 5  # rounds between trials on the validation games
    max_tokens: int = 8192  # of all items together [C]
    max_items: int = 2  # taken from one reflection [C]


def read_items(response: str, at_most: int) -> list[str]:
    """The items of a reflection, what was thought before it left out; without any, none."""
    said = after_thinking(response)
    return [] if said is None else _ITEM.findall(said)[:at_most]


def newest_within(items: Sequence[str], max_tokens: int, session: Session) -> list[str]:
    """The newest items whose lines together have at most so many tokens."""
    kept, total = [], 0
    for item in reversed(items):
        total += len(session.model.tokenizer(f"- EXPERIENCE ITEM: {item}\n", add_special_tokens=False)["input_ids"])
        if total > max_tokens:
            break
        kept.append(item)
    return kept[::-1]


class Experience:
    """Rounds of playing and writing down, each recorded before the next begins.

    Args:
      config: whose model plays; rollout.temperature, top-p and max_new_tokens hold for games and reflections.
      output: directory of rounds.jsonl and context.json.
      gathering: how.

    Raises:
      UserError: the domain is no game, or the directory holds rounds of another command.
    """

    def __init__(self, config: ConfigDict, output: epath.Path, gathering: Gathering):
        # The domain's own context, whatever the config says: experience begins with nothing.
        self.domain = make_domain(config.domain.name, **config.domain.settings)
        if not self.domain.is_multi_turn:
            raise UserError(f"{config.domain.name} is no game; compare contexts with nca_jax.domains.select_context.")
        self._config, self._output, self._how = config, output, gathering
        self._path = output / "rounds.jsonl"
        self._identity = {
            "model": config.model.source,
            "domain": {"name": config.domain.name, **config.domain.settings},
            "seed": config.seed,
            "rollout": config.rollout.to_dict(),
            # More games continue; the last of fewer were tried too, which changes nothing.
            "gathering": {k: v for k, v in dataclasses.asdict(gathering).items() if k != "games"},
        }
        self.rounds: list[dict[str, Any]] = self._read()
        self.session: Session | None = None

    def run(self) -> tuple[dict[str, Any], float]:
        """Plays what is left and writes the best context.

        Returns:
          The record of the trial that was best, and the share of games won without any experience.

        Raises:
          UserError: the model has written no item at all.
        """
        how = self._how
        total = -(-how.games // how.parallel)
        trials = [0, *(number for number in range(1, total + 1) if number % how.every == 0 or number == total)]
        self._output.mkdir(parents=True, exist_ok=True)
        if not self.rounds:
            self._record({"start": self._identity})
        items = {0: [], **{record["round"]: record["items"] for record in self.rounds if "round" in record}}
        if len(items) <= total or not self._tried(trials[-1]):
            self.session = open_session(self._config)
        examples = self.domain.examples("train")
        order = training_indices(len(examples), how.parallel, self._config.seed)
        for number in tqdm(range(total + 1), unit="round", initial=len(items) - 1, disable=None):
            chosen = [examples[i] for i in next(order)]
            if number not in items:
                games, new = self._round(number, chosen, items[number - 1])
                items[number] = newest_within([*items[number - 1], *new], how.max_tokens, self.session)
                self._record({"round": number, "games": games, "new": new, "items": items[number]})
            if number in trials and not self._tried(number):
                self._try(number, items[number])
        tried = [record for record in self.rounds if "trial" in record]
        # The first of equals is the shortest list.
        best = max((trial for trial in tried if trial["items"]), key=lambda trial: trial["won"], default=None)
        if best is None:
            raise UserError(f"the model has written no line that begins with '- EXPERIENCE ITEM:'; see {self._path}.")
        write_json(self._output / "context.json", [dict(m) for m in context_file(experience_context(best["items"]))])
        return best, tried[0]["won"]

    def _round(self, number: int, examples: Sequence[Example], items: Sequence[str]) -> tuple[list, list[str]]:
        """Plays one round; returns a record of each game, and the items that were written."""
        context = experience_context(items) if items else None
        keys = example_keys(self._config.seed, number, jnp.arange(len(examples)))
        episodes, _ = self._player(context).play(self.session.params, examples, keys)
        texts = self._reflect(examples, episodes, context, jax.vmap(jax.random.fold_in, (0, None))(keys, _REFLECTION))
        games, new = [], []
        for example, episode, text in zip(examples, episodes, texts, strict=True):
            found = read_items(text, self._how.max_items)
            new += [item for item in found if item not in items and item not in new]
            games.append({"id": example.id, "ending": episode.ending, "turns": len(episode.turns), "reflection": text})
        return games, new

    def _reflect(
        self, examples: Sequence[Example], episodes: Sequence[Episode], context: Context | None, key_N: jax.Array
    ) -> list[str]:
        """What the model writes about each game that it has played."""
        player, prompts = self._player(context), []
        for example, episode in zip(examples, episodes, strict=True):
            text = _REFLECT.format(observation=episode.observation(), ending=_ENDINGS[episode.ending])
            prompts.append(player.prompt_tokens([{"role": "user", "content": text}], example))
        drawn = player.sample_rows(self.session.params, [], prompts, key_N)
        return [self.session.decode(response_R[mask_R]) for response_R, mask_R, _ in drawn]

    def _player(self, context: Context | None) -> Player:
        # Nothing is shared between rounds, for the context grows with each: its prefix would be another shape, and
        # another compilation, in every round.
        config, answering = self._config, self.session.answering
        return Player(
            self.domain,
            self.session.chat,
            context,
            np.zeros(0, np.int32),
            sample=answering.sampler(config.rollout.top_k),
            encode=answering.encode,
            decode=self.session.decode,
            sampling=Sampling(float(config.rollout.temperature), float(config.rollout.top_p)),
            rows=self._how.parallel,
            devices=1,
            length_multiple=config.data.length_multiple,
            max_prompt_tokens=config.data.max_prompt_tokens,
        )

    def _try(self, number: int, items: Sequence[str]) -> None:
        """Plays the validation games with the items; round 0 is without any."""
        session, config = self.session, self._config.copy_and_resolve_references()
        config.evaluation.split, config.evaluation.divergence = "validation", "none"
        probes = [Probe(WITH_CONTEXT, experience_context(items), self.domain.score)] if items else []
        shared = (config, self.domain, session.chat, session.answering, session.decode)
        evaluator = make_evaluator(*shared, probes, prefix_multiple=config.data.length_multiple)
        view = WITH_CONTEXT if items else NO_CONTEXT
        results = evaluator(session.params, [view])[view]
        won = accuracy([result.correct for result in results])
        self._record({"trial": number, "won": won, "games": len(results), "items": list(items)})
        tqdm.write(f"after round {number}: {len(items)} items, {won:.3f} of {len(results)} validation games won")

    def _tried(self, number: int) -> bool:
        return any(record.get("trial") == number for record in self.rounds)

    def _record(self, record: dict[str, Any]) -> None:
        self.rounds.append(record)
        with self._path.open("a") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        # A last line without its end is of a command that was killed while it wrote.
        *lines, unfinished = self._path.read_text().split("\n")
        records = [json.loads(line) for line in lines]
        if unfinished:
            self._path.write_text("".join(line + "\n" for line in lines))
        if records and records[0].get("start") != json.loads(json.dumps(self._identity)):
            raise UserError(f"{self._path} is of another model, game or command; choose another --output.")
        return records


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, or 2 for input that cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m nca_jax.domains.experience", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    output_help = "directory, continued if it holds rounds; default: experience/<config>_<setting>"
    parser.add_argument("--output", help=output_help)
    for field in dataclasses.fields(Gathering):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help=f"default: {field.default}")
    try:
        options, config, name = parse_with_config(parser, arguments)
        how = Gathering(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Gathering)})
        if min(dataclasses.astuple(how)) < 1:
            raise UserError("--games, --parallel, --every, --max_tokens and --max_items are all at least 1.")
        output = epath.Path(options.output or f"experience/{config_label(name)}")
        best, without = Experience(config, output, how).run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{output / 'context.json'}: {len(best['items'])} items after round {best['trial']}, which won "
        f"{best['won']:.3f} of {best['games']} validation games ({without:.3f} without experience); give it as "
        "--config.context.file"
    )
    return 0


if __name__ == "__main__":
    set_up_logging()
    sys.exit(main(sys.argv[1:]))
