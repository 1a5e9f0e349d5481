"""The values that travel through the house: config -> build -> trace -> judge -> report.

Everything here is frozen plain data: tuples, strings, numbers. No torch object ever gets in; the
tracer converts at its edge. So a saved trace can be judged and rendered again without torch.

Words are torch's: a *mesh dim* belongs to a device mesh, a *tensor dim* to a tensor. All mesh dims
named here are dims of the world mesh (``Trace.mesh``); a DTensor that lives on a part of it (tp alone,
fsdp alone) has a `Layout` that names only those dims.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction

SCHEMA_VERSION = "1"
"""Version of the JSON report; a change that breaks readers raises it."""


# --------------------------------------------------------------------------- placements and states


class PlacementKind(StrEnum):
    """The four DTensor placements."""

    SHARD = "shard"
    STRIDED_SHARD = "strided_shard"
    REPLICATE = "replicate"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class Placement:
    """A DTensor placement on one mesh dim.

    Attributes:
        kind: which of the four.
        tensor_dim: the sharded tensor dim, for the two shards, else None.
        split_factor: of a strided shard, else None.
        reduce_op: of a partial ("sum", "avg", "max", ...), else None.
    """

    kind: PlacementKind
    tensor_dim: int | None = None
    split_factor: int | None = None
    reduce_op: str | None = None

    @property
    def is_shard(self) -> bool:
        """True for both the plain and the strided shard."""
        return self.kind in (PlacementKind.SHARD, PlacementKind.STRIDED_SHARD)

    @property
    def is_replicate(self) -> bool:
        return self.kind is PlacementKind.REPLICATE

    @property
    def is_partial(self) -> bool:
        return self.kind is PlacementKind.PARTIAL

    def __str__(self) -> str:
        """Torch's spelling: ``Shard(0)``, ``Replicate()``, ``Partial(sum)``."""
        match self.kind:
            case PlacementKind.SHARD:
                return f"Shard({self.tensor_dim})"
            case PlacementKind.STRIDED_SHARD:
                return f"_StridedShard({self.tensor_dim}, sf={self.split_factor})"
            case PlacementKind.REPLICATE:
                return "Replicate()"
            case _:
                return f"Partial({self.reduce_op})"

    def short(self) -> str:
        """The spelling for tables: ``S(0)``, ``R``, ``P(sum)``; torch's own short form."""
        match self.kind:
            case PlacementKind.SHARD:
                return f"S({self.tensor_dim})"
            case PlacementKind.STRIDED_SHARD:
                return f"_S({self.tensor_dim}, {self.split_factor})"
            case PlacementKind.REPLICATE:
                return "R"
            case _:
                return f"P({self.reduce_op})"


REPLICATE = Placement(PlacementKind.REPLICATE)


@dataclass(frozen=True, slots=True)
class Layout:
    """Placements of a DTensor, one per mesh dim.

    Attributes:
        dims: world mesh dim names, in the DTensor's mesh order (mesh dims of size 1 are left out).
        placements: as many as ``dims``.
    """

    dims: tuple[str, ...]
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.placements):
            raise ValueError(f"{len(self.dims)} mesh dims but {len(self.placements)} placements")

    def on(self, mesh_dim: str) -> Placement | None:
        """The placement on ``mesh_dim``, or None where the DTensor's mesh has no such dim."""
        return dict(zip(self.dims, self.placements, strict=True)).get(mesh_dim)

    def short(self) -> str:
        """``(S(0), R)``."""
        return "(" + ", ".join(p.short() for p in self.placements) + ")"

    def __str__(self) -> str:
        """``fsdp=Shard(0) tp=Replicate()``."""
        return " ".join(f"{d}={p}" for d, p in zip(self.dims, self.placements, strict=True))


