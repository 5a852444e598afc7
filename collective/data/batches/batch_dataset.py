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
    read: Callable[..., Iterable[Any]],
    like: Any,
    arguments: tuple[Any, ...] = (),
    packed_like: bytes | None = None,
) -> Any:
    """Makes a dataset of the batches that a function returns.

    Args:
        read: called for each iteration.
        like: a batch with the names, types and shapes of all.
        arguments: tensors, whose values `read` gets.
        packed_like: the layout of `like`, packed, if `read` yields packed batches; None: it yields
            batches.
    """
    import tensorflow.compat.v1 as tf
    import tensorflow.compat.v2 as tf2

    model = like.arrays()

    layout = _Layout(model)

    def flat(*values: Any) -> Iterator[tuple[np.ndarray, ...]]:
        for number, batch in enumerate(read(*values)):
            if packed_like is not None:
                if batch.layout == packed_like:
                    yield batch.flat()
                    continue
                batch = batch.unpacked()  # other names or types, or another order of them
            if not hasattr(batch, "arrays"):
                raise ValueError(f"batch {number} is no Batch, but {type(batch).__name__}.")
            arrays = batch.arrays()
            check_alike(arrays, model, f"batch {number}")
            yield layout.packed(arrays)

    types = [tf2.TensorSpec([None], tf.int64)]
    types += [tf2.TensorSpec([None], dtype) for dtype in layout.dtypes]
    return tf2.data.Dataset.from_generator(
        flat, args=arguments or None, output_signature=tuple(types)
    ).map(tf.autograph.experimental.do_not_convert(layout.tensors))


class _Layout:
    """Packs the arrays of a batch into one for each type, and takes tensors apart again.

    TensorFlow takes each array of a generator by Python: of forty columns that is most of the time.

    Attributes:
        dtypes: the types, in the order of the packed arrays.
    """

    def __init__(self, model: Parts):
        self._names = {role: list(of_role) for role, of_role in model.items()}
        self._parts: list[tuple[str, str, tuple[int, ...], np.dtype]] = []
        for name in model["ids"]:
            self._parts += [("ids", name, (), np.dtype(np.int64))] * 2
        for role in ("dense", "labels"):
            for name, array in model[role].items():
                self._parts.append((role, name, array.shape[1:], array.dtype))
        self.dtypes = list(dict.fromkeys(dtype for _, _, _, dtype in self._parts))

    def packed(self, arrays: Parts) -> tuple[np.ndarray, ...]:
        """Returns how many values each part has, and the values of each type."""
        flat: list[np.ndarray] = []
        for name in self._names["ids"]:
            ids = arrays["ids"][name]
            flat += [ids.values, ids.row_splits]
        for role in ("dense", "labels"):
            flat += [arrays[role][name].reshape(-1) for name in self._names[role]]
        counts = np.array([len(each) for each in flat])
        of_type = [
            np.concatenate([each for each in flat if each.dtype == dtype]) for dtype in self.dtypes
        ]
        return counts, *of_type

    def tensors(self, counts: Any, *packed: Any) -> dict[str, dict[str, Any]]:
        """Returns the tensors of an element."""
        import tensorflow.compat.v1 as tf

        flat: dict[int, tf.Tensor] = {}
        for dtype, values in zip(self.dtypes, packed):
            places = [i for i, part in enumerate(self._parts) if part[3] == dtype]
            pieces = tf.split(values, tf.gather(counts, places), num=len(places))
            flat.update(zip(places, pieces))
        element: dict[str, dict[str, Any]] = {"ids": {}, "dense": {}, "labels": {}}
        for place, (role, name, shape, _) in enumerate(self._parts):
            if role != "ids":
                element[role][name] = tf.reshape(flat[place], [-1, *shape])
            elif name not in element["ids"]:
                element["ids"][name] = tf.RaggedTensor.from_row_splits(
                    flat[place], flat[place + 1], validate=False
                )
        return element
