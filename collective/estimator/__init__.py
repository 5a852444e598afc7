"""`tf.estimator.Estimator` on all ranks."""
