"""Lets `tf.estimator.Estimator` work on all ranks."""
