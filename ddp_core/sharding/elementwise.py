"""Whether an optimizer treats each element of a parameter by itself, found out by updates in pieces.

A copy of the optimizer updates whole parameters, others update what ranks would have of them, each alone; after every
step weights and state must have the same bits. It is tried

1. over many steps, on few and small tensors, since a rule may do something else in every tenth step;
2. with large weights, since a rule may limit them;
3. in real sizes (`representatives`), since a rule may ask for a size or a number of dimensions.

Gradients are from 1e-6 to 1e4, so that limits of norms are passed on both sides, and the rate is above 0, also where a
warm-up has set it to 0: no other number of a group is changed. What begins after the last step tried stays unseen, and
so does what asks for more elements than are tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_core.base.digests import same_bits
from ddp_core.base.errors import UserError
from ddp_core.base.seeds import generators_kept
from ddp_core.reduction.flat import in_memory_order
from ddp_core.reduction.norm import BLOCK

from .owned import Owned, Rows
from .representatives import Representative, few_representatives, representatives
from .trial import Trial

_ADVICE = (
    "without shards (--shard none) it can be used, and with them SGD, Adam, AdamW, RMSprop, Adagrad and their like"
)
_REASONS: Mapping[type[torch.optim.Optimizer], str] = {
    torch.optim.Adafactor: "it divides by norms of rows, columns and the whole of a parameter",
    torch.optim.LBFGS: "it multiplies the gradients of all parameters with each other, in several passes of a step",
    torch.optim.Muon: "it makes each matrix orthogonal, for which it multiplies the matrix with itself",
    torch.optim.SparseAdam: "it takes sparse gradients alone, and those of shards are dense",
}
"""Of torch's own optimizers that do not: all that torch 2.13 has. The others pass the trial."""

_RANKS = 2
_ELEMENTS = 2**21
"""Of all parameters that are tried in real sizes."""
_FEW_ELEMENTS = 4000
_STEPS = 30
"""Of the longer round: some rules do more in every tenth, or from the 25th on."""
_SEEN = 0.01
"""A rate at which an update shows in the bits of a weight."""
_SHAPE = (11, 500)
_PLACE = re.compile(r"\b\d+\b")


