"""Names sessions, their hooks and summaries inside TensorFlow."""

from __future__ import annotations

from tensorflow.python.client import session as session
from tensorflow.python.client.session import BaseSession as BaseSession
from tensorflow.python.summary.writer import writer as writer
from tensorflow.python.training import basic_session_run_hooks as basic_session_run_hooks
from tensorflow.python.training import monitored_session as monitored_session
from tensorflow.python.training import training_util as training_util
