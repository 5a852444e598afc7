"""Serves a model over HTTP, in TensorFlow Serving's REST form: `collective serve`."""
