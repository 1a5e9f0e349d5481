"""PA207, PA208: what only numbers show."""

from __future__ import annotations

from placement_audit.rules.rule import Link, Rule
from placement_audit.verdicts import Severity

WRONG_GRADIENT = Rule(
    id="PA207",
    name="wrong-gradient",
    severity=Severity.ERROR,
    needs="measured",
    measured_only=True,
    summary="The gradient differs from one device's, and no reduction over one mesh dim explains how.",
    why="""\
The placements are right and the numbers are not: the forward is not what one device computes (a mean over
the local shard), a divisor is wrong, a value is masked and its gradient is not, a custom backward is wrong.
Such faults leave no mark in placements; a fifth of the public faults in the project's corpus do not.""",
    how_judged="""\
Measured only: every gradient, assembled as its placements say, against the same weights and global batch on
one device, and so is every activation with its gradient. What looks like a factor of one mesh dim's size, or
like replicas that differ, is reported as PA201 to PA203 and PA205 instead.""",
    bad="""\
# each rank's own mean, although ranks hold different numbers of valid tokens
loss = F.cross_entropy(logits, labels, reduction="mean")""",
    good="""\
loss = F.cross_entropy(logits, labels, reduction="sum") / global_valid_tokens""",
    fix="""\
Look at the named line: what modules put out, and the gradients that came back to it, are right before it and
wrong after it. Where several lines are named, the fault is in one of them. A wrong forward is told first, for
gradients follow it.""",
    links=(
        Link(
            ref="pytorch/torchtitan#4332", about="a bias divided by tp, differentiated through the division"
        ),
    ),
)

WRONG_LOSS = Rule(
    id="PA208",
    name="wrong-loss",
    severity=Severity.ERROR,
    needs="measured",
    measured_only=True,
    summary="The loss on the ranks differs from the loss on one device.",
    why="""\
A forward that is not equivalent to one device's: a bias added on every rank before a sum, a mean over a
shard, a wrong divisor. Gradients may be consistent with that forward and are still wrong for the model.""",
    how_judged="""\
Measured only: the sum of the ranks' losses against the loss of the same weights on the same global batch on
one device.""",
    bad="""\
# every tp rank adds the whole bias, then the ranks are summed
out = DTensor.from_local(x @ w + bias, mesh, [Partial()])""",
    good="""\
out = DTensor.from_local(x @ w, mesh, [Partial()]).redistribute(placements=[Replicate()]) + bias""",
    fix="""\
Mend the forward, then audit again: the gradients' verdicts rest on it.""",
    links=(Link(ref="pytorch/torchtitan#4245", about="an expert bias counted tp times"),),
)

WRONG_NORMALISATION = Rule(
    id="PA209",
    name="wrong-normalisation",
    severity=Severity.ERROR,
    needs="measured",
    measured_only=True,
    summary="All gradients share a factor that the job's loss does not call for.",
    why="""\
Where each rank's loss is divided by the global number of tokens (torchtitan 0.2.2), the ranks' gradients are
to be summed; where each rank takes its own mean (0.2.1), averaged. The other way round every gradient is n or
1/n times the true one: the loss is right, AdamW hardly minds, and gradient clipping and its norm are wrong.""",
    how_judged="""\
Measured only. The gradients' common factor over the gradient of the sum of the ranks' losses is found out, and
set against what the job's loss calls for. A trace takes a factor that all parameters share on a data-parallel
mesh dim for an average, and says so.""",
    bad="""\
loss = loss_sum / global_valid_tokens            # each rank's part of the whole
fully_shard(model)                               # ... averaged once more by FSDP2's default""",
    good="""\
loss = loss_sum / global_valid_tokens
for m in model.modules():
    if isinstance(m, FSDPModule):
        m.set_gradient_divide_factor(1.0)        # sum""",
    fix="""\
Make the reduction a sum, or the loss each rank's own mean.""",
    links=(Link(ref="pytorch/torchtitan#2318", about="DDP averages although the loss is divided already"),),
)

MEASURED_RULES = (WRONG_GRADIENT, WRONG_LOSS, WRONG_NORMALISATION)
