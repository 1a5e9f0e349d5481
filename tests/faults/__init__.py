"""A public benchmark of seeded faults: small programs in right and wrong variants, with their numeric truth."""

from tests.faults import (
    biases_and_losses,
    data_parallel,
    dtensor_boundaries,
    experts,
    labels,
    plain_tensors,
    plain_values,
    readers,
    side_by_side,
)

FAMILIES = (
    *dtensor_boundaries.FAMILIES,
    *biases_and_losses.FAMILIES,
    *data_parallel.FAMILIES,
    *experts.FAMILIES,
    *readers.FAMILIES,
    *plain_tensors.FAMILIES,
    *plain_values.FAMILIES,
    *labels.FAMILIES,
    *side_by_side.FAMILIES,
)

BY_NAME = {f.name: f for f in FAMILIES}
