"""PA1xx: what a call that crosses between DTensor and plain tensors declares."""

from __future__ import annotations

from placement_audit.rules.rule import Link, Rule
from placement_audit.verdicts import Severity

MISLABELLED_GRADIENT = Rule(
    id="PA101",
    name="mislabelled-gradient",
    severity=Severity.WARNING,
    summary="A boundary labels a gradient falsely, and a later false label makes up for it.",
    why="""\
The parameter's gradient ends right, so nothing is wrong today. But two calls, often in two files,
are right only together: mending either one alone breaks the gradient, and so does moving the module
out of its wrapper or giving it another one.

Known example: a norm module that calls `weight.to_local()` on sequence-sharded activations (its
gradient is one term a tp rank, labelled Replicate), inside a SimpleFSDP whose first `to_local()`
declares Partial on tp. The second label undoes the first; the full gradient is right to 1e-7.""",
    how_judged="""\
At the backward of `to_local` the label of the gradient is compared with what the gradient really is
along the mesh dim: Replicate is false of one term a rank, Partial is false of a gradient that is
already complete. It is reported here only where no parameter's gradient comes out wrong; otherwise
the parameter is reported (PA201, PA202, PA203) and this call is named as its cause.""",
    bad="""\
# norm module: labels each tp rank's own term Replicate
y = rms_norm(x.to_local(), weight.to_local())
# wrapper around it: declares Partial what arrives labelled Replicate
local = param.to_local(grad_placements=(Shard(0), Partial()))""",
    good="""\
# norm module: says what the gradient is
y = rms_norm(x.to_local(), weight.to_local(grad_placements=[Partial()]))
# wrapper: from_local's backward has summed it by now, so no grad_placements
local = param.to_local()""",
    fix="Make both labels true in one change. A change to either alone turns the warning into an error.",
    links=(Link(ref="pytorch/torchtitan#2532", about="the wrapper's half of the example"),),
)

RANKS_DISAGREE = Rule(
    id="PA102",
    name="ranks-disagree",
    severity=Severity.ERROR,
    summary="from_local declares Replicate a value that differs between the ranks of the mesh dim.",
    why="""\
`DTensor.from_local` believes its caller: with `run_check=False`, the default, nothing is compared.
From then on every rank computes with its own value and calls it the same tensor. No collective is
missing in any trace of communication, because a Replicate tensor needs none, and gradients inherit
the fault with healthy-looking placements.

Measured on two ranks whose replicated norm weight was initialised per rank: 9 % error in its own
gradient, 14 % in the weight next to it, and no difference between the ranks' gradients.""",
    how_judged="""\
The value varies along the mesh dim: it was computed from tensors that differ between its ranks (a
shard, a rank's own batch, a term of a sum) and no collective over the mesh dim came since.

Values are not compared, so a value that varies by its dataflow and happens to be equal is reported.
A value that differs without a tensor to show it (initialised with the rank as seed, indexed with the
rank) needs measured evidence.""",
    bad="""\
rows = x.to_local()                                   # x is Shard(0) on tp
y = DTensor.from_local(rows, tp_mesh, [Replicate()])  # each rank has other rows""",
    good="""\
y = DTensor.from_local(rows, tp_mesh, [Shard(0)])
# or, where every rank needs the whole:
y = x.redistribute(placements=[Replicate()])""",
    fix="""\
Declare what the value is (`Shard`, or `Partial` for a term of a sum), or make it what is declared: an
all-gather or all-reduce before the call. `run_check=True` broadcasts the first rank's value; that
hides the difference and has no backward of its own.""",
    links=(
        Link(
            ref="NVIDIA-NeMo/Automodel#3822", about="replicated parameters initialised differently per rank"
        ),
    ),
)