class _Round(NamedTuple):
    chosen: list[list[Representative]]
    weights: float
    gradients: Sequence[float]
    """Their scale in each step."""
    least_rate: float


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError (2) for an optimizer that needs more of a parameter than the element that it updates.

    Also for one that draws random numbers in its step, and for one that fails in the trial. The optimizer, its
    parameters and its state stay as they are, and so do the generators of random numbers.
    """
    name = type(optimizer).__name__
    for kind, reason in _REASONS.items():
        if isinstance(optimizer, kind):
            raise _refusal(f"{name} does not treat each element by itself: {reason}")
    few = few_representatives(optimizer, _FEW_ELEMENTS)
    own = max([0.0, *(_number(group.get("lr")) for group in optimizer.param_groups)])
    rounds = [
        # The small ones first: rules that are not elementwise may take long for large matrices.
        _Round(few, 0.05, [(1.0, 1e-3, 30.0)[step % 3] for step in range(_STEPS)], own or _SEEN),
        _Round(few, 100.0, [1e-4, 1.0, 1e4], _SEEN),
        _Round(representatives(optimizer, _ELEMENTS), 1.0, [1e-6, 1e-2, 1.0, 1e3], _SEEN),
    ]
    device = next((each.like.device for members in few for each in members), None)
    with generators_kept(device):
        for each in rounds:
            _try(optimizer, each)


def per_element(optimizer: torch.optim.Optimizer) -> list[set[str]]:
    """Of each parameter group: the names, for `of_every_item`, of what has a number for each element in a state."""
    few = few_representatives(optimizer, 1)
    # The shape of a single number says nothing.
    chosen = [[each for each in members if each.like.dim()] or members for members in few]
    wholes = [
        [nn.Parameter(torch.ones(_SHAPE, dtype=each.like.dtype, device=each.like.device)) for each in members]
        for members in chosen
    ]
    trial = Trial(optimizer, wholes, *_related(optimizer, chosen, wholes))
    every = [parameter for members in wholes for parameter in members]
    for parameter in every:
        parameter.grad = torch.ones_like(parameter)
    with generators_kept(every[0].device if every else None):
        trial.step()
    return [
        {
            of_every_item(name)
            for parameter in members
            for name, value in trial.state_of(parameter).items()
            if isinstance(value, Tensor) and value.shape == _SHAPE
        }
        for members in wholes
    ]


def of_every_item(name: str) -> str:
    """One name for all items of a sequence in a state, which may have more of them after more steps."""
    return _PLACE.sub("0", name)


class _Part(NamedTuple):
    """What a rank owns of a whole: by its group and its place in it."""

    group: int
    place: int
    owned: Owned

    @property
    def tensor(self) -> nn.Parameter:
        """What an optimizer of the rank updates."""
        assert self.owned.tensor is not None
        return self.owned.tensor


def _try(optimizer: torch.optim.Optimizer, tried: _Round) -> None:
    """Compare an update of whole parameters with one in pieces, and with one in rows."""
    name = type(optimizer).__name__
    wholes = _wholes(tried.chosen, tried.weights)
    ranks = [*_pieces(wholes), *_rows(wholes)]
    try:
        whole, trials = _copies(optimizer, tried, wholes, ranks)
        drawn = whole.drawn_from()
    except Exception as error:
        raise _refusal(f"{name} cannot be tried: a copy of it cannot be made ({_line(error)})") from error
    begun = [[each.detach().clone() for each in parameters] for parameters in wholes]
    for step, scale in enumerate(tried.gradients, 1):
        _set_gradients(tried.chosen, wholes, ranks, scale, step)
        try:
            whole.step()
        except Exception as error:
            raise _refusal(f"{name} cannot update a parameter in a trial ({_line(error)})") from error
        states = {id(parameter): whole.state_of(parameter) for *_, parameter in _numbered(wholes)}
        for state in states.values():
            for entry, value in state.items():
                if not (isinstance(value, Tensor) or _is_number(value)):
                    raise _refusal(
                        f"{name} keeps {entry} of a weight as a {type(value).__name__}, of which no rank can keep its "
                        "part: only tensors and plain numbers of a state are cut"
                    )
        for parts, trial in zip(ranks, trials, strict=True):
            try:
                trial.step()
            except Exception as error:
                raise _refusal(f"{name} cannot update a parameter in pieces ({_line(error)})") from error
            if (what := _difference(whole, states, trial, wholes, parts)) is not None:
                _require_no_draws(whole, drawn)
                raise _refusal(
                    f"{name} does not treat each element by itself: in pieces {what}, in step {step} of a trial with "
                    f"gradients of about {scale:g}"
                )
    _require_no_draws(whole, drawn)
    for group, place, parameter in _numbered(wholes):
        if parameter.numel() and same_values(begun[group][place], parameter.detach()) and not whole.state_of(parameter):
            raise _refusal(
                f"{name} cannot be tried: {len(tried.gradients)} steps of a copy of it changed no weight of shape "
                f"{list(parameter.shape)}"
            )


def _require_no_draws(whole: Trial, before: list[bytes]) -> None:
    if whole.drawn_from() != before:
        raise _refusal(
            f"{type(whole.optimizer).__name__} draws random numbers in its step, and each rank would draw others for "
            "its part than one process draws for the whole"
        )


def _copies(
    optimizer: torch.optim.Optimizer, tried: _Round, wholes: list[list[nn.Parameter]], ranks: list[list[_Part]]
) -> tuple[Trial, list[Trial]]:
    """A copy of the optimizer for the wholes, and one for each rank's parts of them."""
    instead, of = _related(optimizer, tried.chosen, wholes)
    trials = [Trial(optimizer, wholes, instead, of)]
    for parts in ranks:
        of = {id(part.tensor): tried.chosen[part.group][part.place].like for part in parts}
        members = [[part.tensor for part in parts if part.group == group] for group in range(len(wholes))]
        # A parameter that the optimizer remembers beside its groups is nobody's part.
        strangers = {key: value.detach().clone() for key, value in instead.items()}
        trials.append(Trial(optimizer, members, strangers, of))
    for options in (options for trial in trials for options in trial.groups):
        _raise_rate(options, tried.least_rate)
    return trials[0], trials[1:]


def _set_gradients(
    chosen: list[list[Representative]],
    wholes: list[list[nn.Parameter]],
    ranks: list[list[_Part]],
    scale: float,
    step: int,
) -> None:
    for group, place, whole in _numbered(wholes):
        whole.grad = chosen[group][place].gradient(scale / (1 + place % 3), 1000 * step + 100 * group + place)
    for part in (part for parts in ranks for part in parts):
        gradient = wholes[part.group][part.place].grad
        assert gradient is not None
        part.tensor.grad = part.owned.filled(part.owned.of_whole(gradient)).clone()


def _wholes(chosen: list[list[Representative]], scale: float) -> list[list[nn.Parameter]]:
    return [
        [member.whole(scale / (1 + place % 2), 100 * group + place) for place, member in enumerate(members)]
        for group, members in enumerate(chosen)
    ]


