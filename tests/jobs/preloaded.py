"""What every job of the pool needs, imported once, in the process that jobs are forked from.

It must stay without threads, which a fork would lose; OpenBLAS would start some, and the launcher
tells ranks on two cores to use one anyway.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

import horovod.tensorflow  # noqa: E402, F401
import tensorflow.compat.v1 as tf  # noqa: E402

import collective  # noqa: E402

# loaded only when it is asked for
LOADED = [getattr(collective, name) for name in dir(collective)]
LOADED += [collective.estimator.Estimator, tf.train.MonitoredTrainingSession]
del os.environ["OPENBLAS_NUM_THREADS"], os.environ["OMP_NUM_THREADS"]

THREADS = len(os.listdir("/proc/self/task"))
