"""PA5xx: dtype of reductions."""

from __future__ import annotations

from placement_audit.rules.rule import Link, Rule
from placement_audit.verdicts import Severity

REDUCTION_DTYPE = Rule(
    id="PA501",
    name="reduction-dtype",
    severity=Severity.NOTE,
    summary="A gradient is reduced in another dtype than the job's reduce dtype.",
    why="""\
`mixed_precision_reduce` covers the data-parallel reduction only. SimpleFSDP and FSDP2 reduce a replicated
weight's gradient over tp before that, inside DTensor, in the gradient's own dtype: bfloat16 where
parameters are bfloat16. A sum of a few ranks in bfloat16 loses about 3 significant digits.

A note and no error: the sum is made, and it is what the released code does everywhere.""",
    how_judged="""\
The dtype of every all-reduce and reduce-scatter that runs in the backward of a call on a parameter's own
way, against the job's reduce dtype. The step runs under the job's own mixed precision; where numbers are
measured, which takes float32, it runs once more for its dtypes.""",
    bad="""\
# parameters in bfloat16, reduce dtype float32: the backward of this sums over tp in bfloat16
output = DTensor.from_local(replicated, tp_mesh, [Replicate()])""",
    good="""\
# hand the term on, and let one reduction in the reduce dtype do both
output = DTensor.from_local(replicated, tp_mesh, [Replicate()], grad_placements=[Partial()])
# ... and the first to_local must then say Partial() on tp too (PA202 if only one does)""",
    fix="""\
Reduce over tp after the reduce-scatter, on the shard and in the reduce dtype, or live with it.""",
    links=(Link(ref="pytorch/pytorch#190626", about="reduce_dtype and the tp all-reduce under FSDP2"),),
)

DTYPE_RULES = (REDUCTION_DTYPE,)
