"""The folder that all ranks use, however a script names it."""

import os
import pathlib

import pytest

from collective.coordination import common_folder


@pytest.mark.parametrize("kind", [str, os.fsencode, pathlib.Path])
def test_a_folder_may_be_of_any_type_of_path(monkeypatch, tmp_path, kind):
    sent = []

    def run_on_all_ranks(session, doing, step):
        sent.append(step())
        return [*sent, str(tmp_path)]

    monkeypatch.setattr(common_folder.collectives, "rank", lambda: 0)
    monkeypatch.setattr(common_folder.barrier, "run_on_all_ranks", run_on_all_ranks)
    folder = kind(tmp_path)
    assert common_folder.settle("training", "model_dir", folder, stacklevel=2) == folder
    assert sent == [str(tmp_path)], "which JSON can hold"
