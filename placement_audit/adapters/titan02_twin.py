"""torchtitan 0.2.x: the same architecture made smaller, where measuring the job's own would not fit in memory.

Fewer layers and smaller widths. Numbers of heads stay as they are, and whatever the mesh divided evenly it
still does: the placements are those of the large model.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from placement_audit.adapters import titan02_device
from placement_audit.adapters.degrees import Degrees
from placement_audit.config import RankEnv
from placement_audit.errors import NotMeasurable

Shapes = dict[str, tuple[int, ...]]
"""Global shape of each parameter, by FQN."""

_SHARE = 0.5
"""Of the free memory that measuring may take."""

_COPIES = 7
"""Of the parameters, while updates are compared: the value, its gradient, a copy of each, two states of the
optimizer, and one for temporaries. The same on one device."""

_LAYERS = 2
"""One would hide what happens between layers."""

_HEAD_DIMS = (16, 8, 4, 2, 32, 64, 128)
"""In the order they are tried: small first, the large ones for meshes that do not divide small ones."""

_WIDE = 1024
"""A dim above it is tried last: twice the width takes four times as long, a minute on two cores, to no end."""

_WIDTHS = ("hidden_dim", "inter_dim", "moe_inter_dim")
"""Feed-forward widths, in models whose args have them; scaled as dim is."""

_WORDS = {
    "n_layers": "{} of {} layers",
    "n_dense_layers": "{} of {} dense ones",
    "vocab_size": "vocabulary {} of {}",
}
"""Of what is smaller; a field that is not here has its own name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """What to build instead of the job's own model.

    Attributes:
        args: model args, the same object where nothing had to change.
        training: keys of the job's `[training]` to set, with their values.
        words: what is run, for the report; "" for the job's own model.
        notes: the same with its reason, a whole sentence; empty for the job's own model.
    """

    args: Any
    training: dict[str, int] = dataclasses.field(default_factory=dict)
    words: str = ""
    notes: tuple[str, ...] = ()


