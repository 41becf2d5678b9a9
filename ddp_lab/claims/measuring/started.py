"""A program that is started as the sources start theirs, learns its place as theirs do, and then is `ddp train`.

python -m ddp_lab.claims.measuring.started WAY [words of `ddp train`]
"""

from __future__ import annotations

import os
import sys
from argparse import REMAINDER, ArgumentParser
from collections.abc import Sequence

import torch.multiprocessing as mp

from ddp_core.cli import main
from ddp_core.distributed.world import free_port

ENVIRONMENT, BOTH_SPELLINGS, ONE_SPELLING, FUNCTION = "environment", "both-spellings", "one-spelling", "function"
WAYS = {
    ENVIRONMENT: "os.environ (source 003)",
    BOTH_SPELLINGS: "--local_rank or --local-rank (source 000)",
    ONE_SPELLING: "--local_rank (source 002)",
    FUNCTION: "mp.spawn's argument (sources 000, 001, 004)",
}
"""By the name of a way: where a program that is started so finds its rank."""


def words_of(way: str, arguments: Sequence[str]) -> list[str]:
    """The words after the way, once the rank is known as the source's program knows it. Exits where that fails."""
    parser = ArgumentParser(prog=f"rank by {WAYS[way]}", add_help=False)
    if way == BOTH_SPELLINGS:
        parser.add_argument("--local_rank", "--local-rank", type=int)
    elif way == ONE_SPELLING:
        parser.add_argument("--local_rank", default=-1)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("words", nargs=REMAINDER)
    if way == ENVIRONMENT:  # this program parses no argument, and torch.distributed.launch gives one
        return list(parser.parse_known_args(arguments)[0].words)
    known = parser.parse_args(arguments)
    if known.local_rank in (None, -1):
        parser.error(f"local_rank is {known.local_rank}: the launcher has passed none")
    return list(known.words)


def _work(rank: int, count: int, port: int, words: list[str]) -> None:
    """What mp.spawn calls in each process, which sets the variables itself."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    sys.exit(main(words))


def start(arguments: Sequence[str]) -> int:
    """Do as the words say; returns an exit code."""
    way = next(word for word in arguments if word in WAYS)
    if way == FUNCTION:
        count = int(arguments[1])
        mp.spawn(_work, (count, free_port(), list(arguments[2:])), count)
        return 0
    return main(words_of(way, arguments))


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
