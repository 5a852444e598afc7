"""Makes tasks of TensorFlow Recommenders compute with the whole batch.

The negatives of a `Retrieval` task are the other items of the batch, and its loss adds up the
queries. So on each rank it gets the candidates of all ranks, the rank's own first: the task takes
the i-th candidate for the i-th query's, and what is left over for further negatives.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable

import tensorflow.compat.v1 as tf

from collective.ops import key_hashing
from collective.ops.communication import collectives
from collective.replication import cross_replica
from collective.wrappers import keras_losses

WHAT = "tfrs.tasks.Retrieval"
# Arguments of its `call` by which all candidates are handed over.
NEEDED = {"query_embeddings", "candidate_embeddings", "compute_metrics"}
# Those that have a number for each candidate.
OF_CANDIDATES = ("candidate_embeddings", "candidate_sampling_probability", "candidate_ids")


def retrieve(original: Callable[..., Any], task: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `Retrieval.__call__`: its loss is that of this rank's queries and all candidates.

    Raises:
        NotImplementedError: there are several ranks, and it has a `score_mask`.
    """
    if cross_replica.is_alone():
        return original(task, *args, **kwargs)
    signature = inspect.signature(type(task).call)
    if not NEEDED.issubset(signature.parameters):
        _warn_of_own_call(type(task).__name__)
        return original(task, *args, **kwargs)
    given = signature.bind(task, *args, **kwargs)
    given.apply_defaults()
    arguments = dict(list(given.arguments.items())[1:])
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name))
    if arguments.get("score_mask") is not None:
        raise NotImplementedError(
            "tfrs.tasks.Retrieval(…, score_mask=…): the mask has a column for each candidate of "
            "this rank, and on several ranks the candidates are those of all. Leave it out, or use "
            "remove_accidental_hits=True and candidate_ids."
        )
    own = {name: arguments[name] for name in OF_CANDIDATES if arguments.get(name) is not None}
    own = {name: tf.convert_to_tensor(x) for name, x in own.items()}
    count = tf.shape(own["candidate_embeddings"])[0]
    before = tf.reduce_sum(cross_replica.concatenated(WHAT, count[None])[: collectives.rank()])
    for name, x in own.items():
        # Ids are compared, no more.
        sent = key_hashing.of_strings(x) if x.dtype == tf.string else x
        arguments[name] = tf.roll(cross_replica.concatenated(WHAT, sent), -before, axis=0)
    metrics = task.factorized_metrics if arguments.pop("compute_metrics") else None
    loss = task._loss
    task._loss = keras_losses.of_all_ranks(loss)
    try:
        value = original(task, compute_metrics=False, **arguments)
    finally:
        task._loss = loss
    queries = arguments["query_embeddings"]
    if not metrics or queries.shape.rank != 2:
        return value
    weights = {"sample_weight": arguments.get("sample_weight")}
    candidates = own["candidate_embeddings"][: tf.shape(queries)[0]]
    ids = own.get("candidate_ids")
    updates = [
        metric.update_state(queries, candidates, true_candidate_ids=ids, **weights)
        for metric in metrics
    ]
    with tf.control_dependencies(updates):
        return tf.identity(value)


@functools.cache
def _warn_of_own_call(name: str) -> None:
    """Warns once of a subclass with another `call`."""
    if collectives.rank() == 0:
        tf.logging.warning(
            f"{name}.call has other arguments than {WHAT}.call: its candidates are those of each "
            "rank's own batch, and its loss, if it is a sum, that of the rank."
        )
