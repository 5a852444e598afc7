"""Has optimizers for recommendation models, in addition to those of `tf.compat.v1.train`.

    train = collective.train.RowWiseAdagradOptimizer(0.1).minimize(loss)

All of them train static tables, dynamic tables and replicated variables, by the same rule on any
number of ranks. They are TensorFlow optimizers: `minimize`, `compute_gradients`, `apply_gradients`
and `get_slot` are those of `tf.compat.v1.train.Optimizer`, and checkpoints hold their slots. A row
that occurs several times in a batch is updated once, by the sum of its gradients. All calculations
use the variable's type.

| class | what it does |
|---|---|
| `RowWiseAdagradOptimizer` | Adagrad with one accumulator for each row |
| `AdagradDecayOptimizer`, `AdagradDecayOptimizerV2` | Adagrad whose accumulators decay |
| `AdamAsyncOptimizer` | Adam or RMSProp for the rows of the batch; a variable's own steps |
| `LazyAdamOptimizer` | Adam for the rows of the batch |
| `AdamWOptimizer` | Adam with decoupled weight decay |
| `GroupLassoFtrlOptimizer` | FTRL that makes whole rows zero |
| `PersiaAdagradOptimizer` | PERSIA's Adagrad: its accumulators may forget |
"""

from collective.train.adagrad_decay import AdagradDecayOptimizer, AdagradDecayOptimizerV2
from collective.train.adam_async import AdamAsyncOptimizer
from collective.train.adam_w import AdamWOptimizer
from collective.train.group_lasso_ftrl import GroupLassoFtrlOptimizer
from collective.train.lazy_adam import LazyAdamOptimizer
from collective.train.persia_adagrad import PersiaAdagradOptimizer
from collective.train.row_wise_adagrad import RowWiseAdagradOptimizer

AdagradDecayV2Optimizer = AdagradDecayOptimizerV2

__all__ = [
    "AdagradDecayOptimizer",
    "AdagradDecayOptimizerV2",
    "AdagradDecayV2Optimizer",
    "AdamAsyncOptimizer",
    "AdamWOptimizer",
    "GroupLassoFtrlOptimizer",
    "LazyAdamOptimizer",
    "PersiaAdagradOptimizer",
    "RowWiseAdagradOptimizer",
]
