"""Every private torch name that placement-audit uses, in one place, with the versions it was seen in.

Seen in torch 2.10.0 and 2.13.0 unless a line says otherwise. A torch upgrade should break this file and
no other but `placement_audit.dtensor_rules`, `placement_audit.ddp_api` and `placement_audit.fsdp_api`, its parts that
are about sharding rules, DistributedDataParallel and FSDP2.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._redistribute as _redistribute
import torch.distributed.tensor.debug as _dtensor_debug
import torch.utils._foreach_utils as _foreach_utils
from torch import nn
from torch.autograd.function import _SingleLevelFunction as FunctionBase
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode, _push_mode

from placement_audit.model import REPLICATE, Placement, PlacementKind

__all__ = [
    "CORE_DIRS",
    "GENERATED_FOR_COLLECTIVES",
    "DTensor",
    "EagerMode",
    "FunctionBase",
    "accumulating",
    "clean_fqn",
    "collective_group_ranks",
    "dtype_name",
    "fits_its_label",
    "forget_meshes",
    "group_of",
    "in_backward",
    "in_recompute",
    "kernels_on_meta",
    "local_of",
    "mark_node",
    "mark_of",
    "marked_node",
    "next_sequence_nr",
    "offset_of",
    "placement_of",
    "rank_map_of",
    "reduce_op_of",
    "registered",
    "relabelling",
    "replaced_everywhere",
    "root_mesh",
    "spec_of",
    "storage_key",
    "unwatched",
]

_TORCH_DIR = str(Path(torch.__file__).parent)

CORE_DIRS: tuple[str, ...] = (
    f"{_TORCH_DIR}/autograd/",
    f"{_TORCH_DIR}/_ops.py",
    f"{_TORCH_DIR}/_tensor.py",
    f"{_TORCH_DIR}/utils/",
    f"{_TORCH_DIR}/nn/modules/module.py",
    f"{_TORCH_DIR}/_library/",
    f"{_TORCH_DIR}/distributed/_functional_collectives.py",
    f"{_TORCH_DIR}/distributed/c10d_logger.py",
    f"{_TORCH_DIR}/distributed/distributed_c10d.py",
    f"{_TORCH_DIR}/distributed/nn/functional.py",
    f"{_TORCH_DIR}/distributed/tensor/_",
    f"{_TORCH_DIR}/distributed/tensor/placement_types.py",
    f"{_TORCH_DIR}/distributed/tensor/experimental/_func_map.py",
    # What torch has deprecated, all_gather_into_tensor for one, is called through a wrapper that is not torch's.
    inspect.getfile(dist.distributed_c10d.deprecated),
)
"""Where the machinery of DTensor and of collectives lives: never the place that a boundary is blamed on."""

LOCAL_MAP_FILE = f"{_TORCH_DIR}/distributed/tensor/experimental/_func_map.py"
"""A boundary call from here is `local_map`'s."""

TORCH_DIR = _TORCH_DIR + "/"

GENERATED_FOR_COLLECTIVES = "GeneratedBackwardFor__c10d_functional_"
"""How the names of the autograd functions of functional collectives begin (2.13; in 2.10 they are C++)."""

_WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.", "module._wrapped.")
"""Name parts that activation checkpointing, torch.compile and FSDP1 put into FQNs."""


def clean_fqn(fqn: str) -> str:
    """The name as the user's model has it, without wrapper parts."""
    for prefix in _WRAPPER_PREFIXES:
        fqn = fqn.replace(prefix, "")
        if fqn == prefix[:-1]:
            return ""
        fqn = fqn.removesuffix("." + prefix[:-1])
    return fqn


