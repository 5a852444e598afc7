"""The columns of a row, whether it comes from the census or from the generated click log."""

from __future__ import annotations

import numpy as np

CATEGORICAL = (
    "workclass",
    "education",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "native_country",
)
NUMERIC = ("age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week")
LABEL = "income"
MISSING = "?"  # a value like any other: that an answer is missing tells something, too

# A set of rows: for each column one array, in the same order. Categorical columns are text, numeric
# ones int64, the label int64 zeros and ones.
Rows = dict[str, np.ndarray]
