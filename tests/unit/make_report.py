"""Reports as pure data, shared by every test of a report format.

The shapes, placements and code lines are those of torchtitan 0.2.2's simple_fsdp.llama3 debug model
under FSDP 2 x TP 2; what the judge would say is written by hand. No torch is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction

from placement_audit.model import (
    REPLICATE,
    CallSite,
    Layout,
    MeshSpec,
    Placement,
    PlacementKind,
    State,
    StateKind,
    TensorInfo,
)
from placement_audit.tracing import (
    Boundary,
    Collective,
    GradCrossing,
    GradRecord,
    OpCount,
    ParamRecord,
    ParamUse,
    Phase,
    RunRecord,
    Trace,
)
from placement_audit.verdicts import (
    Evidence,
    Finding,
    Judgement,
    Outcome,
    PathStep,
    Report,
    Severity,
    Verdict,
)

MESH = MeshSpec(device_type="meta", dim_names=("fsdp", "tp"), shape=(2, 2))
PARTIAL = Placement(PlacementKind.PARTIAL, reduce_op="sum")
STRIDED = Placement(PlacementKind.STRIDED_SHARD, tensor_dim=0, split_factor=2)

VARYING = State(StateKind.VARYING)
INVARIANT = State(StateKind.INVARIANT)

WRAPPER = "torchtitan/experiments/simple_fsdp/simple_fsdp.py"


def shard(tensor_dim: int) -> Placement:
    """A plain shard on ``tensor_dim``."""
    return Placement(PlacementKind.SHARD, tensor_dim=tensor_dim)


def _wrapper(line: int, code: str) -> CallSite:
    return CallSite(
        path=WRAPPER,
        line=line,
        function="replicate_compute",
        code_line=code,
        package="torchtitan",
    )


TO_LOCAL = _wrapper(189, "sharded_local_tensor = x.to_local()")
TO_LOCAL_PARTIAL = _wrapper(189, "sharded_local_tensor = x.to_local(grad_placements=grads)")
FROM_LOCAL_DP = _wrapper(190, "sharded_dtensor = DTensor.from_local(")
GATHER = _wrapper(196, "replicated_dtensor = sharded_dtensor.redistribute(")
TO_LOCAL_DP = _wrapper(204, "replicated_local_tensor = replicated_dtensor.to_local(")
REWRAP = _wrapper(214, "output = DTensor.from_local(")
USER_NORM = CallSite(
    path="my_model/norm.py",
    line=31,
    function="forward",
    code_line="return F.rms_norm(x.to_local(), self.shape, self.weight.to_local())",
)
MODEL_NORM = CallSite(
    path="torchtitan/models/llama3/model/model.py",
    line=351,
    function="forward",
    code_line="h = x + self.attention(self.attention_norm(x), freqs_cis, attention_masks)",
    package="torchtitan",
)
STYLE = CallSite(
    path="torch/distributed/tensor/parallel/style.py",
    line=567,
    function="_prepare_input_arg",
    code_line="dt_inp = dt_inp.redistribute(placements=(desired_layout,))",
    package="torch",
)


@dataclass
class Builder:
    """Collects boundaries and collectives in order; frozen by `trace`."""

    mesh: MeshSpec = MESH
    boundaries: list[Boundary] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    params: list[ParamRecord] = field(default_factory=list)
    _crossings: int = 0

    def boundary(
        self,
        kind: str,
        site: CallSite,
        *,
        module: str,
        tensor: TensorInfo,
        src: Layout | None,
        dst: Layout | None,
        param: str | None = None,
        declared: Layout | None = None,
        value: tuple[State, ...] = (VARYING, INVARIANT),
        user_site: CallSite | None = None,
    ) -> int:
        """Record one forward boundary call.

        Returns:
            Its index.
        """
        index = len(self.boundaries)
        self.boundaries.append(
            Boundary(
                index=index,
                kind=kind,
                phase=Phase.FORWARD,
                call_site=site,
                user_site=user_site or site,
                module_fqn=module,
                param_fqn=param,
                src=src,
                dst=dst,
                grad_declared=declared,
                value_state=value,
                tensor=tensor,
            )
        )
        return index

    def cross(
        self,
        index: int,
        arrived: Layout | None,
        arrived_state: tuple[State, ...],
        left: Layout | None,
        left_state: tuple[State, ...],
        tensor: TensorInfo,
    ) -> None:
        """Record the gradient's way back through boundary ``index``."""
        crossing = GradCrossing(
            order=self._crossings,
            arrived=arrived,
            arrived_state=arrived_state,
            left=left,
            left_state=left_state,
            tensor=tensor,
        )
        self._crossings += 1
        self.boundaries[index] = replace(self.boundaries[index], grad=crossing)

    def collective(
        self,
        name: str,
        mesh_dim: str,
        phase: Phase,
        *,
        boundary: int | None = None,
        op: str | None = None,
        module: str = "",
        numel: int = 256,
        reduce_op: str | None = None,
    ) -> None:
        """Record one collective."""
        self.collectives.append(
            Collective(
                order=len(self.collectives),
                name=name,
                reduce_op=reduce_op,
                mesh_dims=(mesh_dim,),
                group_ranks=(),
                phase=phase,
                boundary=boundary,
                op=op,
                module_fqn=module,
                dtype="float32",
                numel=numel,
            )
        )

    def wrapped_param(
        self,
        fqn: str,
        *,
        on_fsdp: Placement,
        on_tp: Placement,
        shape: tuple[int, ...],
        variant: str = "stock",
    ) -> ParamRecord:
        """Record a parameter that SimpleFSDP gathers: five boundaries forward, five back.

        Args:
            fqn: the parameter.
            on_fsdp: placement on fsdp.
            on_tp: placement on tp.
            shape: global shape; every sharded tensor dim is halved locally.
            variant: "stock"; "to_local" (Partial given to the first to_local alone); "both" (and to
                the last from_local); "user_norm" (a norm module calls to_local() on the weight).
        """
        module = fqn.rpartition(".")[0]
        fsdp, tp = ("fsdp",), ("tp",)
        layout = Layout(self.mesh.dim_names, (on_fsdp, on_tp))
        norm = on_tp.is_replicate
        partial_first = norm and variant in ("to_local", "both")
        first = TO_LOCAL_PARTIAL if partial_first else TO_LOCAL
        local = _local_shape(shape, (on_fsdp, on_tp))
        whole = _local_shape(shape, (on_tp,))
        small = TensorInfo(global_shape=shape, local_shape=local, dtype="float32")
        plain = TensorInfo(global_shape=local, local_shape=local, dtype="float32")
        gathered = TensorInfo(global_shape=whole, local_shape=whole, dtype="float32")
        numel = _numel(whole)

        mark = len(self.boundaries)
        self.boundary(
            "to_local",
            first,
            module=module,
            param=fqn,
            tensor=small,
            src=layout,
            dst=None,
            declared=Layout(self.mesh.dim_names, (on_fsdp, PARTIAL)) if partial_first else None,
        )
        self.boundary(
            "from_local",
            FROM_LOCAL_DP,
            module=module,
            param=fqn,
            tensor=plain,
            src=None,
            dst=Layout(fsdp, (shard(0),)),
        )
        self.boundary(
            "redistribute",
            GATHER,
            module=module,
            param=fqn,
            tensor=gathered,
            src=Layout(fsdp, (shard(0),)),
            dst=Layout(fsdp, (REPLICATE,)),
        )
        self.collective(
            "all_gather", "fsdp", Phase.FORWARD, boundary=mark + 2, module=module, numel=numel // 2
        )
        self.boundary(
            "to_local",
            TO_LOCAL_DP,
            module=module,
            param=fqn,
            tensor=gathered,
            src=Layout(fsdp, (REPLICATE,)),
            dst=None,
            declared=Layout(fsdp, (PARTIAL,)),
            value=(INVARIANT, INVARIANT if norm else VARYING),
        )
        self.boundary(
            "from_local",
            REWRAP,
            module=module,
            param=fqn,
            tensor=gathered,
            src=None,
            dst=Layout(tp, (on_tp,)),
            declared=Layout(tp, (PARTIAL,)) if norm and variant == "both" else None,
            value=(INVARIANT, INVARIANT if norm else VARYING),
        )
        if variant == "user_norm":
            self.boundary(
                "to_local",
                USER_NORM,
                module=module,
                param=fqn,
                tensor=gathered,
                src=Layout(tp, (on_tp,)),
                dst=None,
                value=(INVARIANT, INVARIANT),
            )
        return ParamRecord(
            fqn=fqn,
            layout=layout,
            tensor=small,
            requires_grad=True,
            grad=None,
            boundaries=tuple(range(mark, len(self.boundaries))),
            uses=(
                ParamUse(
                    op="aten._fused_rms_norm.default" if norm else "aten.mm.default",
                    module_fqn=module,
                    layout=None if variant == "user_norm" else Layout(tp, (on_tp,)),
                    result=None if variant == "user_norm" else Layout(tp, (shard(1),)),
                    call_site=USER_NORM if variant == "user_norm" else MODEL_NORM,
                ),
            ),
        )

    def backward(self, param: ParamRecord, variant: str = "stock") -> ParamRecord:
        """Record the gradient's way back through the boundaries of ``param``.

        Returns:
            The parameter with its gradient.
        """
        assert param.layout is not None
        on_fsdp, on_tp = param.layout.placements
        norm = on_tp.is_replicate
        module = param.fqn.rpartition(".")[0]
        fsdp, tp = ("fsdp",), ("tp",)
        first, wrap, gather, unwrap, rewrap, *rest = param.boundaries
        whole = self.boundaries[rewrap].tensor
        local = self.boundaries[wrap].tensor
        numel = _numel(whole.local_shape)
        on_tp_now = VARYING

        label = PARTIAL if norm else on_tp
        if rest:
            lied = State(StateKind.VARYING, blame=(rest[0],))
            self.cross(
                rest[0],
                None,
                (VARYING, on_tp_now),
                Layout(tp, (REPLICATE,)),
                (VARYING, lied),
                whole,
            )
            on_tp_now, label = lied, REPLICATE
        reduces = label.is_partial and variant != "both"
        after = INVARIANT if reduces else on_tp_now
        self.cross(rewrap, Layout(tp, (label,)), (VARYING, on_tp_now), None, (VARYING, after), whole)
        if reduces:
            self.collective(
                "all_reduce",
                "tp",
                Phase.BACKWARD,
                boundary=rewrap,
                module=module,
                numel=numel,
                reduce_op="sum",
            )
        on_tp_now = after
        state = (VARYING, on_tp_now)
        self.cross(unwrap, None, state, Layout(fsdp, (PARTIAL,)), state, whole)
        self.cross(gather, Layout(fsdp, (PARTIAL,)), state, Layout(fsdp, (shard(0),)), state, whole)
        self.collective(
            "reduce_scatter",
            "fsdp",
            Phase.BACKWARD,
            boundary=gather,
            module=module,
            numel=numel,
            reduce_op="sum",
        )
        self.cross(wrap, Layout(fsdp, (shard(0),)), state, None, state, local)
        final = PARTIAL if norm and variant in ("to_local", "both") else REPLICATE if norm else on_tp
        if final.is_partial and on_tp_now.kind is StateKind.INVARIANT:
            state = (VARYING, State(StateKind.INVARIANT, blame=(first,)))
        grad_layout = Layout(param.layout.dims, (on_fsdp, final))
        self.cross(first, None, (VARYING, on_tp_now), grad_layout, state, local)
        return replace(param, grad=GradRecord(layout=grad_layout, state=state, dtype="float32"))

    def activations(self, module: str, count: int) -> None:
        """Record ``count`` activation boundaries in ``module``."""
        tensor = TensorInfo(global_shape=(4, 2048, 256), local_shape=(4, 1024, 256), dtype="float32")
        for _ in range(count):
            index = self.boundary(
                "redistribute",
                STYLE,
                module=module,
                tensor=tensor,
                src=Layout(("tp",), (shard(1),)),
                dst=Layout(("tp",), (REPLICATE,)),
                value=(VARYING, VARYING),
                user_site=MODEL_NORM,
            )
            self.collective(
                "all_gather",
                "tp",
                Phase.FORWARD,
                boundary=index,
                module=module,
                numel=_numel(tensor.local_shape),
            )
            self.cross(
                index,
                Layout(("tp",), (PARTIAL,)),
                (VARYING, VARYING),
                Layout(("tp",), (shard(1),)),
                (VARYING, VARYING),
                tensor,
            )

    def trace(self, model: str = "simple_fsdp.llama3 debugmodel") -> Trace:
        """Freeze."""
        return Trace(
            run=run_record(model),
            mesh=self.mesh,
            batch_dims=("fsdp",),
            params=tuple(self.params),
            boundaries=tuple(self.boundaries),
            collectives=tuple(self.collectives),
            ops=(
                OpCount(
                    op="aten.mm.default",
                    phase=Phase.FORWARD,
                    inputs=("(R)", "(S(0))"),
                    outputs=("(S(1))",),
                    count=42,
                ),
            ),
            assumed_invariant=2,
            random_ops=0,
        )


