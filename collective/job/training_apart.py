"""Refuses to let the ranks of a job train apart, each with its own model.

A script that was never converted, or that leaves scope() before it trains, would run N unrelated
trainings that save into one folder, and would exit with 0. So in a job of several ranks, an
optimizer's first update outside of any scope() is an error on every rank that reaches it:

    apply_gradients ──eager, or in a function of TensorFlow 2──▶ error
          └──────────in a graph──▶ remembered ──a session runs it──▶ error
                                       └──a session that saves checkpoints begins──▶ error

A script that builds an update in a graph may only want to evaluate. But a monitored session that
saves checkpoints is meant to train, and it writes its first checkpoint before it runs an update:
every rank would write into the same folder. Scripts that reduce by themselves aren't affected:
those that have called Horovod's `init`, and those in a cluster of TensorFlow servers.

The launcher loads this module into every Python process of a rank
(`startup_hook/sitecustomize.py`). It must cost nothing if TensorFlow isn't used: it waits until
another module imports the modules of `REPLACED`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import sys
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

VARIABLE = "COLLECTIVE_INDEPENDENT"
_BUILDS_UPDATES = ("Apply", "Assign", "Scatter")
_CALLS = frozenset({"If", "While", "Case", "PartitionedCall", "StatefulPartitionedCall"})

Replaced = collections.namedtuple("Replaced", "module name replacement why")
Replaced.__doc__ = """Describes what is replaced in a module, as soon as that is imported.

Attributes:
    module: the module's name.
    name: the function's, with its class.
    replacement: a function that is called with the original, and with the caller's arguments.
    why: what would go wrong without it.