def budget(rank_env: RankEnv, device_type: str) -> tuple[int, int]:
    """Memory for a measurement, alike on every rank; collective.

    Args:
        rank_env: this process's place.
        device_type: "cpu" or "cuda".

    Returns:
        Bytes that measuring may take: of the machine with the least on CPU, of a GPU on CUDA; and how many
        ranks share them.
    """
    device = torch.device("cpu")
    free = titan02_device._available_memory()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", rank_env.world_size))
    if device_type == "cuda":
        device = torch.device("cuda", rank_env.local_rank)
        free, ranks = torch.cuda.mem_get_info(device)[0], 1
    # Each rank reads a number of its own, and all of them must build the same model.
    least = torch.tensor([int(free * _SHARE), -ranks], dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    bytes_, negative_ranks = least.tolist()
    return bytes_, -negative_ranks


def shapes_of(job: Any, spec: Any, args: Any) -> Shapes:
    """The model's parameters; from the meta device, in well under a second for hundreds of layers.

    Args:
        job: torchtitan's JobConfig.
        spec: the model's train spec.
        args: the model's args; not changed.
    """
    args = copy.deepcopy(args)
    args.update_from_config(job)
    with torch.device("meta"):
        model = spec.model_cls(args)
    return {fqn: tuple(p.shape) for fqn, p in model.named_parameters()}


def twin(
    job: Any,
    args: Any,
    degrees: Degrees,
    *,
    shapes: Callable[[Any], Shapes],
    budget_bytes: int,
    local_ranks: int,
) -> Twin:
    """Make the model smaller if measuring it takes more memory than there is.

    Args:
        job: torchtitan's JobConfig; not changed.
        args: the model's args; not changed.
        degrees: resolved.
        shapes: makes the parameters' shapes of some args.
        budget_bytes: see `budget`.
        local_ranks: see `budget`.

    Raises:
        NotMeasurable: it does not fit, and no smaller copy of it does.
    """
    own = shapes(args)
    needed = _needed(own, args, degrees, local_ranks, job.training.local_batch_size, job.training.seq_len)
    if needed <= budget_bytes:
        return Twin(args=args)
    seq_len, batch = _seq_len(job.training.seq_len, degrees), min(job.training.local_batch_size, 2)
    least = needed
    for smaller in _smaller(args, degrees):
        theirs = shapes(smaller)
        if not _as_even(theirs, own, degrees):
            continue
        takes = _needed(theirs, smaller, degrees, local_ranks, batch, seq_len)
        least = min(least, takes)
        if takes <= budget_bytes:
            words = _words(job, args, smaller, batch, seq_len)
            note = (
                f"measuring {job.model.name} {job.model.flavor} itself takes about {_gib(needed)} of memory "
                f"where {_gib(budget_bytes)}, half of what is free, are there for it: the ranks ran {words}; "
                "the verdicts are on its parameters."
            )
            training = {"seq_len": seq_len, "local_batch_size": batch}
            return Twin(args=smaller, training=training, words=words, notes=(note,))
    also = f", and {_gib(least)} made as small as its args allow" if least < needed else ""
    raise NotMeasurable(
        f"not measured: {job.model.name} {job.model.flavor} takes about {_gib(needed)} of memory to be "
        f"measured{also}; {_gib(budget_bytes)}, half of what is free, are there for it. Measure a smaller "
        "flavor (-- --model.flavor NAME), or trace it alone, without ranks."
    )


def _needed(shapes: Shapes, args: Any, degrees: Degrees, local_ranks: int, batch: int, seq_len: int) -> int:
    """Bytes that measuring takes on a machine with ``local_ranks`` ranks, rank 0 one of them; an estimate."""
    sizes = [math.prod(s) for s in shapes.values()]
    whole, largest = sum(sizes), max(sizes, default=0)
    # What a layer keeps for backward is about 32 tensors as wide as dim; the loss, four as wide as the vocabulary.
    wide = 32 * getattr(args, "dim", 0) * getattr(args, "n_layers", 0) + 4 * args.vocab_size
    activations = batch * seq_len * wide
    # SimpleFSDP may keep gathered parameters; comparing holds a few whole tensors, in float64 some of them.
    rank = (
        _COPIES * whole / (degrees.tp * _fsdp(degrees))
        + whole / degrees.tp
        + 6 * largest
        + activations / (degrees.tp * degrees.cp)
    )
    return 4 * int(local_ranks * rank + _COPIES * whole + activations)


def _smaller(args: Any, degrees: Degrees) -> Iterator[Any]:
    """Smaller copies of model args, the one to prefer first; nothing for args without known fields."""
    if not dataclasses.is_dataclass(args):
        return
    have: dict[str, int] = {
        f.name: value
        for f in dataclasses.fields(args)
        if f.init and type(value := getattr(args, f.name)) is int and value > 0
    }
    fixed = {}
    if "n_layers" in have:
        fixed["n_layers"] = min(_LAYERS, have["n_layers"])
    if "n_dense_layers" in have:
        fixed["n_dense_layers"] = 1
    if "vocab_size" in have:
        unit = math.lcm(128 * degrees.tp, *_dividing(have["vocab_size"], degrees))
        fixed["vocab_size"] = min(unit, have["vocab_size"])
    widths = list(_widths(have, degrees))
    for width, multiple in itertools.product(widths, _multiples(have, degrees)):
        changes = {k: v for k, v in (fixed | width | multiple).items() if v != have[k]}
        if changes:
            yield dataclasses.replace(args, **changes)


def _widths(have: dict[str, int], degrees: Degrees) -> Iterator[dict[str, int]]:
    """Head dims, and what is scaled with them."""
    if not ("dim" in have and "n_heads" in have):
        yield {}
        return
    own = have.get("head_dim") or have["dim"] // have["n_heads"]
    smaller = [h for h in _HEAD_DIMS if h < own]
    smaller.sort(key=lambda h: have["dim"] * h // own > _WIDE)
    for head_dim in (*smaller, own):
        scaled = {"dim": have["dim"] * head_dim // own}
        if "head_dim" in have:
            scaled["head_dim"] = head_dim
        for name in _WIDTHS:
            if name in have:
                unit = math.lcm(*_dividing(have[name], degrees))
                scaled[name] = -(-have[name] * head_dim // (own * unit)) * unit
        yield scaled


def _multiples(have: dict[str, int], degrees: Degrees) -> list[dict[str, int]]:
    """What feed-forward widths are rounded up to, in models that compute them from dim."""
    if "multiple_of" not in have:
        return [{}]
    base = min(have["multiple_of"], 256)
    units = (1, degrees.tp, degrees.tp * _fsdp(degrees))
    return [{"multiple_of": m} for m in dict.fromkeys(math.lcm(base, u) for u in units)]


def _fsdp(degrees: Degrees) -> int:
    """Ranks that share a parameter; context-parallel ones too."""
    return degrees.dp_shard * degrees.cp


def _dividing(size: int, degrees: Degrees) -> list[int]:
    """What the mesh divides a size by, where it does so evenly."""
    fsdp = _fsdp(degrees)
    return [d for d in (degrees.tp, fsdp, degrees.tp * fsdp) if size % d == 0]


def _as_even(shapes: Shapes, own: Shapes, degrees: Degrees) -> bool:
    """Whether every dim is divided evenly by what divided it evenly in the job's own model."""
    return all(
        fqn in own
        and len(own[fqn]) == len(shape)
        and set(_dividing(old, degrees)) <= set(_dividing(new, degrees))
        for fqn, shape in shapes.items()
        for new, old in zip(shape, own.get(fqn, shape), strict=False)
    )


def _seq_len(own: int, degrees: Degrees) -> int:
    """At least 64, and a multiple of what `titan02_checks.check_sizes` asks for."""
    unit = degrees.tp * 2 * degrees.cp
    return min(own, -(-64 // unit) * unit)


def _words(job: Any, own: Any, smaller: Any, batch: int, seq_len: int) -> str:
    """What differs, in words."""
    differing = [
        (f.name, getattr(smaller, f.name), getattr(own, f.name))
        for f in dataclasses.fields(own)
        if getattr(smaller, f.name) != getattr(own, f.name)
    ]
    differing.sort(key=lambda change: change[0] != "n_layers")
    differing += [
        (name, new, old)
        for name, new, old in (
            ("seq_len", seq_len, job.training.seq_len),
            ("local_batch_size", batch, job.training.local_batch_size),
        )
        if new != old
    ]
    parts = [_WORDS.get(name, name + " {} of {}").format(new, old) for name, new, old in differing]
    return f"the same architecture with {', '.join(parts)}"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
