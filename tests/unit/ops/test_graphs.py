"""Graphs that a session has made final take what the library adds to them."""

import threading
import time

import tensorflow.compat.v1 as tf

from collective.ops.graph import graphs


def test_threads_take_turns_to_change_a_final_graph():
    """As a queue runner's and the main one, each of which prepares its first run."""
    graph, errors, inside = tf.Graph(), [], threading.Barrier(2, timeout=30)
    graph.finalize()

    def change() -> None:
        try:
            inside.wait()
            for _ in range(50):
                with graphs.open_for_changes(graph), graph.as_default():
                    tf.no_op()
                    time.sleep(0.001)  # the other thread goes on
                    tf.no_op()
                time.sleep(0.001)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=change, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert graph.finalized and len(graph.get_operations()) == 200
