"""What a trace holds: the boundaries, collectives, ops and parameters of one step, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from placement_audit.model import CallSite, Layout, MeshSpec, Placement, State, TensorInfo


class Phase(StrEnum):
    """When something ran. Recompute is activation checkpointing's second forward."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradCrossing:
    """A gradient that went back through a boundary.

    Attributes:
        order: position among all backward crossings of the trace, 0 first.
        arrived: layout it arrived with; None for a plain tensor.
        arrived_state: per world mesh dim, what it really was when it arrived.
        left: layout it left with; None for a plain tensor.
        left_state: per world mesh dim, what it really was when it left.
        tensor: the arriving gradient's shapes and dtype.
    """

    order: int
    arrived: Layout | None
    arrived_state: tuple[State, ...]
    left: Layout | None
    left_state: tuple[State, ...]
    tensor: TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDim:
    """One dim of a DTensor's own mesh.

    Attributes:
        spans: the world mesh dims that it spans; () for a mesh dim of one rank.
        placement: the tensor's there.
    """

    spans: tuple[str, ...]
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """One call that crosses between DTensor and plain tensors or between placements.

    Attributes:
        index: position in ``Trace.boundaries``.
        kind: "to_local", "from_local", "redistribute", "full_tensor", "distribute_tensor" or "local_map";
            "autograd_function"; or the collective's name where one was run on a gradient, outside all others.
        phase: forward or recompute; backward for a collective on a gradient.
        call_site: first frame outside DTensor's own core: user code, or a torch TP style.
        user_site: first frame outside torch; equal to ``call_site`` for user code.
        module_fqn: the module whose forward was running, "" for the root.
        param_fqn: the parameter that the tensor is (a gathered, cast or re-wrapped form of), else None; told in
            forward only.
        src: layout before; None for a plain tensor.
        dst: layout after; None for a plain tensor.
        grad_declared: grad placements given by the caller, by ``src`` (to_local) or ``dst`` (from_local) mesh
            dim; None where torch's default applied.
        value_state: per world mesh dim, the state of the input value.
        tensor: of the input.
        grad: the gradient's way back through it; None where none came.
        own_dims: the DTensor's own mesh, dim by dim; () where that is what ``src`` (or ``dst``) says, one world
            mesh dim each.
        name: of an autograd function, its class; else "".
        divided: mesh dims along which `from_local` was given a value that is equal on all ranks, divided by them.
    """

    index: int
    kind: str
    phase: Phase
    call_site: CallSite
    user_site: CallSite
    module_fqn: str
    param_fqn: str | None
    src: Layout | None
    dst: Layout | None
    grad_declared: Layout | None
    value_state: tuple[State, ...]
    tensor: TensorInfo
    grad: GradCrossing | None = None
    own_dims: tuple[OwnDim, ...] = ()
    name: str = ""
    divided: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective.

    Attributes:
        order: position among all collectives of the step.
        name: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", ...
        reduce_op: "sum", "avg", "max", ... for reductions, else None.
        mesh_dims: world mesh dims that the group spans; empty where the group is none of them.
        group_ranks: the group's ranks where ``mesh_dims`` is empty, else ().
        phase: forward, backward or recompute.
        boundary: index of the boundary call (or its backward) that ran it, else None.
        op: the DTensor op that ran it, where no boundary did, else None.
        module_fqn: the module whose forward was running, "" for none.
        dtype: of what was sent.
        numel: elements of this rank's input.
        already_equal: mesh dims along which the summed value was already equal on all ranks.
        call_site: only where no boundary owns it.
    """

    order: int
    name: str
    reduce_op: str | None
    mesh_dims: tuple[str, ...]
    group_ranks: tuple[int, ...]
    phase: Phase
    boundary: int | None
    op: str | None
    module_fqn: str
    dtype: str
    numel: int
    already_equal: tuple[str, ...] = ()
    call_site: CallSite | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCount:
    """How often an op ran with these placements.

    Attributes:
        op: e.g. "aten.mm.default".
        phase: forward, backward or recompute.
        inputs: layouts of its DTensor inputs, short; () for a plain op.
        outputs: likewise.
        count: calls.
    """

    op: str
    phase: Phase
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamUse:
    """The first op that combined a parameter (in whatever form) with something else.

    Attributes:
        op: e.g. "aten.mul.Tensor".
        module_fqn: the module whose forward was running.
        layout: of the parameter's form at that op; None for a plain tensor.
        result: layout of the op's result; None for a plain tensor.
        call_site: first frame outside torch.
    """

    op: str
    module_fqn: str
    layout: Layout | None
    result: Layout | None
    call_site: CallSite


@dataclass(frozen=True, slots=True, kw_only=True)
class GradRecord:
    """What a parameter's ``.grad`` turned out to be.

    Attributes:
        layout: None for a plain tensor.
        state: per world mesh dim.
        dtype: of the gradient.
    """

    layout: Layout | None
    state: tuple[State, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """What became of a parameter and its gradient once the gradients were read: by clipping, by an optimizer.

    Attributes:
        state: per world mesh dim, of the parameter; None where it was not written.
        call_site: first frame outside torch that wrote it; the one that made the ranks' values differ, where
            they do.
        grad_state: per world mesh dim, of the gradient, where a reader made of one that was complete and equal
            on all ranks one that is not; else None.
        grad_site: where that was.
    """

    state: tuple[State, ...] | None
    call_site: CallSite | None
    grad_state: tuple[State, ...] | None = None
    grad_site: CallSite | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRecord:
    """One parameter.

    Attributes:
        fqn: fully qualified name as in the user's model (wrapper prefixes removed).
        layout: None for a plain tensor, which counts as replicated on every mesh dim.
        tensor: shapes and dtype.
        requires_grad: False: not trained, not judged.
        grad: None where backward left no gradient.
        boundaries: indices into ``Trace.boundaries``, in forward order.
        uses: where it met the activations.
        update: what its gradient's readers made of it; None where they were not followed or did not touch it.
    """

    fqn: str
    layout: Layout | None
    tensor: TensorInfo
    requires_grad: bool
    grad: GradRecord | None
    boundaries: tuple[int, ...]
    uses: tuple[ParamUse, ...]
    update: UpdateRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRecord:
    """A plain tensor that a backward began at.

    Attributes:
        state: per world mesh dim.
        call_site: first frame outside torch.
        unsummed: (mesh dim, FQN) of parameters sharded on it that reach it with no collective over it between,
            one a mesh dim.
    """

    state: tuple[State, ...]
    call_site: CallSite
    unsummed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDoubt:
    """A plain value that one device would hardly have: placements were followed through plain ops to it.

    Attributes:
        kind: "added", complete values were added to each rank's term of a sum, which then was summed; "applied",
            an op that is not additive was applied to a term; "declared", `from_local` was told another placement;
            "averaged", a mean was taken over parts of different sizes; "left_out", the backward of log_softmax was
            left to nll_loss where the gradient is not nll_loss's; "updated", a part of a parameter was updated with
            what an op that needs the whole made of parts.
        mesh_dim: along which the value varies.
        op: that did it, e.g. "add".
        call_site: first frame outside torch.
        summed_at: where the terms were summed, or the parameter updated; None where they were not.
        carried: what the value is.
        declared: what it was declared to be; None where nothing was.
        counted: (FQN, or "" where it is no parameter; how often it goes in on each rank) of the complete values.
        after_backward: it was done to gradients, after backward.
        module_fqn: the module whose forward was running, "" for none.
    """

    kind: str
    mesh_dim: str
    op: str
    call_site: CallSite
    summed_at: CallSite | None
    carried: Placement
    declared: Placement | None
    counted: tuple[tuple[str, Fraction], ...]
    after_backward: bool
    module_fqn: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A parameter that each rank adds to its own term of a sum.

    Attributes:
        param_fqn: the parameter.
        mesh_dim: along which the terms are summed.
        value: how often it goes in on each rank; 1/n is right.
        grad: how often by autograd's account: less where something was detached.
    """

    param_fqn: str
    mesh_dim: str
    value: Fraction
    grad: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What ran: enough to repeat it.

    Attributes:
        tool_version: placement-audit's.
        versions: (name, version) of python, torch, torchtitan, triton.
        model: torchtitan's model name and flavor, e.g. "simple_fsdp.llama3 debugmodel".
        config_path: as given.
        config_sha256: of the file's bytes.
        overrides: torchtitan overrides after ``--``.
        world_size: ranks.
        backend: "fake" (one process), "gloo" or "nccl".
        device_type: "meta", "cpu" or "cuda".
        evidence: "traced" for now; "measured" comes beside it.
        notes: what the reader must know (a degree chosen by us, ...), whole sentences.
        phases: (name, seconds) of build, trace, judge.
    """

    tool_version: str
    versions: tuple[tuple[str, str], ...]
    model: str
    config_path: str
    config_sha256: str
    overrides: tuple[str, ...]
    world_size: int
    backend: str
    device_type: str
    evidence: tuple[str, ...]
    notes: tuple[str, ...]
    phases: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One forward and backward, as one rank saw it.

    Attributes:
        run: what ran.
        mesh: the world mesh.
        batch_dims: mesh dims over which the batch varies (data and context parallel).
        params: every parameter of the model, in the model's order.
        boundaries: in the order of the calls.
        collectives: in order.
        ops: counts, sorted.
        assumed_invariant: tensors that came from outside the trace and were taken as equal on all ranks.
        random_ops: random ops, taken as equal on all ranks.
        reduce_dtype: the dtype that the job wants gradients reduced in; None where it wants none.
        losses: where backwards began, each place once.
        other_ranks: ranks that were traced as well, one a mesh dim, to know the numbers that differ; () for none.
        readers: whether the job's own clipping and optimizer were followed.
        value_doubts: plain values that one device would hardly have, each once.
        shares: parameters that were added to terms of a sum, each way once.
        unfollowed: (op, mesh dim, calls) whose results' placements torch's rules do not give without communication.
    """

    run: RunRecord
    mesh: MeshSpec
    batch_dims: tuple[str, ...]
    params: tuple[ParamRecord, ...]
    boundaries: tuple[Boundary, ...]
    collectives: tuple[Collective, ...]
    ops: tuple[OpCount, ...]
    assumed_invariant: int
    random_ops: int
    reduce_dtype: str | None = None
    losses: tuple[LossRecord, ...] = ()
    other_ranks: tuple[int, ...] = ()
    readers: bool = False
    value_doubts: tuple[ValueDoubt, ...] = ()
    shares: tuple[Share, ...] = ()
    unfollowed: tuple[tuple[str, str, int], ...] = ()
