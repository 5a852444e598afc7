"""The folder that all ranks use, however a script names it."""

import pathlib

import pytest

from collective.coordination import common_folder


@pytest.mark.parametrize("folder", ["/a/b", b"/a/b", pathlib.PurePosixPath("/a/b")])
def test_a_folder_may_be_of_any_type_of_path(monkeypatch, folder):
    sent = []

    def exchange(session, doing, payload):
        sent.append(payload)
        return [payload, {"folder": "/a/b"}]

    monkeypatch.setattr(common_folder.barrier, "exchange", exchange)
    assert common_folder.settle("training", "model_dir", folder, stacklevel=2) == folder
    assert sent == [{"folder": "/a/b"}], "which JSON can hold"