def _related(
    optimizer: torch.optim.Optimizer, chosen: list[list[Representative]], wholes: list[list[nn.Parameter]]
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """What stands for each parameter of the optimizer, and which one each whole is like: each by id."""
    empty = {id(each): torch.empty(0) for group in optimizer.param_groups for each in group["params"]}
    pairs = [
        (member.like, whole)
        for members, own in zip(chosen, wholes, strict=True)
        for member, whole in zip(members, own, strict=True)
    ]
    return empty | {id(like): whole for like, whole in pairs}, {id(whole): like for like, whole in pairs}


def _pieces(wholes: list[list[nn.Parameter]]) -> list[list[_Part]]:
    """What each rank would own with OwnsPieces: a cut lies at a multiple of BLOCK, and a rank may own nothing."""
    ranks: list[list[_Part]] = [[] for _ in range(_RANKS)]
    for group, place, whole in _numbered(wholes):
        flat = in_memory_order(whole.detach(), whole)
        blocks = -(-whole.numel() // BLOCK)
        cut = min(BLOCK * max(1, blocks // 3), whole.numel())
        for number, (start, stop) in enumerate([(0, cut), (cut, whole.numel())]):
            if start < stop:
                tensor = nn.Parameter(flat[start:stop].clone())
                part = _Part(group, place, Owned("", whole, start, stop, tensor))
                ranks[(group + place + number) % _RANKS].append(part)
    return ranks


def _rows(wholes: list[list[nn.Parameter]]) -> list[list[_Part]]:
    """What each rank would own with OwnsRows, which cuts between rows; nothing where that is refused."""
    every = list(_numbered(wholes))
    if not all(whole.dim() and whole.is_contiguous() for *_, whole in every):
        return []
    ranks: list[list[_Part]] = []
    for rank in range(_RANKS):
        parts = []
        for group, place, whole in every:
            count = -(-whole.shape[0] // _RANKS)
            local = whole.detach()[count * rank : count * (rank + 1)].clone().view(-1)
            parts.append(_Part(group, place, Rows("", whole, local, rank, _RANKS)))
        ranks.append(parts)
    return ranks


def _numbered(wholes: list[list[nn.Parameter]]) -> Iterable[tuple[int, int, nn.Parameter]]:
    return ((group, place, whole) for group, members in enumerate(wholes) for place, whole in enumerate(members))


def _difference(
    whole: Trial,
    states: Mapping[int, Mapping[str, Any]],
    trial: Trial,
    wholes: list[list[nn.Parameter]],
    parts: Sequence[_Part],
) -> str | None:
    """What has other bits in a rank's trial than in that of the whole; None where nothing has.

    `states`: what the whole's optimizer keeps of each parameter, by the parameter's id.
    """
    for part in parts:
        entire, owned, tensor = wholes[part.group][part.place], part.owned, part.tensor
        shape = list(entire.shape)
        if not same_values(owned.of_whole(entire.detach()), tensor.detach()[owned.inside]):
            return f"a weight of shape {shape} has other bits"
        theirs, here = states[id(entire)], trial.state_of(tensor)
        if not (here or tensor.numel()):
            continue
        for name in sorted(theirs.keys() | here.keys()):
            value: Any = theirs.get(name)
            cut: Any = here.get(name)
            both = isinstance(value, Tensor) and isinstance(cut, Tensor)
            if both and (value.shape, cut.shape) == (entire.shape, tensor.shape):
                value, cut = owned.of_whole(value), cut[owned.inside]
            if not same_values(value, cut):
                return f"{name} of a weight of shape {shape} is another"
    for number, (options, its_own) in enumerate(zip(whole.groups, trial.groups, strict=True)):
        for name in sorted((options.keys() | its_own.keys()) - {"params"}):
            if not same_values(options.get(name), its_own.get(name)):
                return f"{name} of parameter group {number} is another"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device | None)


def same_values(one: Any, other: Any) -> bool:
    """Whether two values have the same bits; of a kind that cannot be compared, whether they are of one kind."""
    if type(one) is not type(other):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and same_values(one.detach(), other.detach())
    if isinstance(one, Tensor):
        return same_bits(one, other)
    if _is_number(one):
        return repr(one) == repr(other)  # since NaN equals nothing
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_values(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_values, one, other))
    return True


def _raise_rate(group: dict[str, Any], least: float) -> None:
    """Let a group have a rate above 0: its own, that with which its schedule began, or `least`."""
    rate = group.get("lr")
    if not isinstance(rate, Tensor) and (isinstance(rate, bool) or not isinstance(rate, int | float)):
        return
    wanted = max(_number(rate), _number(group.get("initial_lr")), least)
    group["lr"] = torch.full_like(rate, wanted) if isinstance(rate, Tensor) else wanted


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float | Tensor) else 0.0


def _refusal(what: str) -> UserError:
    return UserError(f"{what}; {_ADVICE}")


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
