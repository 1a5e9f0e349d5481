"""PA4xx: who reads the gradients; PA9xx: faults of placement-audit itself."""

from __future__ import annotations

from placement_audit.rules.rule import Link, Rule
from placement_audit.verdicts import Severity

DEFERRED_REDUCTION = Rule(
    id="PA401",
    name="deferred-reduction",
    severity=Severity.NOTE,
    summary=".grad is left Partial, or another shard: right once whoever reads it has redistributed it.",
    why="""\
The sum over the mesh dim has not been made when backward returns; the label says so, and a reader
that minds labels makes it. Nothing is wrong yet, and there may be fewer collectives: declaring Partial
at both ends of SimpleFSDP's wrapper turned 8 all-reduces into 3. The same is true of a shard: a product
of a Replicate weight with a tensor that is Shard on another tensor dim leaves its gradient Shard.

Readers that were seen to reduce: `clip_grad_norm_` and the optimizers of torch 2.13. Readers that do
not: anything that takes `.grad.to_local()`, such as a hand-written optimizer (0.57 off after one
step), or a norm that sums squares of local parts (0.89 of the true norm).

On torch 2.10 in-place foreach ops on a Partial tensor silently do nothing: `clip_grad_norm_` returns
the right norm and leaves these gradients unclipped (norm weights scaled by 1.0000, the others by
0.0344), and foreach SGD with momentum is wrong from its second step. AdamW's first step hides it.""",
    how_judged="""\
The gradient is labelled Partial along the mesh dim and really is one term a rank, with the right
scale; or it is labelled a shard, by ops that mind labels, and the parameter is another or none. Where the
job's own clipping and optimizer were followed after the step, PA403 tells which of them did not mind it.""",
    bad="""\
# p.grad is Partial on tp: each rank applies its own term
for p in params:
    p.to_local().add_(p.grad.to_local(), alpha=-lr)""",
    good="""\
for p in params:
    grad = p.grad.redistribute(placements=p.placements)
    p.to_local().add_(grad.to_local(), alpha=-lr)""",
    fix="""\
Nothing, with torch 2.13's own clipping and optimizers. Before anything else reads it:
`p.grad = p.grad.redistribute(placements=p.placements)`.

Where the reduction runs decides its dtype: in `from_local`'s backward it is the gradient's own, and
not FSDP's reduce_dtype, which covers the data-parallel mesh dims only.""",
    links=(
        Link(
            ref="pytorch/torchtitan#2217", about="tp without data parallelism leaves norm gradients Partial"
        ),
        Link(ref="pytorch/pytorch#190626", about="reduce_dtype and the tp all-reduce"),
        Link(ref="pytorch/pytorch#159856", about="torch's own norm of a Partial tensor, mended"),
        Link(ref="NVIDIA-NeMo/RL#3788", about="a total norm taken over local parts"),
    ),
)

WRONG_UPDATE = Rule(
    id="PA402",
    name="wrong-update",
    severity=Severity.ERROR,
    needs="measured",
    measured_only=True,
    summary="The gradient is right, and the parameter is wrong after clipping and one optimizer step.",
    why="""\
Clipping, the optimizer and hooks read `.grad` after backward. A reader that takes the local part of a
gradient that is still Partial applies one rank's term; one that changes a Partial gradient in place may
do nothing at all (torch 2.10's foreach ops).""",
    how_judged="""\
Measured only: after one step with the job's own clipping and optimizer, and after one plain SGD step
with the same clipping, each parameter is compared with the same step on one device. AdamW's first step
is blind to the gradient's scale, hence SGD beside it. Not judged while any gradient is itself wrong:
clipping mixes them all.""",
    bad="""\
# p.grad is Partial on tp
update = momentum * buf + p.grad.to_local()""",
    good="""\
update = momentum * buf + p.grad.redistribute(placements=p.placements).to_local()""",
    fix="""\
Let the reader see the complete gradient: redistribute `.grad` to the parameter's placements before it,
or declare gradients so that none is left Partial.""",
    links=(Link(ref="pytorch/torchtitan#2217", about="norm gradients left Partial under tp alone"),),
)

