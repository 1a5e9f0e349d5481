"""PA107 to PA111: what is said of values that one device would hardly have, and of a backward that it would."""

from __future__ import annotations

from placement_audit.rules.rule import Link, Rule
from placement_audit.verdicts import Severity

_FOLLOWED = """\
Placements are followed from `to_local` and from declared parameters through plain ops, with torch's own
sharding rules. Where a rule would communicate, or torch has none, the result is not
followed, and the report counts it."""

COUNTED_PER_RANK = Rule(
    id="PA107",
    name="counted-per-rank",
    severity=Severity.ERROR,
    summary="A complete value is added to each rank's term of a sum, and so counted once per rank.",
    why="""\
A row-parallel matmul leaves one term of the result on each rank. What is added to the term before the
reduction is summed as well: a replicated bias comes out as many times too large as there are ranks, and so does
a residual. Placements are right everywhere, gradients are summed where they must be, and the loss falls.

Measured on two ranks with the bias inside the row-parallel linear: gradients of all three parameters off by
63 to 78 %.""",
    how_judged=_FOLLOWED
    + """

Complete values are followed as sums of one another with numbers before them: divided by the number of ranks is
right wherever the division stands, also where it is hidden from autograd. It is an error where another rank was
traced too and adds the same; else a rank might add nothing, which one rank's trace cannot see, and it is a
warning. With measured evidence the loss decides. Over the batch's mesh dims only what is done to
gradients is judged: whether losses are summed or averaged is the job's own affair.""",
    bad="""\
out = F.linear(hidden, w_down_shard, bias)   # the full bias on every rank
dist.all_reduce(out, group=tp_group)""",
    good="""\
out = F.linear(hidden, w_down_shard)
dist.all_reduce(out, group=tp_group)
out = out + bias""",
    fix="Add it after the reduction, or on one rank only.",
    links=(
        Link(ref="pytorch/torchtitan#4245", about="a bias that was divided by a degree of 1"),
        Link(ref="huggingface/text-generation-inference#1036", about="a row-parallel bias on every rank"),
    ),
)

APPLIED_TO_A_TERM = Rule(
    id="PA108",
    name="applied-to-a-term",
    severity=Severity.WARNING,
    summary="An op that is not additive is applied to one rank's term of a sum.",
    why="""\
`relu(a) + relu(b)` is not `relu(a + b)`, and the squares of terms do not add up to the square of their sum. It is
what a reduction that was left out before an activation, or a norm of gradients that were not summed yet, looks
like.""",
    how_judged=_FOLLOWED
    + """

Here the rule wants the terms summed before the op, the op is not additive when it is tried on random numbers, and
a gradient flows through it, or it is one. It is a warning, also where the results are summed over the ranks then:
each rank's own mean and the squares of its distance from the whole's are what a variance is put together from.
With measured evidence it is told only where the loss is off (or an update, for what is done to gradients).""",
    bad="""\
y = F.linear(hidden, w_down_shard)      # one term a tp rank
y = F.gelu(y)
dist.all_reduce(y, group=tp_group)""",
    good="""\
y = F.linear(hidden, w_down_shard)
dist.all_reduce(y, group=tp_group)
y = F.gelu(y)""",
    fix="Reduce first.",
)

DECLARED_OTHERWISE = Rule(
    id="PA109",
    name="declared-otherwise",
    severity=Severity.WARNING,
    summary="from_local declares another placement than the value has by the ops that made it.",
    why="""\
`DTensor.from_local` believes its caller. A term of a sum declared Shard is never summed; a part declared Partial is
added to other parts; a shard of another tensor dim is put together the wrong way round.""",
    how_judged=_FOLLOWED
    + """

The placement that was followed to the call is set beside the one declared there; averages are left out. A value
that varies and is declared Replicate is PA102. With measured evidence it is told only where the loss is off.""",
    bad="""\
y = F.linear(hidden_shard, w_down_shard)               # one term a tp rank
y = DTensor.from_local(y, tp_mesh, [Shard(1)])""",
    good="""\
y = F.linear(hidden_shard, w_down_shard)
y = DTensor.from_local(y, tp_mesh, [Partial()]).redistribute(placements=[Shard(1)])""",
    fix="Declare what the value is, and redistribute.",
)

MEAN_OF_UNEQUAL_PARTS = Rule(
    id="PA110",
    name="mean-of-unequal-parts",
    severity=Severity.WARNING,
    summary="A mean over a part of a tensor whose parts are not of one size.",
    why="""\
The mean of the ranks' means is the mean only where all parts are of one size. Where the whole does not divide
by the ranks, an element of the smallest part weighs most. The same is true of a mean over each rank's own
tokens where some are left out (an ignore index); that is data, and only values show it.""",
    how_judged=_FOLLOWED
    + """

The tensor was `Shard` on the mesh dim, its whole does not divide evenly, and the rule calls the result an average
of the ranks'. With measured evidence it is told only where the loss is off.""",
    bad="""\
# 10 rows on 4 ranks: 3, 3, 3 and 1
loss = rows.to_local().square().mean()
dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=tp_group)""",
    good="""\
loss = rows.to_local().square().sum() / rows.numel()
dist.all_reduce(loss, group=tp_group)""",
    fix="Sum, and divide by the number of elements of the whole.",
)

BACKWARD_LEFT_OUT = Rule(
    id="PA111",
    name="backward-left-out",
    severity=Severity.ERROR,
    summary="log_softmax under loss_parallel is read by something other than nll_loss, and has no backward.",
    why="""\
Under `loss_parallel` the backward of log_softmax over sharded classes hands on the gradient that it is given:
nll_loss's backward has done the work of both. An entropy bonus, a KL or a distillation term is made of log_softmax's
result as well and gets no backward of it; nor does a result that was scaled before nll_loss. The loss is right, every
placement is, and every parameter before the logits has a wrong gradient.

Measured on two ranks with half an entropy term beside the cross-entropy: gradients off by a fifth.""",
    how_judged="""\
The gradient that comes to the log_softmax of a DTensor is followed from where it began. Sums of what nll_loss's
backward left are right; any other gradient needs the backward that was left out. Only one that sums to zero over the
classes would do without. With measured evidence it is told where a gradient is off.""",
    bad="""\
with loss_parallel():
    logp = F.log_softmax(logits, -1)               # logits: Shard(-1) on tp
    loss = F.nll_loss(logp, labels) - 0.01 * entropy(logp)
    loss.backward()""",
    good="""\
with loss_parallel():
    whole = logits.redistribute(placements=[Replicate()]).to_local()
    bonus = entropy(F.log_softmax(whole, -1))      # the same on all tp ranks
    loss = F.cross_entropy(logits, labels).full_tensor() - 0.01 * bonus
    loss.backward()""",
    fix="Take log_softmax of gathered logits for whatever is not nll_loss.",
    links=(Link(ref="pytorch/pytorch#190746", about="the backward of log_softmax under loss_parallel"),),
)

VALUE_RULES = (
    COUNTED_PER_RANK,
    APPLIED_TO_A_TERM,
    DECLARED_OTHERWISE,
    MEAN_OF_UNEQUAL_PARTS,
    BACKWARD_LEFT_OUT,
)
