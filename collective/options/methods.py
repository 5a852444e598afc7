"""Lets methods take options: those of an options class, and the tuning of other libraries."""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, TypeVar, cast

from collective.options import declaration
from collective.options.declaration import INHERIT

if TYPE_CHECKING:
    from typing_extensions import Concatenate, ParamSpec

    Keywords = ParamSpec("Keywords")

Method = TypeVar("Method", bound=Callable[..., Any])
Owner = TypeVar("Owner")
Result = TypeVar("Result")

# Tuning that scripts pass to other libraries. HybridBackend registers emb_backend, emb_num_groups,
# comm_…, grad_lazy_sync and so on with its context; SparseOperationKit takes the rest in its
# layers.
FOREIGN_PREFIXES = ("emb_", "comm_", "grad_", "data_")
FOREIGN = frozenset(
    {
        "sharding",
        "use_hierarchical_embedding_lookup",
        "batch_size",
        "model_dir",
        "keep_checkpoint_max",
        "keep_checkpoint_every_n_hours",
        "mode",
        "global_batch_size",
        "max_vocabulary_size_per_gpu",
        "slot_num",
        "max_nnz",
        "max_feature_num",
        "nnz_per_slot",
        "use_hashtable",
        "dynamic_input",
        "var_type",
        "key_type",
        "init_capacity",
        "max_capacity",
        "hotness",
    }
)


def takes(
    options: Callable[Keywords, Any],
) -> Callable[
    [Callable[[Owner, dict[str, Any]], Result]], Callable[Concatenate[Owner, Keywords], Result]
]:
    """Lets a method take the options of a class as keywords: a decorator.

    The method gets the options that the call gave, after their check. Its signature, for type
    checkers and for `help`, has all options; in its docstring, the line {options} becomes their
    documentation. Tuning of other libraries has no effect.

    Args:
        options: the options class.
    """
    kind = cast(type, options)
    known = declaration.names(kind)

    def decorate(method: Callable[[Owner, dict[str, Any]], Result]) -> Any:
        name = method.__name__

        @functools.wraps(method)
        def with_options(self: Owner, /, *positional: Any, **keywords: Any) -> Result:
            if positional:
                raise TypeError(
                    f"{name}() takes its options by name, as in {name}({known[0]}=…), not "
                    f"{', '.join(map(repr, positional))}."
                )
            others = {other: keywords.pop(other) for other in list(keywords) if other not in known}
            tolerate_foreign(name, known, others)
            given = declaration.given(**keywords)
            # Checked here, where the script can see which call is wrong.
            kind(**given)
            return method(self, given)

        with_options.__doc__ = _documented(method, kind)
        signature = _signature(method, kind)
        with_options.__dict__["__signature__"] = signature
        with_options.__annotations__ = {
            name: parameter.annotation
            for name, parameter in signature.parameters.items()
            if parameter.annotation is not inspect.Parameter.empty
        }
        # What documents functions would show the method as it is written.
        del with_options.__dict__["__wrapped__"]
        return with_options

    return decorate


def takes_foreign(*known: str) -> Callable[[Method], Method]:
    """Lets a method take options that tune other libraries, which have no effect: a decorator.

    Neither its signature nor a type checker knows of them: an option that is misspelt is found.

    Args:
        known: the method's own options, for the message of an unknown one.
    """

    def decorate(method: Method) -> Method:
        parameters = inspect.signature(method).parameters

        @functools.wraps(method)
        def with_others(*args: Any, **kwargs: Any) -> Any:
            others = {name: kwargs.pop(name) for name in list(kwargs) if name not in parameters}
            tolerate_foreign(method.__name__, list(known), others)
            return method(*args, **kwargs)

        return cast(Method, with_others)

    return decorate


def tolerate_foreign(method: str, known: Sequence[str], others: dict[str, Any]) -> None:
    """Warns of options that tune other libraries, and refuses unknown ones.

    Args:
        method: the method's name, for messages.
        known: its own options.
        others: the other options it was given.

    Raises:
        TypeError: an option is neither the method's nor known to be another library's. The message
            names the most similar one.
    """
    foreign = sorted(o for o in others if o in FOREIGN or o.startswith(FOREIGN_PREFIXES))
    unknown = sorted(set(others) - set(foreign))
    if unknown:
        nearest = [match for name in unknown for match in difflib.get_close_matches(name, known, 1)]
        hint = f" Did you mean {', '.join(nearest)}?" if nearest else ""
        raise TypeError(
            f"{method}() has no option {', '.join(unknown)}.{hint} Its options: {', '.join(known)}."
        )
    if foreign:
        if len(foreign) == 1:
            words = "tunes another library and has no effect here; leave it out to silence this."
        else:
            words = "tune another library and have no effect here; leave them out to silence this."
        warnings.warn(f"{method}(): {', '.join(foreign)} {words}", stacklevel=3)


def _documented(method: Callable[..., Any], kind: type) -> str:
    """Returns a method's docstring with the documentation of its options."""
    return inspect.cleandoc(method.__doc__ or "").replace(
        "{options}", declaration.documentation(kind)
    )


def _signature(method: Callable[..., Any], kind: type) -> inspect.Signature:
    """Returns a method's signature with a keyword for each of its options."""
    itself = next(iter(inspect.signature(method).parameters.values()))
    try:
        types = typing.get_type_hints(kind)
    except TypeError:  # Python 3.9 can't evaluate `A | B`: the types stay as they are written.
        types = {name: field.type for name, field in declaration.fields(kind).items()}
    keywords = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=INHERIT, annotation=types[name]
        )
        for name in declaration.names(kind)
    ]
    return inspect.signature(method).replace(parameters=[itself, *keywords])
