"""Prints how many threads a script's first session starts."""

import os

import tensorflow.compat.v1 as tf

import collective


def threads():
    return len(os.listdir("/proc/self/task"))


def main():
    rank = collective.CollectiveStrategy().rank()
    before = threads()
    config = tf.ConfigProto(intra_op_parallelism_threads=9, inter_op_parallelism_threads=5)
    with tf.Graph().as_default(), tf.Session(config=config) as session:
        session.run(tf.random.normal([3]))
        started = threads() - before
    if rank == 0:
        print("threads", started, flush=True)


if __name__ == "__main__":
    main()
