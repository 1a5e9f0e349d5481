"""What a rank does for the tests and the benchmark: many variants in one launch."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from placement_audit import Job, Report, audit, audit_factory
from placement_audit.config import RankEnv
from tests.faults import BY_NAME
from tests.faults.family import Family
from tests.faults.truth import Truth, truth_of

Item = tuple[str, str]
"""A family's name and a variant's."""


def mesh_of(family: Family) -> DeviceMesh:
    """The family's mesh, in the process group that is there."""
    return init_device_mesh("cpu", tuple(family.mesh.values()), mesh_dim_names=tuple(family.mesh))


def audited(job: Job) -> Report:
    """`audit` of a job."""
    arguments = {f.name: getattr(job, f.name) for f in fields(Job)}
    return audit(arguments.pop("step"), arguments.pop("model"), **arguments)


def traced(family: Family, variant: str) -> Report:
    """The traced report on a variant, in this process."""
    return audit_factory(lambda: family.job(mesh_of(family), variant), world_size=family.ranks)


def truths(_env: RankEnv, items: Sequence[Item]) -> dict[Item, Truth]:
    """The numbers of each."""
    return {i: truth_of(_job(i), mesh_of(BY_NAME[i[0]])) for i in items}


def reports(_env: RankEnv, items: Sequence[Item]) -> dict[Item, Report | str]:
    """The measured report on each, or why there is none."""
    return {i: _report(i) for i in items}


def _report(item: Item) -> Any:
    try:
        return audited(_job(item))
    except Exception:
        return traceback.format_exc()


def _job(item: Item) -> Job:
    family = BY_NAME[item[0]]
    return family.job(mesh_of(family), item[1])