def run_record(model: str) -> RunRecord:
    """A traced run in one process."""
    return RunRecord(
        tool_version="0.1.0",
        versions=(
            ("python", "3.11.9"),
            ("torch", "2.13.0"),
            ("torchtitan", "0.2.2"),
            ("triton", "3.7.0"),
        ),
        model=model,
        config_path="configs/fsdp_tp.toml",
        config_sha256="5f2c9d1e8a7b6c5d4e3f2a1b0c9d8e7f6a5b4c3d2e1f0a9b8c7d6e5f4a3b2c1d",
        overrides=("--training.seq_len", "128"),
        world_size=4,
        backend="fake",
        device_type="meta",
        evidence=("traced",),
        notes=("data_parallel_shard_degree is -1 in the file; 2 ranks were taken for it.",),
        phases=(("build", 0.8), ("trace", 0.75), ("judge", 0.05)),
    )


def llama_params(layers: int) -> list[tuple[str, Placement, Placement, tuple[int, ...]]]:
    """FQN, placement on fsdp, placement on tp and shape, in the model's order."""
    colwise, rowwise, whole = (STRIDED, shard(0)), (shard(0), shard(1)), (shard(0), REPLICATE)
    out = [("tok_embeddings.weight", *colwise, (2048, 256))]
    for i in range(layers):
        at = f"layers.{i}."
        out += [(f"{at}attention.{n}.weight", *colwise, (256, 256)) for n in ("wq", "wk", "wv")]
        out.append((f"{at}attention.wo.weight", *rowwise, (256, 256)))
        out.append((f"{at}feed_forward.w1.weight", *colwise, (768, 256)))
        out.append((f"{at}feed_forward.w2.weight", *rowwise, (256, 768)))
        out.append((f"{at}feed_forward.w3.weight", *colwise, (768, 256)))
        out += [(f"{at}{n}.weight", *whole, (256,)) for n in ("attention_norm", "ffn_norm")]
    out.append(("norm.weight", *whole, (256,)))
    out.append(("output.weight", *colwise, (2048, 256)))
    return out


