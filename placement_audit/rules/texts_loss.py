"""PA106: what is said of a loss that differs between ranks."""

from __future__ import annotations

from placement_audit.rules.rule import Rule
from placement_audit.verdicts import Severity

VARYING_LOSS = Rule(
    id="PA106",
    name="varying-loss",
    severity=Severity.NOTE,
    needs="traced",
    summary="Backward begins at a loss that differs between ranks along a mesh dim the batch is not spread over.",
    why="""\
Autograd knows one rank. Where each rank begins at a loss of its own, the gradients are those of the
sum of these losses. That is right where each rank has tokens of its own (sequence parallelism up to
the loss) and the gradients of replicated parameters are summed afterwards. It is wrong where a
reduction was left out in the forward: each rank then goes on with one term of the activation, and
what is computed of a term is no term of the result.""",
    how_judged="""\
What goes into the loss varies along the mesh dim, and no collective over it came since. It is a
warning where a parameter that is sharded on the mesh dim reaches the loss with no collective over it
between: that looks like a term that was left unsummed. Else it is a note, and told by a trace alone:
measured evidence settles it either way.""",
    bad="""\
y = hidden @ w_down_shard.t()      # one term a tp rank; the all-reduce is missing
loss = loss_fn(y, labels)
loss.backward()""",
    good="""\
y = Reduce.apply(hidden @ w_down_shard.t(), tp_group)
loss = loss_fn(y, labels)
loss.backward()""",
    fix="""\
Find the reduction that is missing between the last sharded weight and the loss. Where ranks have tokens
of their own, say that the batch varies along the mesh dim.""",
)

LOSS_RULES = (VARYING_LOSS,)