INVARIANT_DECLARED_PARTIAL = Rule(
    id="PA103",
    name="invariant-declared-partial",
    severity=Severity.WARNING,
    summary="from_local declares Partial a value that is already equal on all ranks of the mesh dim.",
    why="""\
Partial(sum) says that the truth is the sum over the ranks. A value that every rank holds in full is
then counted once per rank: a bias becomes tp times too large, in the forward and in the backward.
It is right only where the value was divided by the mesh dim's size before.""",
    how_judged="""\
Nothing that varies along the mesh dim went into the value. Whether it was divided before is no
question of placements: only values decide, so this is a suspicion, and parameters upstream of it
are reported as not judged where their verdict hangs on it.

The commoner form of the fault leaves no mark at all: a replicated bias added to a term of a sum
gives a value that varies, as a term should. Only values show it.""",
    bad="""\
# every rank holds the whole bias: summed, it counts tp times
b = DTensor.from_local(bias.to_local(), tp_mesh, [Partial()])
y = (partial_out + b).redistribute(placements=[Replicate()])""",
    good="""\
# add it once, after the sum
y = partial_out.redistribute(placements=[Replicate()]) + bias

# or divide it, and say that its gradient is then one term a rank
local = bias.to_local(grad_placements=[Partial()]) / tp_mesh.size()
b = DTensor.from_local(local, tp_mesh, [Partial()])""",
    fix="""\
Add the value on one side of the reduction only. If it is divided instead, remember that the division
is differentiated too: without `grad_placements=[Partial()]` on its `to_local` the gradient comes out
tp times too small.""",
    links=(
        Link(ref="pytorch/torchtitan#4245", about="expert bias added tp times"),
        Link(ref="pytorch/torchtitan#4332", about="the division that is differentiated too"),
        Link(ref="pytorch/torchtitan#2106", about="a gradient tp times too large"),
        Link(ref="pytorch/pytorch#110898", about="DTensor's own row-parallel bias, which is right"),
    ),
)

WRONG_GRAD_PLACEMENT = Rule(
    id="PA104",
    name="wrong-grad-placement",
    severity=Severity.ERROR,
    summary="grad_placements that cannot fit the forward placement.",
    why="""\
The local gradient has the shape of the local value. Declared as a shard along another tensor dim, or
as a shard of a tensor that was replicated, its parts are put together in the wrong place: the shapes
may still agree, for a square weight or an even split, and nothing raises.""",
    how_judged="""\
The declared grad placement is compared with the forward placement on the same mesh dim. A shard's
gradient is the same shard. A Replicate or Partial tensor's gradient is Replicate or Partial, and which
of the two is judged by what arrives (PA101, PA201, PA202), not here.""",
    bad="""\
# w is Shard(0) on tp
local = w.to_local(grad_placements=[Shard(1)])""",
    good="""\
local = w.to_local()   # the default: the gradient of a shard is the same shard""",
    fix="Give the forward placement wherever the tensor is a shard, or leave grad_placements out.",
)

REDUCED_TWICE_IN_FORWARD = Rule(
    id="PA105",
    name="reduced-twice-in-forward",
    severity=Severity.NOTE,
    summary="A sum over ranks of a value that is already equal on all of them.",
    why="""\
The result is the value times the number of ranks. That is what counting ranks looks like, and also
what a second reduction of the same loss or norm looks like: a norm whose replicated gradients count
once per rank was 21 % too large on two ranks.""",
    how_judged="""\
A forward all-reduce or reduce-scatter with sum, over a mesh dim along which nothing that varies went
into the value. It is a note, because the factor may be wanted or be divided out later.""",
    bad="""\
loss = loss_sum.full_tensor()                 # complete on every tp rank
dist.all_reduce(loss, group=tp_group)         # tp times the loss""",
    good="""\
loss = loss_sum.full_tensor()""",
    fix="Drop the collective, or divide by the number of ranks. Leave it where ranks are being counted.",
    links=(Link(ref="NVIDIA-NeMo/RL#3788", about="replicated gradients counted once per rank in a norm"),),
)

BOUNDARY_RULES = (
    MISLABELLED_GRADIENT,
    RANKS_DISAGREE,
    INVARIANT_DECLARED_PARTIAL,
    WRONG_GRAD_PLACEMENT,
    REDUCED_TWICE_IN_FORWARD,
)