def spec_of(x: DTensor) -> Any:
    """The DTensorSpec: ``.mesh`` and ``.placements`` without the cost of the public properties."""
    return x._spec


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a sub-mesh was cut from; the mesh itself where it is no part of another."""
    return mesh._get_root_mesh()


def local_of(x: torch.Tensor) -> torch.Tensor:
    """The plain tensor below a DTensor and an unfinished collective, without autograd."""
    if type(x) is torch.Tensor:
        return x
    while True:
        if isinstance(x, DTensor):
            x = x._local_tensor
        elif isinstance(x, AsyncCollectiveTensor):
            x = x.elem
        else:
            return x


def fits_its_label(x: torch.Tensor) -> bool:
    """Whether a DTensor's local part has the shape that its placements call for; else nobody can assemble it."""
    if not isinstance(x, DTensor):
        return True
    spec = x._spec
    try:
        shape, _ = compute_local_shape_and_global_offset(x.shape, spec.mesh, spec.placements)
    except (RuntimeError, NotImplementedError, ValueError, AssertionError):
        return True  # torch can't say
    return tuple(shape) == tuple(x._local_tensor.shape)


def offset_of(x: DTensor) -> tuple[int, ...] | None:
    """Where a DTensor's local part begins in the whole; None where it is not what its placements call for."""
    spec = x._spec
    try:
        shape, offset = compute_local_shape_and_global_offset(x.shape, spec.mesh, spec.placements)
    except (RuntimeError, NotImplementedError, ValueError, AssertionError):
        return None
    return tuple(offset) if tuple(shape) == tuple(x._local_tensor.shape) else None


_DTYPE_NAMES: dict[torch.dtype, str] = {}


def dtype_name(x: torch.Tensor) -> str:
    """Torch's name of a tensor's dtype, without the ``torch.``."""
    name = _DTYPE_NAMES.get(x.dtype)
    if name is None:
        name = _DTYPE_NAMES[x.dtype] = str(x.dtype).removeprefix("torch.")
    return name


def storage_key(x: torch.Tensor) -> int:
    """Address of the tensor's storage: views, saved tensors and in-place ops share it."""
    return x.untyped_storage()._cdata


def forget_meshes() -> None:
    """Drop what DTensor has kept of meshes: one of another rank's equals this rank's, and has other groups."""
    for name in (
        "_clear_sharding_prop_cache",
        "_clear_python_sharding_prop_cache",
        "_clear_fast_path_sharding_prop_cache",
    ):
        clear = getattr(_dtensor_debug, name, None)
        if clear is not None:
            clear()


def rank_map_of(mesh: DeviceMesh) -> torch.Tensor:
    """The tensor of ranks below a mesh and its slices, which slice it anew in every forward (2.13)."""
    return getattr(mesh, "_rank_map", mesh.mesh)


def in_backward() -> bool:
    """True inside a backward node. With grad mode on it is activation checkpointing's recompute."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def in_recompute() -> bool:
    """True while activation checkpointing runs the forward again inside backward."""
    return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()


def registered(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters as they are now, without what a property or a parametrization makes of them."""
    return module._parameters


def mark_node(node: Any, mark: object) -> None:
    """Tie something of ours to an autograd node of a Python function (`to_local` and its like)."""
    node._placement_audit = mark


def marked_node() -> Any:
    """What was tied to the autograd node that is running now, else None."""
    return getattr(torch._C._current_autograd_node(), "_placement_audit", None)


def accumulating() -> torch.Tensor | None:
    """The leaf whose gradient autograd is adding up now, its hooks included; else None."""
    return getattr(torch._C._current_autograd_node(), "variable", None)


def mark_of(node: Any) -> Any:
    """What `mark_node` tied to an autograd node, else None."""
    return getattr(node, "_placement_audit", None)


def next_sequence_nr() -> int:
    """Number that the next autograd node of this thread gets; ``node._sequence_nr()`` tells a node's own."""
    return torch._C._autograd._get_sequence_nr()


