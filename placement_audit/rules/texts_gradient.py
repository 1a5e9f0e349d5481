"""PA2xx: what the gradient of a parameter turned out to be."""

from __future__ import annotations

from placement_audit.rules.rule import Link, Rule
from placement_audit.verdicts import Severity

LOST_REDUCTION = Rule(
    id="PA201",
    name="lost-reduction",
    severity=Severity.ERROR,
    summary="Each rank holds its own term of the gradient and nothing sums them.",
    why="""\
The label says Replicate, so nobody downstream reduces. Each rank updates the parameter with its own
term; replicas drift apart from the first step. The forward is right, the loss falls.

Measured at tp 2: a norm weight's gradient that lost its sum has a relative error of 0.65 to 0.8. The
router weight of torchtitan's MoE models under tp (releases 0.2.0 to 0.2.2) is off by 0.73 to 0.83.""",
    how_judged="""\
The gradient's actual state is followed through the backward: it varies along the mesh dim, as a
term of a sum does, and arrives at `.grad` labelled Replicate, or labelled as a shard that was cut
from one rank's term. The first call in backward order that labelled it falsely is the cause; where
no call did (a plain tensor that no DTensor ever covered on that mesh dim), the place of use is named.

A bare `to_local()` on a replicated weight is no evidence by itself. In stock SimpleFSDP it is right:
the backward of `DTensor.from_local` has turned Partial into Replicate, one all-reduce, before the
gradient gets there. The gradient's way is shown by `placement-audit explain PARAMETER --config FILE`.""",
    bad="""\
# x is sharded along the sequence on tp, weight is Replicate on tp:
# each tp rank's gradient of weight sees its own tokens only
y = rms_norm(x.to_local(), weight.to_local())""",
    good="""\
y = rms_norm(x.to_local(), weight.to_local(grad_placements=[Partial()]))

# or stay in DTensor, which knows
y = rms_norm(x, weight)""",
    fix="""\
Declare Partial() on the mesh dim, at the call that is named as the cause and at no other: `to_local`
takes `grad_placements`, `local_map` takes `in_grad_placements`. For a plain parameter, make it a
DTensor that is Replicate on the mesh dim, or all-reduce its gradient there. Audit again: one Partial
too many is PA202.""",
    links=(
        Link(ref="pytorch/torchtitan#2217", about="where is the all-reduce of the RMSNorm gradients?"),
        Link(ref="pytorch/torchtitan#2387", about="MoE router under tp; mended by pytorch/torchtitan#2416"),
        Link(ref="pytorch/torchtitan#4054", about="local_map without in_grad_placements"),
        Link(
            ref="meta-pytorch/autoparallel#515", about="local_map copying forward placements to the backward"
        ),
        Link(ref="pytorch/torchtitan#1878", about="no grad_placements around grouped matmuls"),
        Link(
            ref="NVIDIA/Megatron-LM#1446", about="norm weights in a sequence-parallel region, plain tensors"
        ),
    ),
)

DOUBLE_REDUCTION = Rule(
    id="PA202",
    name="double-reduction",
    severity=Severity.ERROR,
    summary="A gradient that is already complete is summed over the mesh dim once more.",
    why="""\
The parameter's gradient is as many times too large as the mesh dim has ranks. AdamW hides it, being
nearly blind to scale; clipping does not, for the total norm is wrong too, and SGD takes the long step.

Measured: `x.to_local(grad_placements=(Shard(0), Partial()))` in SimpleFSDP, with `from_local` as it
was, gives every norm weight exactly 2 x its gradient at tp 2, with the same `.grad` placements as
the right, two-sided change.""",
    how_judged="""\
The gradient is equal on all ranks of the mesh dim and complete, and is labelled Partial: at `.grad`,
whoever reads it sums it again; on the way, a redistribute did. The call that declared Partial is the
cause; where the first sum was made by another call of the same way, that one is named beside it.

A gradient to which one part came complete and another as one term a rank is reported here too, where
its label is Partial: summing counts the first part once per rank, and no label would be right.""",
    bad="""\
local = param.to_local(grad_placements=(Shard(0), Partial()))    # "to be summed over tp"
...
out = DTensor.from_local(whole, tp_mesh, [Replicate()])          # its backward has summed it already""",
    good="""\
# neither: from_local's backward sums, in the gradient's dtype
local = param.to_local()
out = DTensor.from_local(whole, tp_mesh, [Replicate()])

# or both: whoever reads .grad sums (PA401); from_local(grad_placements=...) is not in torch 2.10
local = param.to_local(grad_placements=(Shard(0), Partial()))
out = DTensor.from_local(whole, tp_mesh, [Replicate()], grad_placements=[Partial()])""",
    fix="""\
Take Partial out at the named call, or declare it at both ends. On torch 2.10 there is a version of
this fault in torch itself: `to_local()` of a Partial tensor labels its gradient Partial although it
is complete; give `grad_placements=[Replicate()]` there.""",
    links=(
        Link(ref="pytorch/torchtitan#2532", about="the one-sided change, closed unmerged"),
        Link(ref="pytorch/pytorch#172932", about="to_local and from_local of a Partial tensor"),
        Link(ref="pytorch/pytorch#173454", about="the fix of that in torch"),
        Link(
            ref="pytorch/pytorch#175867",
            about="from_local(Replicate) whose backward reduces; grad_placements",
        ),
    ),
)

