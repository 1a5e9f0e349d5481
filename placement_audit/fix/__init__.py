"""SimpleFSDP's tensor-parallel reduction, where and in what dtype it belongs, in a running process.

As released, `ReplicateComputation` sums the gradient of a weight that tensor parallelism replicates (a norm's) over the
tensor-parallel ranks first: the whole weight, in the compute dtype. After `install` it is summed once, after the
data-parallel reduction, on one rank's shard, in the reduce dtype. No file is touched; `uninstall` undoes it.

    import placement_audit.fix
    placement_audit.fix.install()

`placement_audit.fix.auto` installs on import: a torchtitan 0.2 job names it as ``experimental.custom_import``.
"""

from placement_audit.fix.install import Fixed, install, uninstall

__all__ = ["Fixed", "install", "uninstall"]