class EagerMode(TorchDispatchMode):
    """A dispatch mode for eager code that can call an op with itself still on, at little cost."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Stay quiet while compiled code is built."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap the handler in a guard against Dynamo, about 4 us an op; eager code needs none."""
        return False

    def call_again(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op so that its inner ops reach this mode (``with`` keeps flags, which costs more)."""
        _push_mode(self)
        try:
            return func(*args, **kwargs)
        finally:
            _pop_mode(None)


@contextmanager
def unwatched() -> Generator[None]:
    """For ops of our own: no dispatch mode sees them and autograd does not follow them."""
    with torch.no_grad(), _disable_current_modes():
        yield


@functools.lru_cache(maxsize=4096)
def _placement(kind: str, tensor_dim: int | None, factor: int | None, op: str | None) -> Placement:
    return Placement(PlacementKind(kind), tensor_dim, factor, op)


def placement_of(p: TorchPlacement) -> Placement:
    """Ours for torch's. `_StridedShard` is told by name: it is no subclass of Shard in every version."""
    if p.is_replicate():
        return REPLICATE
    if p.is_partial():
        return _placement("partial", None, None, str(p.reduce_op))  # pyrefly: ignore [missing-attribute]
    if type(p).__name__ == "_StridedShard":
        return _placement("strided_shard", p.dim, int(p.split_factor), None)  # pyrefly: ignore [missing-attribute]
    return _placement("shard", p.dim, None, None)  # pyrefly: ignore [missing-attribute]


def collective_group_ranks(name: str) -> tuple[int, ...]:
    """World ranks of the group that a functional collective names.

    Not cached: a process that makes its groups anew (a second world) gives them the old names.
    """
    group = dist.distributed_c10d._resolve_process_group(name)  # pyrefly: ignore [bad-argument-type]
    return tuple(dist.get_process_group_ranks(group))


def group_of(arg: object) -> tuple[int, ...] | None:
    """World ranks of a group as the c10d ops carry it (a script object), None if it is no group."""
    if isinstance(arg, torch._C.ScriptObject):
        try:
            group = dist.ProcessGroup.unbox(arg)
        except RuntimeError:
            return None
        return tuple(dist.get_process_group_ranks(group))
    return None


def reduce_op_of(arg: object) -> str | None:
    """The reduce op as the c10d ops carry it (a script object), in lower case; None if it is none."""
    try:
        number = arg.op()  # pyrefly: ignore [missing-attribute]
    except (AttributeError, RuntimeError):
        return None
    members: Any = dist.ReduceOp.RedOpType
    return next((name.lower() for name, op in members.__members__.items() if int(op) == int(number)), None)


@contextmanager
def replaced_everywhere(replacements: dict[Callable[..., Any], Callable[..., Any]]) -> Generator[None]:
    """Rebind functions in every loaded module that imported them by name, and back again.

    ``from torch.distributed.tensor import distribute_tensor`` copies the name, so that patching torch's
    module alone would miss the callers that matter. A name imported ``as`` something else is not found.
    """
    by_id = {id(original): replacement for original, replacement in replacements.items()}
    wanted = {original.__name__ for original in replacements}
    bound: list[tuple[Any, str, Any]] = []
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        # By name first: looking at every value of some 4,000 modules costs as much as a small model's step.
        for name in wanted:
            value = names.get(name)
            if id(value) in by_id:
                bound.append((module, name, value))
                setattr(module, name, by_id[id(value)])
    try:
        yield
    finally:
        for module, name, value in bound:
            setattr(module, name, value)


def relabelling(
    after: Callable[[torch.Tensor, torch.Tensor, Any, Any], torch.Tensor],
) -> dict[Callable[..., Any], Callable[..., Any]]:
    """For `replaced_everywhere`: call ``after(local, result, current_spec, target_spec)`` on every relabel.

    `redistribute_local_tensor` is the one door: explicit redistribute, the ones inside DTensor ops and the
    ones in backward all go through it. What ``after`` returns takes the result's place.
    """
    original = _redistribute.redistribute_local_tensor

    @functools.wraps(original)
    def relabelled(local_tensor: torch.Tensor, current_spec: Any, target_spec: Any, **kwargs: Any) -> Any:
        result = original(local_tensor, current_spec, target_spec, **kwargs)
        if current_spec.placements == target_spec.placements:
            return result
        return after(local_tensor, result, current_spec, target_spec)

    return {original: relabelled}


def kernels_on_meta() -> dict[Callable[..., Any], Callable[..., Any]]:
    """For `replaced_everywhere`: foreach and fused ops run on the meta device, too, as where a job is trained."""

    def and_meta(devices: Callable[[], list[str]]) -> Callable[[], list[str]]:
        return lambda: [*devices(), "meta"]

    supported = (
        _foreach_utils._get_foreach_kernels_supported_devices,
        _foreach_utils._get_fused_kernels_supported_devices,
    )
    return {devices: and_meta(devices) for devices in supported}
