"""Which loops there are (twin.py), at random."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from tests.loop.twin import Part, Program, Turn

HANDLES: tuple[dict[str, Any] | None, ...] = (
    {"dtype": "float16"},
    {"dtype": "float16"},
    {"dtype": "float16", "loss_scale": 2.0**10},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "loss_scale": "dynamic"},
    {"dtype": "float32"},
    None,
)
REGIONS = ("as it is",) * 6 + ("disable_casts", "autocast off", "bfloat16", "float16")
HOWS = (*("backward",) * 9, *("tape", "twice", "stop inside", "fail in backward") * 2, "clip inside", "step inside")
MASTERS = (True, "remainder", "stochastic", "kahan")
NETS = (0, 1, 2)
SCALERS = (0, 0, 0, 1, 2)
WHICH = (0, 1)  # of two parameters
EITHER = (False, True)


def program(random: Random) -> Program:
    """A loop whose functions are called often enough to be replayed."""
    wrapped = random.random() < 0.1  # whose losses no handle scales
    functions = tuple(tuple(_body(random, wrapped)) for _ in range(random.choice((1, 1, 2))))
    always = [_change(random) for _ in range(random.choice((0, 0, 0, 0, 1, 2)))]
    given, region = random.choice(("tensors", "nodes", "arrays", "names")), random.choice(REGIONS)
    turns = []
    for seed in range(random.randint(5, 12)):
        changes = [_change(random) for _ in range(random.choice((0, 0, 0, 0, 0, 1, 2)))]
        turns.append(
            Turn(
                before=(*always, *changes),
                function=random.randrange(len(functions)),
                rows=random.choice((4, 4, 4, 4, 4, 3)),
                seed=seed,
                poison=random.choice((None,) * 8 + (np.inf, np.nan)),
                given=given,
                region=region,
                fails=random.random() < 0.1,
            )
        )
    return Program(
        random.choice(HANDLES),
        functions,
        tuple(turns),
        random.choice((3, 3, 3, 2, 0)),
        wrapped,
        random.choice(MASTERS),
        random.random() < 0.25,
        random.random() < 0.25,
    )


# ---------------------------------------------------------------------------------------------- functions


def _body(random: Random, wrapped: bool) -> list[Part]:
    kinds = (
        (_wrapped, _wrapped, _with_scaler) if wrapped else (*(_usual,) * 5, _with_scaler, _with_scaler, _netcl, _any)
    )
    return random.choice(kinds)(random)


def _usual(random: Random) -> list[Part]:
    """What one turn of a loop does for one optimizer: all of it, or most."""
    net = random.choice(NETS)
    body: list[Part] = [("zero_grad", net)] if random.random() < 0.5 else []
    body += [_train(random, net) for _ in range(random.choice((1, 1, 1, 2, 3)))]
    body += random.choice(([], [], [("clip", net, False)], [("clip", net, True)]))
    body += [("step", net)] * random.choice((0, 1, 1, 1, 1, 2))
    return body + random.choice(([], [("zero_grad", net)], [("follow",)], [("infer", net)]))


def _train(random: Random, net: int) -> Part:
    """A scaled pass, mostly for the optimizer of its network."""
    named = random.choice(((net,),) * 4 + ((0, 1, 2), (0, 1)))
    return "train", net, random.choice(EITHER), named, random.choice(HOWS), random.choice(REGIONS)


def _with_scaler(random: Random) -> list[Part]:
    """PyTorch's loop, or most of it."""
    number, net = random.choice(SCALERS), random.choice(NETS)
    body: list[Part] = [("zero_grad", net)] if random.random() < 0.7 else []
    body += [("scale", number, net, random.choice(EITHER)) for _ in range(random.choice((1, 1, 2)))]
    if random.random() < 0.5:
        body += [("unscale", number, net), ("clip", net, random.choice(EITHER))]
    return body + ([("scaler_step", number, net), ("update", number)] if random.random() < 0.7 else [])


def _wrapped(random: Random) -> list[Part]:
    """The loop of a wrapped optimizer."""
    passes: list[Part] = [("train_wrapped", random.choice(EITHER)) for _ in range(random.choice((1, 2, 2)))]
    return [*random.choice(([], [("zero_grad", 2)])), *passes, ("step_wrapped",)]


def _netcl(random: Random) -> list[Part]:
    """netcl's loop."""
    net = random.choice(NETS)
    return [("zero_grad", net), ("train_netcl", net, random.choice(EITHER)), *random.choice(([], [("follow",)]))]


def _any(random: Random) -> list[Part]:
    return [_part(random) for _ in range(random.randint(1, 5))]


def _part(random: Random) -> Part:
    net, number = random.choice(NETS), random.choice(SCALERS)
    some: Sequence[Part] = (
        _train(random, net),
        _train(random, net),
        ("nested", net, random.choice(NETS), random.choice(EITHER)),
        ("plain", net, random.choice(EITHER)),
        ("scale", number, net, random.choice(EITHER)),
        ("unscale", number, net),
        ("scaler_step", number, net),
        ("update", number),
        ("step", net),
        ("step", net),
        ("zero_grad", net),
        ("zero_grad", net),
        ("clip", net, random.choice(EITHER)),
        ("follow",),
        ("infer", net),
        ("validate", net),
        ("stop",),
    )
    return random.choice(some)


# ---------------------------------------------------------------------------------------------- between calls


def _change(random: Random) -> Part:
    net, one, seed = random.choice(NETS), random.choice(WHICH), random.randrange(10)
    some: Sequence[Part] = (
        *[_part(random) for _ in range(6)],
        ("rate", net, random.randint(4, 9)),
        ("rate", net, random.randint(4, 9)),
        ("mode", net, random.choice(EITHER)),
        ("freeze", net, one, random.choice(("_frozen", "requires_grad"))),
        ("write", net, one, seed),
        ("put_gradient", net, one, seed),
        ("write_gradient", net, one, random.choice((2.0, np.inf))),
        ("clear_one", net, one),
        ("replace", net, seed),
        ("dropout", random.choice((0.25, 0.5))),
        ("load_scale", random.choice((2.0**4, 2.0**12, 2.0**20))),
        ("set_scaler", one, random.choice((2.0**3, 2.0**12))),
        ("train_netcl", net, random.choice(EITHER)),
        ("save",),
        ("load",),
        ("init", random.choice(HANDLES)),
    )
    return random.choice(some)