REPLICAS_DRIFT = Rule(
    id="PA403",
    name="replicas-drift",
    severity=Severity.ERROR,
    needs="traced",
    summary="The gradient is right, and its readers update each replica of the parameter with another value.",
    why="""\
A replicated parameter stays replicated as long as every rank applies the same update. One rank's term
of a gradient that is left Partial, or a total norm that was taken over this rank's shards alone, is
another number on each rank. The replicas drift apart, a little more at each step, while the loss falls:
from then on the model is none that any one device could hold, and a checkpoint keeps one rank's.""",
    how_judged="""\
The job's own clipping and optimizer run once, after the step and traced like it; so does what runs
inside a watched step. A parameter that is Replicate along a mesh dim, and was written with a value that
varies along it, is reported at the line that wrote it. Where a gradient was complete when backward
returned and something made it each rank's own, that line is the cause. Not judged along a mesh dim
where any gradient is itself wrong, for clipping mixes them all; Python numbers (`.item()`) are not
followed.""",
    bad="""\
# p.grad is Partial on tp
p.to_local().sub_(lr * p.grad.to_local())

# the squares of this rank's shards, summed over no rank
norm = torch.stack([g.square().sum() for g in local_grads]).sum().sqrt()""",
    good="""\
p.to_local().sub_(lr * p.grad.redistribute(placements=p.placements).to_local())

squares = torch.stack([g.square().sum() for g in sharded_grads]).sum()
dist.all_reduce(squares, group=tp)""",
    fix="""\
Let readers see what is the same on all ranks: redistribute `.grad` to the parameter's placements,
reduce a norm over every mesh dim that shards are spread over (and count what is replicated there once).""",
    links=(
        Link(ref="pytorch/torchtitan#2217", about="norm gradients left Partial under tp alone"),
        Link(ref="NVIDIA-NeMo/RL#3788", about="a total norm taken over local parts"),
    ),
)

UPDATE_OF_A_PART = Rule(
    id="PA404",
    name="update-of-a-part",
    severity=Severity.WARNING,
    needs="traced",
    summary="An optimizer works on a part of a gradient with an op that needs the whole.",
    why="""\
Muon's matrix products, LAMB's and LARS's norms, a clipping by a parameter's own norm: taken of a shard they are
something else than the shard of what they are of the whole. The gradient is right, its placement too, and no rank
differs from another where it should not.

Measured on two ranks, Newton and Schulz's iteration on each rank's part instead of the matrix: the gradients
exact, the updates of two weights off by 65 and 73 %.""",
    how_judged="""\
The job's own optimizer is run once after the step. From the gradients on, placements are followed through plain
ops with torch's own sharding rules; here one of them would communicate, and what came of the op was written
into the parameter with no collective over the mesh dim between. A warning, for there are optimizers that are
meant to work block by block. Ops on DTensors do communicate, and are not meant.""",
    bad="""\
g = p.grad.to_local()                       # this rank's rows
p.to_local().add_(orthogonal(g), alpha=-lr)""",
    good="""\
g = p.grad.full_tensor()
update = distribute_tensor(orthogonal(g), p.device_mesh, p.placements)
p.to_local().add_(update.to_local(), alpha=-lr)""",
    fix="Give the op the whole gradient, or sum what it sums over the ranks.",
)

EVIDENCE_DISAGREES = Rule(
    id="PA901",
    name="evidence-disagrees",
    severity=Severity.ERROR,
    measured_only=True,
    summary="Traced and measured verdicts on a parameter differ: a fault of placement-audit itself.",
    why="""\
One of the two is wrong about this parameter, so neither can be relied on here. It is reported as an
error, and loudly, because a tool that hides such a difference is worth nothing.""",
    how_judged="""\
Where a run has both strengths of evidence, the verdicts on every parameter and mesh dim are compared.
What a trace cannot see (the report lists it) is no disagreement: a parameter that is measured wrong
and traced ok for one of those reasons is reported as measured.""",
    bad="""\
traced     ok                on tp
measured   lost reduction    on tp, relative error 0.71""",
    good="""\
traced     lost reduction    on tp
measured   lost reduction    on tp, relative error 0.71""",
    fix="""\
Please report it, with the JSON report (`--format json`): it holds the whole trace. Until then trust
the measured verdict: it compares values with a single-process reference.""",
)

READER_RULES = (DEFERRED_REDUCTION, WRONG_UPDATE, REPLICAS_DRIFT, UPDATE_OF_A_PART)
SELF_RULES = (EVIDENCE_DISAGREES,)