WRONG_SCALE = Rule(
    id="PA203",
    name="wrong-scale",
    severity=Severity.ERROR,
    summary="The gradient is a wrong multiple of the true one.",
    why="""\
The direction is right and the size is not, by a factor such as 1/tp. Loss and placements look right;
so does the parameter under AdamW. Under clipping or SGD it learns at another rate than the rest.

Measured at tp 2: SimpleFSDP's wrapper with Partial at both ends, around a norm module with a bare
`weight.to_local()`, gives half the gradient: its Replicate label is turned into Partial by dividing.""",
    how_judged="""\
A scale travels with the gradient: a sum of a complete gradient multiplies it by the mesh dim's size,
a Replicate label turned into Partial divides one rank's term by it, an average divides. At `.grad`
the scale should be 1, or what most parameters have on a data-parallel mesh dim: sum or average there
is the loss's choice and no fault; one parameter that differs from the rest is.

A wrong divisor that all parameters share, and a division in the forward that autograd differentiates
too, leave no mark in placements: only values show them.""",
    bad="""\
gate = w.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
# ... while every other parameter of the model declares
rest = w.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("sum")])""",
    good="""\
gate = w.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("sum")])""",
    fix="""\
Follow the named calls in their order and find the one that divides what was not summed, or averages
what the loss has already normalised.""",
    links=(
        Link(ref="pytorch/torchtitan#4332", about="bias / tp, differentiated too"),
        Link(ref="pytorch/torchtitan#2318", about="averaged over data-parallel ranks twice"),
        Link(ref="pytorch/torchtitan#2206", about="when the loss went from averages to sum / global tokens"),
    ),
)

WRONG_PLACEMENT = Rule(
    id="PA204",
    name="wrong-placement",
    severity=Severity.ERROR,
    summary="The placement of .grad cannot be read as the parameter's.",
    why="""\
Each rank's part of the gradient is taken for another part of the parameter. Shapes agree for square weights and even
splits, so nothing raises.""",
    how_judged="""\
On its way a gradient was labelled a shard that its tensor was not (PA104 at the same call), it is a plain shard where
the parameter is a strided one, or an all-reduce by hand added up the gradients of different shards, which nobody can
take apart again. A true label that is only another one than the parameter's is not meant here: Partial, or a shard
along another tensor dim, which DTensor's own ops leave and redistribute (PA401). Nor is a Replicate gradient of
a sharded parameter: that is complete on every rank, and the report says so.""",
    bad="""\
# w is Shard(1) on tp
y = x @ w.to_local(grad_placements=[Shard(0)])""",
    good="""\
y = x @ w.to_local(grad_placements=[Shard(1)])""",
    fix="Declare at the call that is named what the local tensor is.",
)

RANKS_DISAGREE_ON_PARAMETER = Rule(
    id="PA205",
    name="ranks-disagree-on-parameter",
    severity=Severity.ERROR,
    summary=".grad is labelled Replicate, and the parameter's value was falsely declared replicated.",
    why="""\
Every rank computes the gradient of its own version of the parameter and calls it the same tensor. No
reduction mends that: the ranks train different models that share a name.""",
    how_judged="""\
A `from_local` on the parameter's own way declares Replicate on a mesh dim along which its value
varies (PA102), and the gradient's ranks differ there.""",
    bad="""\
part = w.to_local()                                   # w is Shard(0) on tp
w_tp = DTensor.from_local(part, tp_mesh, [Replicate()])""",
    good="""\
w_tp = DTensor.from_local(part, tp_mesh, [Shard(0)])""",
    fix="Mend the from_local that is named (PA102 there); the gradient follows.",
    links=(Link(ref="NVIDIA-NeMo/Automodel#3822", about="replicated parameters that differ between ranks"),),
)

NO_GRADIENT = Rule(
    id="PA206",
    name="no-gradient",
    severity=Severity.ERROR,
    summary="requires_grad is True, and backward left no gradient.",
    why="""\
The optimizer passes over it: the parameter keeps its first value. Wanted for a part of the model that
this batch does not use; a fault where the way to the loss was cut, such as a router whose
probabilities were gathered with `dist.all_gather`, which autograd does not see.""",
    how_judged="""\
`.grad` is None after one forward and backward. The report says whether the forward used the
parameter. Where another term of the loss still reaches it, a gradient exists and only values show
that a part is missing.""",
    bad="""\
parts = [torch.empty_like(scores) for _ in range(ep)]
dist.all_gather(parts, scores.detach(), group=ep_group)
scores = torch.cat(parts)                 # right, and cut off from the router""",
    good="""\
whole = DTensor.from_local(scores, ep_mesh, [Shard(0)])
# each rank routes its own tokens with it: its gradient is one term a rank
scores = whole.full_tensor(grad_placements=[Partial()])""",
    fix="""\
Look for detach, no_grad, or a collective that autograd does not see, between the parameter and the
loss. Audit again: the call that takes its place has a gradient to declare (PA201).""",
    links=(Link(ref="NVIDIA-NeMo/Automodel#2995", about="router probabilities gathered outside autograd"),),
)

GRADIENT_RULES = (
    LOST_REDUCTION,
    DOUBLE_REDUCTION,
    WRONG_SCALE,
    WRONG_PLACEMENT,
    RANKS_DISAGREE_ON_PARAMETER,
    NO_GRADIENT,
)
