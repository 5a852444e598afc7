"""Activates the effects of scope(), and undoes them when the last scope closes."""

from __future__ import annotations

import functools
import warnings

from collective.checkpoint.saving import ownership
from collective.coordination.preemption import PREEMPTION
from collective.interception import rank0_output
from collective.interception.determinism import Determinism
from collective.interception.late_patches import LATE
from collective.interception.patches import PATCHES
from collective.interception.patching import Patches
from collective.monitoring import job_metrics
from collective.ops import kernel_device, native_library
from collective.ops.communication import carrier_choice, hierarchy, membership
from collective.ops.rows import file_systems
from collective.options import ScopeOptions
from collective.plan import job_machines
from collective.profiling import profiler
from collective.scope import SCOPES
from collective.tables import grouping
from collective.wrappers import distribution, keras

_determinism = Determinism()
_patches = Patches(PATCHES)


@functools.cache
def warn_of_missing_operations() -> None:
    """Warns once on each host, since each host may have a different installation."""
    reason = native_library.missing()
    if reason is not None and membership.local_rank() == 0:
        warnings.warn(
            "the compiled operations of collective are missing, so every lookup has an exchange of "
            f"its own and steps are slower; {reason}",
            RuntimeWarning,
            stacklevel=3,
        )


def _open_first() -> None:
    distribution.refuse_open()
    keras.refuse_second_package()
    file_systems.register_in_scope()
    kernel_device.let_memory_grow()
    _patches.apply()
    LATE.apply_present()
    rank0_output.quieten()
    if job_metrics.is_on():  # few jobs need the server's package
        from collective.monitoring import metrics_endpoint

        metrics_endpoint.start()


def _close_last() -> None:
    rank0_output.restore()
    LATE.restore()
    _patches.restore()
    try:
        # Outside, tables can't be saved, and closing a session would go unnoticed.
        ownership.marks().release_sessions()
    finally:
        profiler.finish()
        PREEMPTION.unwatch()


def _take_over(options: ScopeOptions | None) -> None:
    _determinism.set(options is not None and options.deterministic)
    carrier_choice.use(None if options is None else options.carrier)
    hierarchy.use(hierarchy.AUTO if options is None else options.hierarchical)
    grouping.use(options is not None and options.grouping)


job_machines.connect()
SCOPES.connect(first=_open_first, last=_close_last, changed=_take_over)