def build(
    layers: int,
    variants: dict[str, str] | None = None,
    default: str = "stock",
    activations: int = 1,
) -> Builder:
    """A llama3 of ``layers`` layers whose parameters have the named variant each."""
    b = Builder()
    chosen = variants or {}
    for i in range(layers):
        b.activations(f"layers.{i}.attention", activations)
    for fqn, on_fsdp, on_tp, shape in llama_params(layers):
        variant = chosen.get(fqn, default)
        b.params.append(b.wrapped_param(fqn, on_fsdp=on_fsdp, on_tp=on_tp, shape=shape, variant=variant))
    for at in reversed(range(len(b.params))):
        b.params[at] = b.backward(b.params[at], chosen.get(b.params[at].fqn, default))
    b.collective(
        "all_reduce",
        "tp",
        Phase.BACKWARD,
        op="aten.embedding_dense_backward.default",
        module="tok_embeddings",
        reduce_op="sum",
        numel=4,
    )
    return b


def judge(param: ParamRecord, mesh_dim: str, **changes: object) -> Judgement:
    """An ok judgement of ``param`` on ``mesh_dim``, with ``changes``."""
    placement = param.layout.on(mesh_dim) if param.layout else None
    label = param.grad.layout.on(mesh_dim) if param.grad and param.grad.layout else None
    base = Judgement(
        param_fqn=param.fqn,
        mesh_dim=mesh_dim,
        verdict=Verdict.OK,
        placement=placement,
        expected=placement or REPLICATE,
        observed=label,
        factor=Fraction(1),
        reason="Label and state agree.",
        path=(),
        evidence=(Evidence(strength="traced", statement="The label is what the state says."),),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def deferred(param: ParamRecord) -> Judgement:
    """The gradient is left Partial on tp."""
    return judge(
        param,
        "tp",
        verdict=Verdict.DEFERRED,
        reason="Each tp rank holds its part; the sum over tp is still to be made.",
    )


def doubled(param: ParamRecord) -> tuple[Judgement, Finding]:
    """The proposed fix of torchtitan PR 2532 applied alone."""
    cause, rewrap = param.boundaries[0], param.boundaries[4]
    evidence = (
        Evidence(
            strength="traced",
            statement="the gradient arrives equal on all 2 tp ranks and leaves labelled Partial(sum)",
        ),
    )
    judgement = judge(
        param,
        "tp",
        verdict=Verdict.DOUBLE_REDUCTION,
        factor=Fraction(2),
        reason="A complete gradient is labelled Partial(sum).",
        path=(cause, rewrap),
        evidence=evidence,
    )
    finding = Finding(
        rule_id="PA202",
        rule_name="double-reduction",
        severity=Severity.ERROR,
        param_fqn=param.fqn,
        module_fqn=param.fqn.rpartition(".")[0],
        mesh_dim="tp",
        message=f"The gradient of {param.fqn} is summed over tp twice.",
        expected="Replicate on tp, summed over tp once",
        observed="Partial(sum) on tp of a gradient that is already summed over tp",
        evidence=evidence,
        path=(
            PathStep(
                role="cause: declares Partial(sum) for a complete gradient",
                kind="to_local",
                call_site=TO_LOCAL_PARTIAL,
                boundary=cause,
            ),
            PathStep(
                role="had already reduced it: Partial(sum) to Replicate",
                kind="from_local",
                call_site=REWRAP,
                boundary=rewrap,
            ),
        ),
        next_step="declare Partial() in neither call or in both: "
        "DTensor.from_local(..., grad_placements=...); placement-audit explain PA202",
        fingerprint=f"double-{param.fqn}",
    )
    return judgement, finding


def lost(param: ParamRecord) -> tuple[Judgement, Finding]:
    """A norm module that calls to_local() on its weight."""
    cause = param.boundaries[5]
    evidence = (
        Evidence(
            strength="traced",
            statement="the gradient arrives varying over the 2 tp ranks and leaves labelled Replicate",
        ),
    )
    judgement = judge(
        param,
        "tp",
        verdict=Verdict.LOST_REDUCTION,
        factor=None,
        reason="A per-rank part of the gradient is labelled Replicate.",
        path=(cause,),
        evidence=evidence,
    )
    finding = Finding(
        rule_id="PA201",
        rule_name="lost-reduction",
        severity=Severity.ERROR,
        param_fqn=param.fqn,
        module_fqn=param.fqn.rpartition(".")[0],
        mesh_dim="tp",
        message=f"The gradient of {param.fqn} is never summed over tp.",
        expected="Replicate on tp, summed over tp",
        observed="Replicate on tp, not summed over tp",
        evidence=evidence,
        path=(PathStep(role="cause", kind="to_local", call_site=USER_NORM, boundary=cause),),
        next_step="give to_local(grad_placements=[Partial()]); placement-audit explain PA201",
        fingerprint=f"lost-{param.fqn}",
    )
    return judgement, finding


BLIND_SPOTS = (
    "A forward that is not equivalent to one device, such as a local mean over a shard.",
    "A divisor that is wrong for every parameter alike, such as averaging twice.",
    "Random ops, taken as equal on all ranks.",
)


def freeze(
    b: Builder,
    judgements: list[Judgement],
    findings: list[Finding],
    outcome: Outcome | None = None,
) -> Report:
    """A report over what ``b`` collected."""
    bad = any(f.severity is not Severity.NOTE for f in findings)
    outcome = outcome or (Outcome.FINDINGS if bad else Outcome.CLEAN)
    status = {Outcome.CLEAN: 0, Outcome.FINDINGS: 1, Outcome.INCOMPLETE: 3}[outcome]
    return Report(
        outcome=outcome,
        exit_status=status,
        judgements=tuple(judgements),
        findings=tuple(findings),
        blind_spots=BLIND_SPOTS,
        trace=b.trace(),
    )


def stock_report(layers: int = 6, activations: int = 1) -> Report:
    """Released SimpleFSDP: every parameter ok."""
    b = build(layers, activations=activations)
    return freeze(b, [judge(p, d) for p in b.params for d in MESH.dim_names], [])


def one_sided_report(layers: int = 6, activations: int = 1) -> Report:
    """PR 2532 alone: every norm weight doubled on tp."""
    b = build(layers, default="to_local", activations=activations)
    judgements, findings = [], []
    for p in b.params:
        judgements.append(judge(p, "fsdp"))
        if p.layout is not None and p.layout.placements[1].is_replicate:
            j, f = doubled(p)
            judgements.append(j)
            findings.append(f)
        else:
            judgements.append(judge(p, "tp"))
    return freeze(b, judgements, findings)


def two_sided_report(layers: int = 2) -> Report:
    """Partial given to both ends: norm weights deferred on tp, nothing wrong."""
    b = build(layers, default="both")
    judgements = []
    for p in b.params:
        norm = p.layout is not None and p.layout.placements[1].is_replicate
        judgements += [judge(p, "fsdp"), deferred(p) if norm else judge(p, "tp")]
    return freeze(b, judgements, [])


def mixed_report() -> Report:
    """Three layers with one of everything: ok, deferred, doubled, lost, not judged."""
    variants = {f"layers.{i}.ffn_norm.weight": "to_local" for i in range(3)}
    variants["layers.1.attention_norm.weight"] = "user_norm"
    variants["norm.weight"] = "both"
    b = build(3, variants)
    frozen = ParamRecord(
        fqn="rope.scale",
        layout=None,
        tensor=TensorInfo(global_shape=(), local_shape=(), dtype="float32"),
        requires_grad=False,
        grad=None,
        boundaries=(),
        uses=(),
    )
    judgements: list[Judgement] = []
    findings: list[Finding] = []
    for p in b.params:
        judgements.append(judge(p, "fsdp"))
        match variants.get(p.fqn):
            case "to_local":
                j, f = doubled(p)
                judgements.append(j)
                findings.append(f)
            case "user_norm":
                j, f = lost(p)
                judgements.append(j)
                findings.insert(0, f)
            case "both":
                judgements.append(deferred(p))
            case _:
                judgements.append(judge(p, "tp"))
    b.params.append(frozen)
    judgements += [
        judge(
            frozen,
            d,
            verdict=Verdict.NOT_JUDGED,
            factor=None,
            reason="requires_grad is False: it is not trained.",
            evidence=(),
        )
        for d in MESH.dim_names
    ]
    return freeze(b, judgements, findings)


def _local_shape(shape: tuple[int, ...], placements: tuple[Placement, ...]) -> tuple[int, ...]:
    local = list(shape)
    for p in placements:
        if p.is_shard and p.tensor_dim is not None:
            local[p.tensor_dim] //= 2
    return tuple(local)


def _numel(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out
