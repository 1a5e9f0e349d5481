"""What the fork server imports once, so that no rank has to: torchtitan takes 5 to 11 s."""

from placement_audit.adapters.titan02_device import claim_device

claim_device("cpu")

import torch._dynamo  # noqa: E402, F401  (by the first optimizer)
import torchtitan.experiments.simple_fsdp.llama3  # noqa: E402
import torchtitan.train  # noqa: E402, F401
