"""What the mended method calls: text for the user's file. A tab is an indent, @name@ what the file calls it."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst

from placement_audit.mend.edit import statements
from placement_audit.mend.flow import Statement
from placement_audit.mend.result import Form
from placement_audit.mend.torch_names import class_name, torch_name

GATHERED = "_off_data_parallel"
JOIN = "_join_reductions"
NAMES = (GATHERED, "_OffDataParallel", JOIN)

_BACK = """
\t\t# A sum still to be made stays one, for data parallel comes first; the rest is
\t\t# made whole here.
\t\tkept = [p if p == @Partial@() else @Replicate@() for p in grad.placements]
\t\tgrad = grad.redistribute(placements=kept)
\t\tgrad = @DTensor@.from_local(
\t\t\tgrad.to_local(),
\t\t\tctx.mesh,
\t\t\t(*ctx.dp_grads, *kept),
\t\t\tshape=grad.shape,
\t\t\tstride=grad.stride(),
\t\t)
"""

_OFF = """
\t\tplacements = whole.placements[len(ctx.dp_grads) :]
\t\treturn @DTensor@.from_local(
\t\t\twhole.to_local(), mesh, placements, shape=whole.shape, stride=whole.stride()
\t\t)
"""

_REDUCED = (
    f'''
class _OffDataParallel(@torch@.autograd.Function):
\t"""Takes the data-parallel mesh dims off a gathered weight (placement-audit)."""

\t@staticmethod
\tdef forward(ctx, whole, mesh, dp_grads):
\t\tctx.set_materialize_grads(False)
\t\tctx.mesh, ctx.dp_grads = whole.device_mesh, tuple(dp_grads){_OFF}
\t@staticmethod
\tdef backward(ctx, grad):
\t\tif grad is None:
\t\t\treturn None, None, None{_BACK}\t\treturn grad, None, None
''',
    """
# One node for torch.compile: placements are those of the real backward.
@@torch@.compiler.allow_in_graph
def _off_data_parallel(whole, mesh, dp_grads):
\treturn _OffDataParallel.apply(whole, mesh, dp_grads)
""",
    '''
def _join_reductions(module, parametrization):
\t"""Lets one group span both reductions of a weight that nothing shards (placement-audit)."""
\tdp_mesh, dp_grads = parametrization.@device_mesh@, parametrization.@grad_placements@
\tif any(type(placement) is not @Partial@ for placement in dp_grads):
\t\treturn
\tfor param in module.parameters(recurse=False):
\t\tif not isinstance(param, @DTensor@) or param.device_mesh.ndim == dp_mesh.ndim:
\t\t\tcontinue
\t\tif all(placement.is_replicate() for placement in param.placements):
\t\t\tparam.device_mesh._flatten()
''',
)

_DEFERRED = (
    f'''
class _OffDataParallel(@torch@.autograd.Function):
\t"""Takes the data-parallel mesh dims off a weight, gathered apart (placement-audit)."""

\t@staticmethod
\tdef forward(ctx, param, whole, mesh, dp_grads, dtype):
\t\tctx.set_materialize_grads(False)
\t\tctx.mesh, ctx.dp_grads = param.device_mesh, tuple(dp_grads)
\t\tctx.shards, ctx.dtype = param.placements[: len(ctx.dp_grads)], dtype or param.dtype{_OFF}
\t@staticmethod
\tdef backward(ctx, grad):
\t\tif grad is None:
\t\t\treturn None, None, None, None, None{_BACK}\t\t# The data-parallel reduction, and no other.
\t\tplacements = (*ctx.shards, *kept)
\t\tgrad = grad.redistribute(placements=placements, forward_dtype=ctx.dtype)
\t\treturn grad, None, None, None, None
''',
    """
# One node for torch.compile: placements are those of the real backward.
@@torch@.compiler.allow_in_graph
def _off_data_parallel(param, whole, mesh, dp_grads, dtype):
\treturn _OffDataParallel.apply(param, whole, mesh, dp_grads, dtype)
""",
)


def helpers(module: cst.Module, form: Form, join: Mapping[str, str] | None) -> list[Statement]:
    """The definitions that a mended file needs, to stand before the class.

    Args:
        module: the file.
        form: of the mend.
        join: what the attributes ``device_mesh`` and ``grad_placements`` of the gathering object are called; None
            leaves out `JOIN`, which nothing calls then.

    Raises:
        NotFound: torch is not imported there.
    """
    texts = _REDUCED if form is Form.REDUCED else _DEFERRED
    words = {"torch": torch_name(module), **(join or {})}
    words |= {name: class_name(module, name) for name in ("DTensor", "Partial", "Replicate")}
    made = []
    for text in texts if join else texts[:2]:
        for word, written in words.items():
            text = text.replace(f"@{word}@", written)
        made.append(f"\n{text}")
    return statements(made, module.default_indent)
