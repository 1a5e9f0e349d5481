"""A SimpleFSDP of our own: what the mend looks for, with other names, and nothing else that it could go by."""

SOURCE = '''\
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

STORE: dict[tuple[type, frozenset], type] = {}


def wrap(target, names, gatherer):
    """Gives target a class."""
    made = {name: property(lambda self, key=name: gatherer(self._parameters[key])) for name in names}
    entry = (target.__class__, frozenset(names))
    if entry in STORE:
        cls = STORE[entry]
    else:
        cls = type("Wrapped", (target.__class__,), made)
        STORE[entry] = cls
    target.__class__ = cls


class Gatherer:
    def __init__(self, mesh, layout, param_dtype, sum_dtype):
        self.mesh = mesh
        self.layout = layout
        self.full = [Replicate()]
        self.sums = [Partial()]
        self.param_dtype = param_dtype
        self.sum_dtype = sum_dtype

    def replicate_compute(self, weight):
        # what to do is up to the mesh
        others = weight._spec.mesh.ndim - self.mesh.ndim
        if others > 0:
            data_mesh = self.mesh

            # leave
            a = weight.to_local()
            b = DTensor.from_local(a, data_mesh, self.layout)
            c = b.redistribute(placements=self.full, forward_dtype=self.param_dtype, backward_dtype=self.sum_dtype)
            d = c.to_local(grad_placements=self.sums)
            rest = tuple(weight._spec.placements[-others:])
            labels = tuple(weight._spec.mesh.mesh_dim_names[-others:])
            rest_mesh = weight._spec.mesh[labels]
            out = DTensor.from_local(d, rest_mesh, rest)
        else:
            out = weight.redistribute(placements=self.full).to_local(grad_placements=self.sums)
        return out


def parallel(model, mesh):
    for module in model:
        wrap(module, ["w"], Gatherer(mesh, (Replicate(),), None, None))
'''

LEAVE = "            a = weight.to_local()\n"
ENTER = "            out = DTensor.from_local(d, rest_mesh, rest)\n"
PARTIALS = "tuple(Partial() if p.is_replicate() else p for p in weight._spec.placements[-others:])"
DATA = "tuple(weight._spec.placements[:-others])"

FIRST_END = {
    "inline": (LEAVE, f"            a = weight.to_local(grad_placements={DATA} + {PARTIALS})\n"),
    "names": (
        LEAVE,
        f"            grads = {PARTIALS}\n            grads = (*weight.placements[:-others], *grads)\n"
        "            a = weight.to_local(grad_placements=grads)\n",
    ),
    "loop": (
        LEAVE,
        "            grads = list(weight.placements[:-others])\n            for p in weight.placements[-others:]:\n"
        "                grads.append(Partial() if p.is_replicate() else p)\n"
        "            a = weight.to_local(grad_placements=tuple(grads))\n",
    ),
    "list": (
        LEAVE,
        "            a = weight.to_local(grad_placements=[*weight.placements[:-1], Partial()])\n",
    ),
    "attribute": (
        LEAVE,
        "            a = weight.to_local(grad_placements=[*weight.placements[:-1], *self.sums])\n",
    ),
}
"""PR 2532's mend of the first end alone, as different people may spell it: (old, new)."""

LAST_END = (ENTER, f"            out = DTensor.from_local(d, rest_mesh, rest, grad_placements={PARTIALS})\n")


def edited(*edits: tuple[str, str], source: str = SOURCE) -> str:
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source
