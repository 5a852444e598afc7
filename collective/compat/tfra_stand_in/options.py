"""Has what scripts give a layer besides numbers: storage, policies and the model's mode."""

from __future__ import annotations

import enum
from typing import Any


class CuckooHashTableConfig:
    """Says nothing: a table on the CPU has no settings."""


class HkvEvictStrategy(enum.IntEnum):
    """Which rows a table of a GPU evicts when it is full; here none is."""

    LRU = 0
    LFU = 1
    EPOCHLRU = 2
    EPOCHLFU = 3
    CUSTOMIZED = 4


class HkvHashTableConfig:
    """Keeps the settings of a table on a GPU.

    Args:
        **settings: those of HierarchicalKV.
    """

    def __init__(self, **settings: Any):
        vars(self).update(settings)


class FileSystemSaver:
    """Takes where the files of a table are to be.

    Args:
        *args: proc_size, proc_rank, save_path, buffer_size.
        **kwargs: the same.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        del args, kwargs


class CuckooHashTableCreator:
    """Keeps what a table was to be made of.

    Args:
        config: a `CuckooHashTableConfig`.
        saver: a `FileSystemSaver`.
    """

    def __init__(self, config: Any = None, saver: Any = None):
        self.config, self.saver = config, saver


class HkvHashTableCreator(CuckooHashTableCreator):
    """Keeps what a table was to be made of.

    Args:
        config: an `HkvHashTableConfig`.
        saver: a `FileSystemSaver`.
    """


class TimestampRestrictPolicy:
    """Names the rows that were used last as those that `restrict` keeps."""


class FrequencyRestrictPolicy:
    """Names the rows that were used most as those that `restrict` keeps."""


class ModelMode:
    """Says whether lookups are trained.

    Attributes:
        CURRENT_SETTING: TRAIN or INFERENCE.
    """

    TRAIN = "train"
    INFERENCE = "inference"
    CURRENT_SETTING = TRAIN


def enable_train_mode() -> None:
    """Lets gradients reach the rows of lookups from now on."""
    ModelMode.CURRENT_SETTING = ModelMode.TRAIN


def enable_inference_mode() -> None:
    """Lets no gradients reach the rows of lookups that are made from now on."""
    ModelMode.CURRENT_SETTING = ModelMode.INFERENCE


def get_model_mode() -> str:
    """Returns 'train' or 'inference'."""
    return ModelMode.CURRENT_SETTING
