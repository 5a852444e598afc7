"""Has optimizers for recommendation models, beside those of `tf.compat.v1.train`.

    train = collective.train.RowWiseAdagradOptimizer(0.1).minimize(loss)

All of them train static tables, dynamic tables and replicated variables, by the same rule on any
number of ranks. They are optimizers of TensorFlow: `minimize`, `compute_gradients`,
`apply_gradients` and `get_slot` are those of `tf.compat.v1.train.Optimizer`, and checkpoints hold
their slots. A row that a batch names several times gets the sum of its gradients, once. All
calculations are in the type of the variable.

| class | what it does |
|---|---|
| `RowWiseAdagradOptimizer` | Adagrad with one accumulator for each row |
"""

from collective.train.row_wise_adagrad import RowWiseAdagradOptimizer

__all__ = [
    "RowWiseAdagradOptimizer",
]