class StateKind(StrEnum):
    """What a value, or a gradient, really is along one mesh dim (see `placement_audit.states`)."""

    ZERO = "zero"
    INVARIANT = "invariant"
    VARYING = "varying"
    AMBIGUOUS = "ambiguous"
    MIXED = "mixed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class State:
    """The actual state along one mesh dim, as computed from the dataflow and never from a label.

    Attributes:
        kind: see `StateKind`.
        scale: the gradient over the true gradient; 1 where nothing rescaled it, None where parts of
            different scale were added up.
        blame: indices into ``Trace.boundaries`` of the calls whose label departed from the state, in
            backward order.
    """

    kind: StateKind
    scale: Fraction | None = Fraction(1)
    blame: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """The world mesh: only dims with more than one rank.

    Attributes:
        device_type: "cpu", "cuda" or "meta".
        dim_names: torch's ``mesh_dim_names``.
        shape: ranks along each mesh dim.
    """

    device_type: str
    dim_names: tuple[str, ...]
    shape: tuple[int, ...]

    def size(self, mesh_dim: str) -> int:
        """Ranks along ``mesh_dim``."""
        return self.shape[self.dim_names.index(mesh_dim)]

    def __str__(self) -> str:
        return " x ".join(f"{n} {s}" for n, s in zip(self.dim_names, self.shape, strict=True)) or "1 rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Shape and dtype of a tensor.

    Attributes:
        global_shape: elements along each tensor dim of the full tensor (a plain tensor: ``local_shape``).
        local_shape: elements along each tensor dim of this rank's part.
        dtype: torch's name without the ``torch.``, e.g. "float32".
    """

    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """A line of code.

    Attributes:
        path: shortened: relative to site-packages or to the working directory.
        line: 1-based.
        function: the function's name.
        code_line: the stripped source line, "" where it could not be read.
        package: top-level package the file belongs to ("torchtitan", "torch"), or None for a user's own file.
    """

    path: str
    line: int
    function: str
    code_line: str = ""
    package: str | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.line} in {self.function}"


# --------------------------------------------------------------------------- the trace


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
class Boundary:
    """One call that crosses between DTensor and plain tensors or between placements.

    Attributes:
        index: position in ``Trace.boundaries``.
        kind: "to_local", "from_local", "redistribute", "full_tensor", "distribute_tensor" or "local_map".
        phase: forward or recompute.
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
    """

    fqn: str
    layout: Layout | None
    tensor: TensorInfo
    requires_grad: bool
    grad: GradRecord | None
    boundaries: tuple[int, ...]
    uses: tuple[ParamUse, ...]


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


# --------------------------------------------------------------------------- measured on real ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamMeasure:
    """One parameter's numbers, against the same job on one device.

    All errors are relative (Frobenius norm of the difference over the reference's norm), dimensionless, the
    worst over the ranks.

    Attributes:
        fqn: the parameter.
        grad_error: of the gradient assembled as its placements say; None where either side has none.
        grad_ratio: norm of the assembled gradient over the reference's, before ``grad_scale`` is taken out.
        grad_present: whether backward left a gradient on every rank.
        reference_present: whether the reference has one.
        local_error: of the stored local part, read as if it had the parameter's own placements.
        grad_spread: per world mesh dim, the largest relative difference between ranks that by the gradient's
            label hold the same; None where the label lets them differ.
        init_spread: likewise for the parameter before the step.
        step_error: of the parameter's value after one step with the job's own clipping and optimizer, over
            the elements whose gradient is not near zero (at least a hundredth of its root mean square): there
            the first step of Adam is a sign, which rounding decides. Compares with ``step_tolerance``.
        sgd_error: of the parameter's change in one plain SGD step with the same clipping, for AdamW's first
            step is blind to scale. Compares with ``tolerance``. Both steps are taken with gradients so large
            that clipping does clip; both are None where either side has no gradient.
    """

    fqn: str
    grad_error: float | None
    grad_ratio: float | None
    grad_present: bool
    reference_present: bool
    local_error: float | None
    grad_spread: tuple[float | None, ...]
    init_spread: tuple[float | None, ...]
    step_error: float | None
    sgd_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryMeasure:
    """Whether the ranks' values really agreed at one boundary.

    Attributes:
        index: into ``Trace.boundaries``.
        value_spread: per world mesh dim, the largest relative difference between ranks of the input value.
        arrived_spread: likewise of the arriving gradient; () where none came.
        left_spread: likewise of the gradient that left; ().
    """

    index: int
    value_spread: tuple[float, ...]
    arrived_spread: tuple[float, ...]
    left_spread: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What real ranks with real numbers showed.

    Attributes:
        ranks: how many.
        device_type: "cpu" or "cuda".
        backend: "gloo" or "nccl".
        seed: of weights and batch.
        dtype: that everything was computed in.
        model: what was run, where it had to be smaller than the job's, in words; "" for the job's own.
        tolerance: relative error below which numbers count as equal.
        step_tolerance: likewise for changes of parameters.
        loss: global, as the ranks computed it.
        reference_loss: on one device.
        loss_error: relative.
        grad_scale: common factor of all gradients over the reference: 1 where the data-parallel ranks' parts
            are summed, 1/n where they are averaged; found out, not assumed.
        expected_scale: the factor that the job's loss calls for; None for unknown.
        grad_norm: total norm that the ranks' clipping reported.
        reference_grad_norm: on one device.
        params: in the model's order.
        boundaries: in call order.
        seconds: wall time of the measurement.
    """

    ranks: int
    device_type: str
    backend: str
    seed: int
    dtype: str
    model: str
    tolerance: float
    step_tolerance: float
    loss: float
    reference_loss: float
    loss_error: float
    grad_scale: Fraction
    grad_norm: float | None
    reference_grad_norm: float | None
    params: tuple[ParamMeasure, ...]
    boundaries: tuple[BoundaryMeasure, ...]
    seconds: float
    expected_scale: Fraction | None = None


# --------------------------------------------------------------------------- verdicts


class Verdict(StrEnum):
    """Of one parameter on one mesh dim."""

    OK = "ok"
    DEFERRED = "deferred"
    LOST_REDUCTION = "lost reduction"
    DOUBLE_REDUCTION = "double reduction"
    WRONG_SCALE = "wrong scale"
    WRONG_PLACEMENT = "wrong placement"
    RANKS_DISAGREE = "ranks disagree"
    WRONG_GRADIENT = "wrong gradient"
    NO_GRADIENT = "no gradient"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Why a verdict is what it is.

    Attributes:
        strength: "traced" or "measured".
        statement: one sentence with its numbers.
    """

    strength: str
    statement: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on one parameter and one mesh dim.

    Attributes:
        param_fqn: the parameter.
        mesh_dim: the world mesh dim.
        verdict: see `Verdict`.
        placement: the parameter's own placement there; None where its mesh has no such dim (replicated).
        expected: placement that its gradient should have.
        observed: placement that it has; None for no gradient or a plain gradient.
        factor: the gradient read through its label over the true one; None where it is no multiple of it.
        reason: one sentence.
        path: indices into ``Trace.boundaries`` that made it so, the cause first.
        evidence: see `Evidence`.
    """

    param_fqn: str
    mesh_dim: str
    verdict: Verdict
    placement: Placement | None
    expected: Placement
    observed: Placement | None
    factor: Fraction | None
    reason: str
    path: tuple[int, ...]
    evidence: tuple[Evidence, ...]


class Severity(StrEnum):
    """Only errors change the exit status: a warning is about code that is right by luck or other means."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStep:
    """One place on the gradient's way that a finding names.

    Attributes:
        role: "cause" or what the place did, in a few words.
        kind: the boundary's kind.
        call_site: where.
        boundary: index into ``Trace.boundaries``.
    """

    role: str
    kind: str
    call_site: CallSite
    boundary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault of one parameter (or of one boundary) on one mesh dim.

    Attributes:
        rule_id: "PA201".
        rule_name: "lost-reduction".
        severity: see `Severity`.
        param_fqn: None for a boundary that is not on a parameter's way.
        module_fqn: where the boundary ran; "" where unknown.
        mesh_dim: the world mesh dim.
        message: one sentence.
        expected: in words and placements.
        observed: in words and placements.
        evidence: see `Evidence`.
        path: the places, the cause first; may be empty.
        next_step: what to do.
        fingerprint: stable across runs and line shifts.
    """

    rule_id: str
    rule_name: str
    severity: Severity
    param_fqn: str | None
    module_fqn: str
    mesh_dim: str
    message: str
    expected: str
    observed: str
    evidence: tuple[Evidence, ...]
    path: tuple[PathStep, ...]
    next_step: str
    fingerprint: str


class Outcome(StrEnum):
    """Of a whole run."""

    CLEAN = "clean"
    FINDINGS = "findings"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a report format may show.

    Attributes:
        schema_version: of the JSON form.
        outcome: see `Outcome`.
        exit_status: 0 clean, 1 findings, 3 incomplete or nothing audited.
        judgements: by parameter (model order), then mesh dim (mesh order).
        findings: errors first, then by rule, place and parameter.
        blind_spots: fault classes that the evidence at hand cannot see, whole sentences.
        trace: what was judged.
        measurement: what real ranks showed; None where only a trace was had.
    """

    schema_version: str = field(default=SCHEMA_VERSION)
    outcome: Outcome
    exit_status: int
    judgements: tuple[Judgement, ...]
    findings: tuple[Finding, ...]
    blind_spots: tuple[str, ...]
    trace: Trace
    measurement: Measurement | None = None
