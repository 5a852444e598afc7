"""Makes tensors of batches: values for a session, placeholders, datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

# {'ids': {…}, 'dense': {…}, 'labels': {…}}: arrays or tensors by name.
Parts = Mapping[str, Mapping[str, Any]]


def values(
    ids: Mapping[str, Any], dense: Mapping[str, Any], labels: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Returns what a session takes; see `Batch.arrays`."""
    import tensorflow.compat.v1 as tf

    ragged = {
        name: tf.ragged.RaggedTensorValue(value.values.view(np.int64), value.row_splits)
        for name, value in ids.items()
    }
    return {"ids": ragged, "dense": dict(dense), "labels": dict(labels)}


def placeholders(arrays: Parts) -> dict[str, dict[str, Any]]:
    """Makes placeholders for values like these."""
    import tensorflow.compat.v1 as tf

    made: dict[str, dict[str, Any]] = {
        "ids": {name: tf.ragged.placeholder(tf.int64, 1, []) for name in arrays["ids"]}
    }
    for role in ("dense", "labels"):
        made[role] = {
            name: tf.placeholder(array.dtype, [None, *array.shape[1:]])
            for name, array in arrays[role].items()
        }
    return made


def check_alike(arrays: Parts, like: Parts, what: str) -> None:
    """Refuses values with other names, types or shapes of a sample.

    Args:
        arrays: of `values`.
        like: of `values`, or placeholders.
        what: names the former, for the message.

    Raises:
        ValueError: they have.
    """
    found, wanted = _signature(arrays), _signature(like)
    if found != wanted:
        different = sorted(set(found.items()) ^ set(wanted.items()))
        names = dict.fromkeys(name for name, _ in different)
        texts = [
            f"{name} is {found.get(name, 'not there')} instead of {wanted.get(name, 'not there')}"
            for name in names
        ]
        raise ValueError(f"{what} isn't like the others: {', '.join(texts)}.")


def _signature(parts: Parts) -> dict[str, str]:
    return {
        f"{role}[{name!r}]": "ids"
        if role == "ids"
        else f"{np.dtype(value.dtype.name if hasattr(value.dtype, 'name') else value.dtype).name} "
        f"[{', '.join(['B', *map(str, value.shape[1:])])}]"
        for role, of_role in parts.items()
        for name, value in of_role.items()
    }


def dataset(batches: Iterable[Any] | Callable[[], Iterable[Any]], like: Any) -> Any:
    """Makes a dataset of batches; see `Batch.dataset`."""
    read = batches if callable(batches) else lambda: batches
    if not callable(batches) and iter(batches) is batches:
        raise TypeError(
            "Batch.dataset(…) reads batches again for each iteration, and an iterator is empty "
            "after the first one. Pass a list, or the function that makes the iterator."
        )
    if like is None:
        like = next(iter(read()), None)
    if like is None:
        raise ValueError("Batch.dataset(…): there are no batches; like=… says what they would be.")
    return generated(read, like)


def generated(
    read: Callable[..., Iterable[Any]], like: Any, arguments: tuple[Any, ...] = ()
) -> Any:
    """Makes a dataset of the batches that a function returns.

    Args:
        read: called for each iteration.
        like: a batch with the names, types and shapes of all.
        arguments: tensors, whose values `read` gets.
    """
    import tensorflow.compat.v1 as tf
    import tensorflow.compat.v2 as tf2

    model = like.arrays()

    def flat(*values: Any) -> Iterator[tuple[np.ndarray, ...]]:
        for number, batch in enumerate(read(*values)):
            if not hasattr(batch, "arrays"):
                raise ValueError(f"batch {number} is no Batch, but {type(batch).__name__}.")
            arrays = batch.arrays()
            check_alike(arrays, model, f"batch {number}")
            parts: list[np.ndarray] = []
            for name in model["ids"]:
                ids = arrays["ids"][name]
                parts += [ids.values, ids.row_splits]
            for role in ("dense", "labels"):
                parts += [arrays[role][name] for name in model[role]]
            yield tuple(parts)

    types = [tf2.TensorSpec([None], tf.int64)] * 2 * len(model["ids"])
    for role in ("dense", "labels"):
        types += [tf2.TensorSpec([None, *a.shape[1:]], a.dtype) for a in model[role].values()]

    @tf.autograph.experimental.do_not_convert
    def whole(*parts: tf.Tensor) -> dict[str, dict[str, Any]]:
        left = iter(parts)
        element: dict[str, dict[str, Any]] = {"ids": {}}
        for name in model["ids"]:
            ids, splits = next(left), next(left)
            element["ids"][name] = tf.RaggedTensor.from_row_splits(ids, splits, validate=False)
        for role in ("dense", "labels"):
            element[role] = {name: next(left) for name in model[role]}
        return element

    return tf2.data.Dataset.from_generator(
        flat, args=arguments or None, output_signature=tuple(types)
    ).map(whole)
