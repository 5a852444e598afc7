"""Streams: batches that other processes, the loaders, make, and ranks take by number.

    loader's batches(stream, streams, first) ──▶ NumberedBatches ──▶ LoaderServer ──┐ Arrow Flight
                                                                                    ▼
    tf.data.Dataset of stream() ◀── StreamReader: which stream has the next one ◀── LoaderConnection

A rank asks for its part of the batch with a number, so what a loader has sent before doesn't
matter: the position in the ranks' checkpoint alone says what comes next.
"""