"""


class _Watch:
    """Says whether this process is a rank that must not train apart.

    Attributes:
        size: how many ranks the job has.
        uses_horovod: whether the script has started Horovod, and so reduces by itself.
        starts_horovod: whether this library is starting Horovod.
        updates: for each graph, the operations that update variables outside of any scope.
    """

    def __init__(self) -> None:
        self.size = 1
        self.uses_horovod = False
        self.starts_horovod = False
        self.updates: Any = weakref.WeakKeyDictionary()
        self._is_allowed = False

    def allow(self) -> None:
        """Lets this process train by itself from now on."""
        self._is_allowed = True

    @property
    def is_active(self) -> bool:
        """Tells whether an update that is made now would train this rank apart."""
        if self.size < 2 or self._is_allowed or self.uses_horovod or is_independent(os.environ):
            return False
        scope = sys.modules.get("collective.scope")
        return not (scope is not None and scope.SCOPES.is_open) and not _is_in_cluster()


_WATCH = _Watch()
allow = _WATCH.allow


def is_independent(environment: Any) -> bool:
    """Tells whether the user has asked for independent processes.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    text = environment.get(VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ValueError(
            f"{VARIABLE}={text}: give 1 for ranks that train models of their own, else 0"
        )
    return bool(text == "1")


def watch(size: int, has_horovod: bool = False) -> None:
    """From now on lets no rank train apart.

    It may be called repeatedly, and also by the code that first learns about several ranks: the
    launcher's hook at the start of Python, or a strategy in a job that another launcher has
    started.

    Args:
        size: how many ranks the job has.
        has_horovod: whether Horovod runs; unless `starting_horovod` did it, the script started it.
    """
    if has_horovod and not _WATCH.starts_horovod:
        _WATCH.uses_horovod = True
    is_first = _WATCH.size < 2
    _WATCH.size = size
    if size < 2 or not is_first or is_independent(os.environ):
        return
    sys.meta_path.insert(0, _Finder())
    for name in _ROWS:
        if name in sys.modules:
            _replace(sys.modules[name])


@contextlib.contextmanager
def starting_horovod() -> Iterator[None]:
    """Marks a start of Horovod as the library's, not the script's."""
    before = _WATCH.uses_horovod
    _WATCH.starts_horovod = True
    try:
        yield
    finally:
        _WATCH.uses_horovod = before


# What is replaced


def _start_horovod(original: Any, *args: Any, **kwargs: Any) -> Any:
    _WATCH.uses_horovod = True
    return original(*args, **kwargs)


def _apply_gradients(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    if not _WATCH.is_active:
        return original(optimizer, *args, **kwargs)
    pairs = list(args[0] if args else kwargs.get("grads_and_vars", ()))
    if args:
        args = (pairs, *args[1:])
    else:
        kwargs["grads_and_vars"] = pairs
    variables = [variable for _, variable in pairs]
    if any(_is_on_server(v) for v in variables):
        return original(optimizer, *args, **kwargs)
    graph = _graph()
    if graph is None:
        raise RuntimeError(_words(variables))
    is_inside = _ops().get_default_graph() is not graph
    last = graph.version + 1
    applied = original(optimizer, *args, **kwargs)
    made = set() if is_inside else _updates_since(graph, last, applied)
    if not made and not is_inside:
        raise RuntimeError(_words(variables))
    if not _WATCH.updates:
        _replace_runs()
    known = _WATCH.updates.setdefault(graph, _Updates(_words(variables)))
    known.operations |= made
    known.inside = known.inside or is_inside
    known.harmless.clear()
    return applied


def _apply_keras_3(
    original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    """Replaces the function by which every optimizer of Keras 3 updates; it trains in no graph."""
    if _WATCH.is_active:
        raise RuntimeError(_words(trainable_variables or optimizer.variables))
    return original(optimizer, grads, trainable_variables)


def _run(original: Any, session: Any, fetches: Any, *args: Any, **kwargs: Any) -> Any:
    _check(session.graph, fetches)
    return original(session, fetches, *args, **kwargs)


def _make_callable(original: Any, session: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces the function that makes the functions with which Keras runs a graph."""
    _check(session.graph, [*options.fetch, *options.target])
    return original(session, options, *args, **kwargs)


def _begin(
    original: Any, session: Any, session_creator: Any, hooks: Any, *args: Any, **kwargs: Any
) -> Any:
    if any(_saves(hook) for hook in hooks or ()):
        _refuse_if_apart(_ops().get_default_graph())
    return original(session, session_creator, hooks, *args, **kwargs)


def _supervise(original: Any, supervisor: Any, graph: Any = None, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("logdir") and kwargs.get("is_chief", True):
        _refuse_if_apart(graph or _ops().get_default_graph())
    return original(supervisor, graph, *args, **kwargs)


APART = "Each rank would train a model of its own, and the job would end as if all were well."
ITS_OWN = "A script that reduces by Horovod would be refused."
REPLACED = (
    *(
        Replaced(module, name, _apply_gradients, APART)
        for module, name in (
            ("tensorflow.python.training.optimizer", "Optimizer.apply_gradients"),
            ("tensorflow.python.keras.optimizer_v2.optimizer_v2", "OptimizerV2.apply_gradients"),
            ("keras.src.optimizers.optimizer", "_BaseOptimizer.apply_gradients"),
            ("keras.src.optimizers.legacy.optimizer_v2", "OptimizerV2.apply_gradients"),
            ("tf_keras.src.optimizers.optimizer", "_BaseOptimizer.apply_gradients"),
            ("tf_keras.src.optimizers.legacy.optimizer_v2", "OptimizerV2.apply_gradients"),
        )
    ),
    Replaced("keras.src.optimizers.base_optimizer", "BaseOptimizer.apply", _apply_keras_3, APART),
    Replaced("horovod.common.basics", "HorovodBasics.init", _start_horovod, ITS_OWN),
)
# Replaced only once a script has made an update outside of scope() in a graph.
SESSION = "tensorflow.python.client.session"
MONITORED = "tensorflow.python.training.monitored_session"
SUPERVISOR = "tensorflow.python.training.supervisor"
WRITTEN = "Every rank would write its first checkpoint into one folder before any is refused."
REPLACED_RUNS = (
    Replaced(SESSION, "BaseSession.run", _run, APART),
    Replaced(SESSION, "BaseSession.partial_run_setup", _run, APART),
    Replaced(SESSION, "BaseSession.make_callable", _run, APART),
    Replaced(SESSION, "BaseSession._make_callable_from_options", _make_callable, APART),
    Replaced(MONITORED, "_MonitoredSession.__init__", _begin, WRITTEN),
    Replaced(SUPERVISOR, "Supervisor.__init__", _supervise, WRITTEN),
)
_ROWS: dict[str, list[Any]] = {}
for _row in REPLACED:
    _ROWS.setdefault(_row.module, []).append(_row)


class _Finder:
    """Finds no module itself, but sees which modules are imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _ROWS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _replace(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def _replace(module: Any) -> None:
    for row in _ROWS.get(module.__name__, ()):  # An archive has one loader for all its modules.
        original = _put(module, row)
        if row.replacement is _start_horovod:
            _replace_bound(original)


def _put(module: Any, row: Any) -> Any:
    """Installs a row's replacement; returns the original."""
    owner_name, _, attribute = row.name.rpartition(".")
    owner = getattr(module, owner_name, None)
    original = getattr(owner, attribute, None)
    if original is None:  # missing in this version
        return None

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return row.replacement(original, *args, **kwargs)

    autograph = sys.modules.get("tensorflow.python.autograph.impl.api")
    setattr(owner, attribute, autograph.do_not_convert(replaced) if autograph else replaced)
    return original


def _replace_bound(original: Any) -> None:
    """Replaces Horovod's `init` in modules that have already imported it under their own name."""
    for name, module in list(sys.modules.items()):
        init = getattr(module, "init", None) if name.partition(".")[0] == "horovod" else None
        if getattr(init, "__func__", None) is original:
            module.init = functools.partial(_start_horovod, init)  # type: ignore[attr-defined]


def _replace_runs() -> None:
    for row in REPLACED_RUNS:
        if row.module in sys.modules:
            _put(sys.modules[row.module], row)


# Graphs


class _Updates:
    """Remembers the operations that update variables in a graph outside of any scope.

    Attributes:
        words: the text of the error.
        operations: the operations that update the variables.
        inside: whether a function of the graph updates some.
        harmless: the fetches that are known to update nothing.
    """

    def __init__(self, words: str):
        self.words = words
        self.operations: set[Any] = set()
        self.inside = False
        self.harmless: set[tuple[str, ...]] = set()


def _ops() -> Any:
    return sys.modules["tensorflow.python.framework.ops"]


def _graph() -> Any:
    """Returns the graph that a session will run; None if operations run without a session."""
    if _ops().executing_eagerly_outside_functions():
        return None
    graph = _ops().get_default_graph()
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    return graph


def _updates_since(graph: Any, last: int, applied: Any) -> set[Any]:
    """Returns the operation of `applied`, and the updates that it waits for."""
    first = getattr(applied, "op", applied)
    if getattr(first, "graph", None) is not graph:
        return set()
    made = {op for op in _upstream([first]) if op._id > last}
    return {op for op in made if any(word in op.type for word in _BUILDS_UPDATES)} | {first}


def _upstream(operations: Iterable[Any]) -> Iterator[Any]:
    stack, seen = list(operations), set(operations)
    while stack:
        op = stack.pop()
        yield op
        for other in (*(x.op for x in op.inputs), *op.control_inputs):
            if other not in seen:
                seen.add(other)
                stack.append(other)


def _check(graph: Any, fetches: Any) -> None:
    known = _WATCH.updates.get(graph)
    if known is None or not _is_watched():
        return
    operations = _fetched(graph, fetches)
    names = tuple(op.name for op in operations)
    if names in known.harmless:
        return
    for op in _upstream(operations):
        if op in known.operations or (known.inside and op.type in _CALLS):
            raise RuntimeError(known.words)
    known.harmless.add(names)


def _refuse_if_apart(graph: Any) -> None:
    known = _WATCH.updates.get(graph)
    if known is not None and _is_watched():
        raise RuntimeError(known.words)


def _saves(hook: Any) -> bool:
    """Tells whether a session's hook saves checkpoints."""
    return any(kind.__name__ == "CheckpointSaverHook" for kind in type(hook).__mro__)


def _is_watched() -> bool:
    """Tells whether an update that trains apart may not run, even if a scope is open by now."""
    return not _WATCH.uses_horovod and not _is_in_cluster()


def _fetched(graph: Any, fetches: Any) -> list[Any]:
    operations = []
    for leaf in _leaves(fetches):
        with contextlib.suppress(TypeError, ValueError, KeyError):  # TensorFlow reports it
            element = graph.as_graph_element(leaf)
            operations.append(getattr(element, "op", element))
    return operations


def _leaves(fetches: Any) -> Iterator[Any]:
    """Yields the fetched objects, also in dictionaries whose keys have no order."""
    if hasattr(fetches, "values") and hasattr(fetches, "keys"):
        fetches = list(fetches.values())
    elif hasattr(fetches, "__attrs_attrs__"):
        fetches = [getattr(fetches, field.name) for field in fetches.__attrs_attrs__]
    elif hasattr(fetches, "values") and hasattr(fetches, "dense_shape"):  # tf.IndexedSlices
        fetches = [fetches.values, fetches.indices]
    if isinstance(fetches, (list, tuple)):
        for each in fetches:
            yield from _leaves(each)
    else:
        yield from sys.modules["tensorflow.python.util.nest"].flatten(
            fetches, expand_composites=True
        )


# Words


def _is_in_cluster() -> bool:
    """Tells whether this process is one of several servers of TensorFlow."""
    description = os.environ.get("TF_CONFIG")
    if not description:
        return False
    import json

    try:
        cluster = json.loads(description).get("cluster") or {}
        return sum(len(tasks) for tasks in cluster.values()) > 1
    except (AttributeError, TypeError, ValueError):
        return False


def _is_on_server(variable: Any) -> bool:
    job = (getattr(variable, "device", None) or "").partition("/job:")[2].partition("/")[0]
    return job not in ("", "localhost")


def _words(variables: Iterable[Any]) -> str:
    names = sorted(str(getattr(v, "name", "")).partition(":")[0] for v in variables)
    what = f"the variable '{names[0]}'" if names else "variables"
    if len(names) > 1:
        what += f" and {len(names) - 1} more"
    return (
        f"Each of the {_WATCH.size} ranks would train a model of its own: an optimizer updates "
        f"{what} outside of strategy.scope(), and the script has not called Horovod's init(). To "
        "train one model on all ranks, build and train it inside `with strategy.scope():`, where "
        "strategy is a collective.CollectiveStrategy(). If you want independent trainings, such as "
        f"a sweep, start the job with --independent, or set {VARIABLE}=1."
    )
